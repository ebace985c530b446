"""Whether a policy replaces the champion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from rlpipe.params import PositiveInt, Section


class Decision(NamedTuple):
    """`promote` or `hold`, and why."""

    decision: Literal["promote", "hold"]
    reason: str


class Paired(Section):
    """Promote what answers more of the same tasks, if chance alone would rarely do that.

    Exact one-sided sign test over the tasks that only one of the two answers: the probability of so many wins or more
    among them, were each a fair coin, must be at most 1 - `confidence` (McNemar's test in its exact form, McNemar 1947).
    Two policies of equal strength are thus told apart in at most 1 - `confidence` of all cases.
    """

    type: Literal["paired"] = "paired"
    min_tasks: PositiveInt = 20
    """Tasks both could be scored on; with fewer the champion stays."""
    confidence: float = Field(0.95, gt=0.5, lt=1)

    def __call__(self, challenger: Mapping[str, bool | None], champion: Mapping[str, bool | None]) -> Decision:
        """Decide from the results by task id; None is a task that could not be scored and counts for neither."""
        shared = [name for name in challenger if challenger[name] is not None and champion.get(name) is not None]
        if len(shared) < self.min_tasks:
            return Decision("hold", f"not enough tasks: {len(shared)} scored for both, at least {self.min_tasks} needed")
        wins = sum(bool(challenger[name]) and not champion[name] for name in shared)
        losses = sum(bool(champion[name]) and not challenger[name] for name in shared)
        chance = binomial_tail(wins, wins + losses)
        verdict: Literal["promote", "hold"] = "promote" if wins > losses and chance <= 1 - self.confidence else "hold"
        return Decision(verdict, f"{wins} tasks won and {losses} lost of {len(shared)}: p = {chance:.3g}, at most {1 - self.confidence:.3g} promotes")


def binomial_tail(successes: int, trials: int) -> float:
    """Probability of `successes` or more heads in `trials` tosses of a fair coin."""
    return sum(math.comb(trials, k) for k in range(successes, trials + 1)) / 2**trials


Gate = Annotated[Paired, Field()]
