"""What decides the bytes of a step's outputs, and how that differs from what they were made under: the one idea of up-to-date."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpipe import artifact, layout, params, records
from rlpipe.errors import ArtifactError
from rlpipe.steps import Step
from rlpipe.tracking_place import flat

log = logging.getLogger("rlpipe")

Key = dict[str, Any]
SHORT = 8


@dataclass(frozen=True)
class Call:
    """One call of a step: its filled config, where each artifact lies, the round, and scalars that are not at their defaults."""

    step: Step
    config: Any
    paths: dict[str, Path]
    round_index: int
    workdir: Path = field(default_factory=Path)
    scalars: dict[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Path]:
        return {name: self.paths[name] for name in self.step.signature.inputs}

    @property
    def outputs(self) -> dict[str, Path]:
        return {name: self.paths[name] for name in self.step.signature.outputs}

    @property
    def changed_scalars(self) -> dict[str, Any]:
        """The scalars besides the round that are not at the defaults of the signature."""
        defaults = self.step.signature.options
        return {name: value for name, value in self.scalars.items() if name not in defaults or defaults[name] != value}


def of(call: Call, *, without: Collection[str] = ()) -> Key:
    """The key of a call; parts that say nothing (`own_code`, `scalars`) are left out, so is each input in `without`.

    A call that makes a whole output is not decided by how its section would spread it; a call that makes a part is.

    Raises:
        ArtifactError: an input is missing, unfinished or damaged.
    """
    own_code = call.config.own_code((call.workdir, Path.cwd()))
    scalars = call.changed_scalars
    return {
        "step": call.step.name,
        "round": call.round_index,
        "inputs": {name: _input(name, path) for name, path in call.inputs.items() if name not in without},
        "params": params.resolved(call.config) if scalars else params.deciding(call.config),
        "code": layout.code_hash(call.step.name),
        **({"own_code": own_code} if own_code else {}),
        **({"scalars": scalars} if scalars else {}),
    }


def _input(name: str, path: Path) -> str:
    if not path.exists():
        raise ArtifactError(f"input {name} not found", got=str(path), do="run the step that writes it")
    if name == "model" and not (path / artifact.MANIFEST).is_file():
        return artifact.folder_fingerprint(path)
    if path.is_dir():
        artifact.check_sizes(path)
    return artifact.content_key(path)


def check_unchanged(call: Call, key: Key) -> None:
    """Make sure that inputs, params and code still are what the key says: an edit during the run would be taken for what made the outputs.

    Raises:
        ArtifactError: names what is another; what the step kept of its work is that of the key, and serves once the old content is back.
    """
    now = {**of(call), "code": layout.code_on_disk(call.step.name)}
    if changed := list(_between(key, now, ())):
        do = "run the same command again; with the old content back it goes on from what this run kept"
        raise ArtifactError(f"an input of {call.step.name} changed during the run", got="; ".join(changed), do=do)


def finished(call: Call, key: Key) -> dict[str, Any] | None:
    """The record of an earlier call with this key, if all its outputs stand as it left them."""
    if next(differences(call, key), None) is not None:
        return None
    return records.read(call.workdir, call.step.name, call.round_index)


def differences(call: Call, key: Key, *, without: Collection[str] = ()) -> Iterator[str]:
    """Why what stands is not what a call with this key leaves, one reason at a time; nothing if it is.

    Inputs in `without`, which the key leaves out too, are not compared.
    """
    record = records.read(call.workdir, call.step.name, call.round_index)
    if record is None:
        yield "not run yet"
        return
    changed = list(_between(record, key, without))
    yield from changed
    for name, path in call.outputs.items():
        problem = _of_output(name, path, record)
        if problem is None and not changed and any(_between(artifact.read_manifest(path), key, without)):
            problem = f"output {name} was made under another key than its record says"
        if problem:
            yield problem


def _of_output(name: str, path: Path, record: Mapping[str, Any]) -> str | None:
    """What is wrong with an output that a record speaks of."""
    try:
        artifact.check_sizes(path)
    except ArtifactError as error:
        log.debug("step=%s state=unfinished reason=%s", record["step"], error)
        return f"output {name} {'damaged' if path.exists() else 'missing'}"
    found, recorded = artifact.content_key(path), record["outputs"].get(name)
    return f"output {name} is another than recorded ({_short(recorded)} -> {_short(found)})" if found != recorded else None


def _between(before: Mapping[str, Any], key: Key, without: Collection[str]) -> Iterator[str]:
    """What differs between an earlier key, as a record or manifest holds it, and this one, a line each."""
    if [before.get(name) for name in ("step", "round")] != [key["step"], key["round"]]:
        yield f"made by {before.get('step')} of round {before.get('round')}"
    yield from _hashes("input ", {name: value for name, value in before.get("inputs", {}).items() if name not in without}, key["inputs"])
    yield from _settings("params", named(key["step"], before.get("params", {})), named(key["step"], key["params"]))
    if before.get("code") != key["code"]:
        yield f"code changed ({_short(before.get('code'))} -> {_short(key['code'])})"
    yield from _hashes("own code ", before.get("own_code", {}), key.get("own_code", {}))
    yield from _settings("scalars", before.get("scalars", {}), key.get("scalars", {}))


def _hashes(what: str, before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            yield f"{what}{name} changed ({_short(before.get(name))} -> {_short(now.get(name))})"


def _settings(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    shown = [(name, _shown(before, name), _shown(now, name)) for name in sorted(before.keys() | now.keys())]
    if changed := [f"{name} {old} -> {new}" for name, old, new in shown if old != new]:
        yield f"{what} changed: {', '.join(changed)}"


def named(step: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """A filled section's values by the dotted names they have in params.yaml."""
    own = "evaluate" if step == "start" else step
    return dict(flat({name if name in params.SHARED else f"{own}.{name}": value for name, value in section.items()}))


def _shown(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name], sort_keys=True) if name in values else "(not set)"


def _short(value: str | None) -> str:
    return value[:SHORT] if value else "none"
