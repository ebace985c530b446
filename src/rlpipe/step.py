"""What a step is: one plain function over files whose signature is its definition on every surface."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any


@dataclass(frozen=True)
class Direction:
    """Whether a step reads or writes an artifact."""

    name: str


In = Annotated[Path, Direction("in")]
Out = Annotated[Path, Direction("out")]


@dataclass(frozen=True)
class Report:
    """What a step says about its work.

    Attributes:
        numbers: flat metrics; None means "could not be measured", never 0.
        reasons: counts by named reason (drops, failures).
        outcome: None, `no_signal`, `stopped`, or `empty` (a shard beyond the last chunk); travels in the manifest of every output.
        facts: anything else inputs, params and code decide, kept in the manifests (policy versions, rejected prompts).
    """

    numbers: dict[str, float | int | None] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    outcome: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Signature:
    """A step's parts as its `run` declares them: config type, input names, output names, scalars with their types and defaults."""

    config: type
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scalars: dict[str, type]
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """The scalars besides the round, with their defaults."""
        return {name: default for name, default in self.defaults.items() if name != "round_index"}


def signature(run: Callable[..., Report]) -> Signature:
    """Read a step's signature.

    Raises:
        TypeError: a scalar besides the round has no default.
    """
    hints = typing.get_type_hints(run, include_extras=True)
    inputs, outputs, scalars = [], [], {}
    parameters = inspect.signature(run).parameters
    for name in parameters:
        direction = _direction(hints[name])
        if direction == "in":
            inputs.append(name)
        elif direction == "out":
            outputs.append(name)
        elif name != "config":
            scalars[name] = hints[name]
    defaults = {name: parameters[name].default for name in scalars if parameters[name].default is not inspect.Parameter.empty}
    if missing := sorted(scalars.keys() - defaults.keys() - {"round_index"}):
        raise TypeError(f"scalars of a step need a default: {', '.join(missing)}")
    return Signature(hints["config"], tuple(inputs), tuple(outputs), scalars, defaults)


def _direction(hint: Any) -> str | None:
    for mark in getattr(hint, "__metadata__", ()):
        if isinstance(mark, Direction):
            return mark.name
    return None
