"""The steps by name, and their configs out of one params file."""

from __future__ import annotations

import functools
import importlib
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from rlpipe import layout, params
from rlpipe.errors import ConfigError
from rlpipe.step import Report, Signature, signature


@dataclass(frozen=True)
class Step:
    """A step's function with what its signature says."""

    name: str
    run: Callable[..., Report]
    signature: Signature
    summary: str

    def signature_paths(self, round_index: int) -> dict[str, Path]:
        """Where each artifact of the signature lies in a working folder."""
        return {name: layout.place(self.name, name, round_index) for name in (*self.signature.inputs, *self.signature.outputs)}


def load(name: str) -> Step:
    """Import a step's module (torch-free) and read its signature.

    Raises:
        ConfigError: there is no step of that name.
    """
    if name not in layout.MODULES:
        raise ConfigError("unknown step", got=name, accepted=", ".join(layout.MODULES))
    run = importlib.import_module(layout.MODULES[name]).run
    return Step(name, run, signature(run), (run.__doc__ or "").strip().splitlines()[0])


def config(name: str, raw: Mapping[str, Any]) -> Any:
    """The filled config of step `name` from raw params.

    `start` evaluates the start policy, so its section is `evaluate`'s; `model` has only shared fields.
    """
    return params.section(load(name).signature.config, raw, "evaluate" if name == "start" else name)


def configs(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Every section of a params file, validated together.

    Raises:
        ConfigError: an unknown section or key, a wrong value, or sections that contradict each other.
    """
    from rlpipe.kubeflow.section import KubeflowConfig
    from rlpipe.tasks import TasksConfig
    from rlpipe.tracking import TrackingConfig

    params.check_top_level(raw)
    sections: dict[str, BaseModel] = {name: config(name, raw) for name in layout.MODULES}
    sections["tasks"] = params.section(TasksConfig, raw, "tasks")
    sections["tracking"] = params.section(TrackingConfig, raw, "tracking")
    sections["kubeflow"] = params.section(KubeflowConfig, raw, "kubeflow")
    _check_together(sections)
    return sections


HOLDERS = {"run": "rollout", "engine": "rollout", "backend": "train", "model": "model"}
"""A step whose section has the shared section."""


def switched(raw: dict[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """`raw` after `--set`, without keys that an assigned `type` does not have: those of the type that stood there, which a written file lists all."""
    paths = [assignment.partition("=")[0].split(".") for assignment in assignments]
    for path in (path for path in paths if path[-1] == "type" and path[0] in (*HOLDERS, *layout.MODULES)):
        place = functools.reduce(lambda found, key: found[key], path[:-1], raw)
        loc = path[:-1] if path[0] in HOLDERS else path[1:-1]
        model = params.model_at(load(HOLDERS.get(path[0], path[0])).signature.config, [*loc, place["type"]])
        if "type" in model.model_fields and model.model_fields["type"].default == place["type"]:
            given = {other[len(path) - 1] for other in paths if len(other) >= len(path) and other[: len(path) - 1] == path[:-1]}
            for key in place.keys() - model.model_fields.keys() - given:
                del place[key]
    return raw


def _check_together(sections: Mapping[str, Any]) -> None:
    """Refuse combinations that no single section can see."""
    model = sections["model"].model
    if model.char_lm and model.path != "char-lm":
        raise ConfigError("model.char_lm is set for another model", got=model.path, accepted="char-lm", do="remove model.char_lm (--set model.char_lm={})")
    attempts, advantage = sections["rollout"].num_attempts, sections["train"].advantage
    if attempts < 2 and advantage.needs_siblings:
        raise ConfigError(
            f"rollout.num_attempts is {attempts} but the advantage {advantage.type} compares siblings",
            accepted="2 or more attempts, or an advantage without a group baseline (reinforce)",
        )


def resolved(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The params file with every default written out, shared sections once at the top; `kubeflow` only where it was given."""
    return {**unfilled(filled(raw)), "rounds": rounds(raw)}


def filled(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What each task needs, by task, as plain JSON: its section with every default and the shared sections it uses.

    Raises:
        ConfigError: see `configs`.
    """
    sections = configs(raw)
    wanted = [*layout.ROUND_STEPS, "start", "model", "tasks", "tracking", *(["kubeflow"] if raw.get("kubeflow") is not None else [])]
    return {name: params.resolved(sections[name]) for name in wanted}


def unfilled(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The params, rounds aside, whose filled sections these are; `start`'s stands for `evaluate`'s where that is not among them."""
    own = {"evaluate" if name == "start" else name: values for name, values in sections.items() if name != "start" or "evaluate" not in sections}
    content: dict[str, Any] = {}
    for name, values in own.items():
        for shared in params.SHARED:
            if shared in values:
                content.setdefault(shared, values[shared])
        if name not in params.SHARED:
            content[name] = {key: value for key, value in values.items() if key not in params.SHARED}
    return content


def rounds(raw: Mapping[str, Any]) -> list[dict[str, str]]:
    """The list that `dvc.yaml` walks: [{round: "01", previous: "00"}, …].

    Raises:
        ConfigError: the list is missing, empty, or does not count up from 01.
    """
    given = raw.get("rounds")
    expected = round_list(len(given)) if isinstance(given, list) and given else round_list(1)
    if given != expected:
        raise ConfigError("rounds must list every round with the one before it", got=given, accepted=expected, do="give --rounds N to write it")
    return expected


def round_list(count: int) -> list[dict[str, str]]:
    """`rounds` for this many rounds."""
    return [{"round": layout.round_name(i), "previous": layout.round_name(i - 1)} for i in range(1, count + 1)]


def described(config: type[BaseModel], name: str) -> str:
    """The keys of a step's section as text: name, what it takes, default, and what the docstring below the field says."""
    lines = [f"keys of section {'evaluate' if name == 'start' else name} in params.yaml (shared ones stand at the top level):"]
    for key, field in config.model_fields.items():
        default = "required" if field.is_required() else f"default {_default(field.get_default(call_default_factory=True))}"
        lines.append(f"  {key}: {_accepted(field.annotation)}; {default}")
        if field.description:
            lines.append(textwrap.indent(field.description, "      "))
    return "\n".join(lines)


def _accepted(hint: Any) -> str:
    """`int`, `float | None`, or every member of a union with its keys: `grpo {ddof, eps} | rloo {}`."""
    members = list(params.models_in([hint]))
    if not members:
        return _plain(hint)
    return " | ".join(f"{_kind(member)} {{{', '.join(key for key in member.model_fields if key != 'type')}}}" for member in members)


def _plain(hint: Any) -> str:
    """A type as people write it, without the constraints on it."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return " | ".join("None" if member is NoneType else _plain(member) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return " | ".join(map(repr, get_args(hint)))
    if get_origin(hint) is not None:
        return f"{get_origin(hint).__name__}[{', '.join('...' if member is Ellipsis else _plain(member) for member in get_args(hint))}]"
    return str(getattr(hint, "__name__", hint))


def _kind(member: type[BaseModel]) -> str:
    return str(member.model_fields["type"].default) if "type" in member.model_fields else ""


def _default(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, tuple):
        value = [entry.model_dump(mode="json") if isinstance(entry, BaseModel) else entry for entry in value]
    return json.dumps(value)
