from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rlpipe.params import Section
from rlpipe.verdict import KEEP, Verdict

if TYPE_CHECKING:
    from rlpipe.trajectory import Group, Trajectory


class Empty(Section):
    """Drops attempts without a sampled token, or whose completion is white space only."""

    type: Literal["empty"] = "empty"

    def __call__(self, trajectory: Trajectory, group: Group) -> Verdict:
        says_something = trajectory.num_sampled_tokens > 0 and bool(trajectory.completion.strip())
        return KEEP if says_something else Verdict(False, "empty")
