from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rlpipe.params import Section
from rlpipe.verdict import KEEP, Verdict

if TYPE_CHECKING:
    from rlpipe.trajectory import Group


class ZeroSignal(Section):
    """Drops groups whose scored totals do not differ: every advantage against the group would be 0.

    DAPO's dynamic sampling (arXiv:2503.14476, section 3.2) without the refill. Unscored members are left out of the
    comparison, so a group with one scored member has no signal.
    """

    type: Literal["zero_signal"] = "zero_signal"
    tolerance: float = Field(default=0.0, ge=0)
    """A spread of at most this is none."""

    def __call__(self, group: Group) -> Verdict:
        return KEEP if spread(group) > self.tolerance else Verdict(False, "zero_signal")


def spread(group: Group) -> float:
    """Largest less smallest total among the scored members; 0 if none is scored."""
    totals = [row.reward for row in group if row.reward is not None]
    return max(totals) - min(totals) if totals else 0.0
