from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rlpipe.params import Section
from rlpipe.verdict import KEEP, Verdict

if TYPE_CHECKING:
    from rlpipe.trajectory import Group, Trajectory


class Repetition(Section):
    """Drops attempts in which more than `max_share` of the n-grams of sampled tokens stood before.

    Share = 1 - distinct n-grams / n-grams (the repetition measure of arXiv:1908.04319, "seq-rep-n"). N-grams run within
    a turn; a completion with fewer than `n` tokens has none and is kept.
    """

    type: Literal["repetition"] = "repetition"
    n: int = Field(4, ge=1)
    max_share: float = Field(0.5, ge=0, lt=1)

    def __call__(self, trajectory: Trajectory, group: Group) -> Verdict:
        return KEEP if self.share(trajectory) <= self.max_share else Verdict(False, "repetition")

    def share(self, trajectory: Trajectory) -> float:
        """Share of sampled n-grams that stood before, in `[0, 1)`; 0 where there is none."""
        ngrams: list[tuple[int, ...]] = []
        for span in trajectory.spans:
            if span.source == "policy":
                ids = trajectory.token_ids[span.start : span.end].tolist()
                ngrams += zip(*(ids[i:] for i in range(self.n)), strict=False)
        return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
