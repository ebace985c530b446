"""How a section of params travels as a Kubeflow parameter.

kfp cannot write null inside a parameter, so nulls travel as a list of their places. A section longer than the server takes
is written to a store that the tasks can read, named by its content, and a reference travels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rlpipe.errors import ArtifactError, ConfigError

MAX_PARAMETER_CHARACTERS = 10_000
"""What Kubeflow's API server takes as one parameter."""
REFERENCE, NULLS = "$reference", "$null"
PLACEHOLDER = "{{$"


def encoded(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section without nulls; `$null` lists where they were, each place as its keys from the top."""
    places: list[list[str | int]] = []
    content = dict(_without_nulls(section, [], places))
    return {**content, NULLS: places} if places else content


def _without_nulls(value: Any, place: list[str | int], places: list[list[str | int]]) -> Any:
    if isinstance(value, Mapping):
        places += [[*place, key] for key, inner in value.items() if inner is None]
        return {key: _without_nulls(inner, [*place, key], places) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        places += [[*place, index] for index, inner in enumerate(value) if inner is None]
        return ["" if inner is None else _without_nulls(inner, [*place, index], places) for index, inner in enumerate(value)]
    return value


def _with_nulls(section: Mapping[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps({key: value for key, value in section.items() if key != NULLS}))
    for *above, last in section.get(NULLS, ()):
        inner: Any = content
        for key in above:
            inner = inner[int(key)] if isinstance(inner, list) else inner[key]
        inner[int(last) if isinstance(inner, list) else last] = None
    return content


def shortened(sections: Mapping[str, Any], store: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The sections with those over the server's limit replaced by references into `store`, and what `put` must write there, by place."""
    short, files = dict(sections), {}
    for name, section in sections.items():
        text = json.dumps(section, sort_keys=True)
        if len(text) > MAX_PARAMETER_CHARACTERS:
            digest = hashlib.sha256(text.encode()).hexdigest()
            place = f"{store.rstrip('/')}/{digest}.json"
            short[name], files[place] = {REFERENCE: place, "sha256": digest}, text
    return short, files


def check(sections: Mapping[str, Any]) -> None:
    """Refuse sections that the server does not take.

    Raises:
        ConfigError: one is too long.
    """
    for name, section in sections.items():
        if (length := len(json.dumps(section, sort_keys=True))) > MAX_PARAMETER_CHARACTERS:
            raise ConfigError(
                f"section {name} is too long for a Kubeflow parameter",
                got=f"{length} characters",
                accepted=f"{MAX_PARAMETER_CHARACTERS}",
                do="set kubeflow.params_store to a folder or bucket that the tasks can read",
            )


def check_placeholders(sections: Mapping[str, Any]) -> None:
    """Refuse text that Kubeflow would take for one of its placeholders and replace.

    Raises:
        ConfigError: a section has such text.
    """
    for name, section in sections.items():
        if PLACEHOLDER in json.dumps(section):
            raise ConfigError(f"section {name} has text that Kubeflow replaces", got=f"text with {PLACEHOLDER}", do=f"write it without {PLACEHOLDER}")


def put(files: Mapping[str, str]) -> None:
    """Write what references point at.

    Raises:
        ArtifactError: the store cannot be written.
    """
    for place, text in files.items():
        _write(place, text)


def received(section: Mapping[str, Any]) -> dict[str, Any]:
    """A section as it was before it travelled.

    Raises:
        ArtifactError: what it points at is missing or not what was sent.
    """
    if REFERENCE not in section:
        return _with_nulls(section)
    place = str(section[REFERENCE])
    text = _read(place)
    if hashlib.sha256(text.encode()).hexdigest() != section.get("sha256"):
        raise ArtifactError("params sent by reference are damaged", got=place, accepted=f"content with sha256 {section.get('sha256')}", do="submit again")
    return _with_nulls(json.loads(text))


def _write(place: str, text: str) -> None:
    import fsspec

    try:
        with fsspec.open(place, "w", encoding="utf-8", auto_mkdir=True) if _is_local(place) else fsspec.open(place, "w", encoding="utf-8") as file:
            file.write(text)
    except (OSError, ImportError) as error:
        raise ArtifactError(
            "kubeflow.params_store cannot be written", got=f"{place}: {type(error).__name__}", do="check the store and its credentials"
        ) from error


def _read(place: str) -> str:
    import fsspec

    try:
        with fsspec.open(place, "r", encoding="utf-8") as file:
            return str(file.read())
    except (OSError, ImportError) as error:
        raise ArtifactError("params sent by reference cannot be read", got=f"{place}: {type(error).__name__}", do="check kubeflow.params_store") from error


def _is_local(place: str) -> bool:
    return "://" not in place or place.startswith("file://")
