from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator

from rlpipe.reward.base import Attempt, Reward
from rlpipe.tasks import Task


class RegexFormat(Reward):
    """1 if `pattern` matches the whole completion, else 0. A dot matches a line break too.

    A pattern that backtracks without end runs into the time limit, and the row is then unscored.
    """

    type: Literal["regex_format"] = "regex_format"
    pattern: str

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern

    def __call__(self, trajectory: Attempt, task: Task) -> float:
        return float(re.fullmatch(self.pattern, trajectory.completion, re.DOTALL) is not None)
