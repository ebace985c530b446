from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rlpipe.params import Section
from rlpipe.verdict import KEEP, Verdict

if TYPE_CHECKING:
    from rlpipe.trajectory import Group, Trajectory


class TooLong(Section):
    """Drops attempts with more than `max_tokens` sampled tokens, over all turns."""

    type: Literal["too_long"] = "too_long"
    max_tokens: int = Field(ge=1)

    def __call__(self, trajectory: Trajectory, group: Group) -> Verdict:
        return KEEP if trajectory.num_sampled_tokens <= self.max_tokens else Verdict(False, "too_long")
