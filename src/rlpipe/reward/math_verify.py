from __future__ import annotations

import logging
from typing import Any, Literal

from pydantic import Field

from rlpipe.reward.base import Attempt, OverLimit, Reward, up_to
from rlpipe.reward.magnitude import digits
from rlpipe.tasks import Task


class MathVerify(Reward):
    """1 if the answer is mathematically equal to the reference, else 0, by the math-verify package.

    An answer in which nothing mathematical is found is 0. One that would evaluate to more than `max_digits` digits is
    not evaluated: 0 with status `limit`. The package's own time limit is an alarm signal, which works in no thread but
    the main one and whose failure it swallows; it is switched off, and the scoring process's limits hold instead.
    """

    type: Literal["math_verify"] = "math_verify"
    until: tuple[str, ...] = ()
    """The answer is the completion up to the first of these; the whole completion if there are none."""
    max_digits: int = Field(4000, ge=1, le=4000)
    """CPython refuses to print integers of more than 4300 digits."""

    def prepare(self) -> None:
        import math_verify  # noqa: F401

        # It warns, once per process, that its own time limit is off
        for module in ("parser", "grader"):
            logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
        read("$1$")

    def __call__(self, trajectory: Attempt, task: Task) -> float:
        from math_verify import verify

        answer = up_to(trajectory.completion, self.until)
        if digits(answer) > self.max_digits:
            raise OverLimit(f"the answer has more than {self.max_digits} digits")
        reference = read(task.reference) or read(f"${task.reference}$")
        if not reference:
            raise ValueError("the reference is not mathematics")
        return float(verify(reference, read(answer), timeout_seconds=None))


def read(text: str) -> list[Any]:
    """What math-verify finds in a text: SymPy expressions, plus the raw text of the last match; empty if nothing."""
    from math_verify import parse

    return parse(text, parsing_timeout=None)
