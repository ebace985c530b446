from __future__ import annotations

import unicodedata
from typing import Literal

from rlpipe.reward.base import Attempt, Reward, up_to
from rlpipe.tasks import Task


class ExactMatch(Reward):
    """1 if the answer is the reference after normalising both, else 0.

    The answer is the completion up to the first of `until`. Normalising: Unicode NFKC, case folded (`ignore_case`),
    runs of white space to one blank, white space at the ends and full stops at the end removed. So with reference `B`
    both `B` and ` b. ` are right; `A or B or C` is wrong, since nothing is looked for inside an answer, and so is an
    empty answer, whatever the reference.
    """

    type: Literal["exact_match"] = "exact_match"
    until: tuple[str, ...] = ("\n",)
    ignore_case: bool = True

    def __call__(self, trajectory: Attempt, task: Task) -> float:
        answer = self.normalised(up_to(trajectory.completion, self.until))
        return float(answer != "" and answer == self.normalised(task.reference))

    def normalised(self, text: str) -> str:
        """`text` in the form in which answers are compared."""
        text = " ".join(unicodedata.normalize("NFKC", text).split()).rstrip(". ")
        return text.casefold() if self.ignore_case else text
