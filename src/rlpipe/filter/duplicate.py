from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rlpipe.params import Section
from rlpipe.verdict import KEEP, Verdict

if TYPE_CHECKING:
    from rlpipe.trajectory import Group, Trajectory


class Duplicate(Section):
    """Drops attempts whose completion a sibling of lower index has already, letter for letter."""

    type: Literal["duplicate"] = "duplicate"

    def __call__(self, trajectory: Trajectory, group: Group) -> Verdict:
        seen = any(other.index < trajectory.index and other.completion == trajectory.completion for other in group)
        return Verdict(False, "duplicate") if seen else KEEP
