from __future__ import annotations

from typing import Literal

from rlpipe.reward.base import Attempt, Reward
from rlpipe.tasks import Task


class DigitShare(Reward):
    """Share of the completion's characters that are decimal digits, in `[0, 1]`; 0 for an empty completion.

    A random policy already varies in it, so a round has signal from the first step: for small tests.
    """

    type: Literal["digit_share"] = "digit_share"

    def __call__(self, trajectory: Attempt, task: Task) -> float:
        text = trajectory.completion
        return sum("0" <= character <= "9" for character in text) / len(text) if text else 0.0
