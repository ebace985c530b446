from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rlpipe.params import FreeForm
from rlpipe.reward.base import Attempt, Reward
from rlpipe.tasks import Task

if TYPE_CHECKING:
    from rlpipe.trajectory import Trajectory


class Custom(Reward):
    """Your own reward: a class whose objects, or a function that, take (trajectory, task) and return a number or None.

    It is imported and called in the scoring processes only, where stdout goes nowhere.
    """

    type: Literal["custom"] = "custom"
    path: str = Field(pattern=r"^\w+(\.\w+)*:\w+$")
    """`package.module:Name`."""
    args: FreeForm = Field(default_factory=dict)
    """Keyword arguments of the class; whole numbers come as ints."""
    whole: bool = False
    """Pass the whole `rlpipe.trajectory.Trajectory`, arrays included, instead of an `Attempt`: slower."""

    def view(self, trajectory: Trajectory) -> Any:
        return trajectory if self.whole else Attempt.of(trajectory)

    def prepare(self) -> None:
        if self.whole:
            importlib.import_module("rlpipe.trajectory")
        self._target()

    def __call__(self, trajectory: Attempt, task: Task) -> float | None:
        return self._target()(trajectory, task)

    def _target(self) -> Callable[[Attempt, Task], float | None]:
        return load(self.path, json.dumps(self.args, sort_keys=True))


@cache
def load(path: str, args: str) -> Callable[[Attempt, Task], float | None]:
    """What `package.module:Name` stands for, made with the keyword arguments in `args` (JSON) if it is a class.

    Raises:
        ImportError, AttributeError, TypeError: there is no such module or name, or it takes other arguments.
    """
    module, _, name = path.partition(":")
    target = getattr(_imported(module), name)
    made = target(**json.loads(args)) if isinstance(target, type) else target
    if not callable(made):
        raise TypeError(f"{path} cannot be called with (trajectory, task)")
    return made


def _imported(module: str) -> ModuleType:
    # A cached module is told from its source by size and whole seconds, so a quick edit would go unseen
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        return importlib.import_module(module)
    finally:
        sys.dont_write_bytecode = before
