from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rlpipe.params import Section
from rlpipe.verdict import KEEP, Verdict

if TYPE_CHECKING:
    from rlpipe.trajectory import Group, Trajectory


class Truncated(Section):
    """Drops attempts that ran into the token limit, by the engine's word alone.

    The last token id says nothing: models end on other ids than their tokenizer's eos, and an eos id may be the last
    one of a completion that was cut.
    """

    type: Literal["truncated"] = "truncated"

    def __call__(self, trajectory: Trajectory, group: Group) -> Verdict:
        cut = trajectory.status == "truncated" or trajectory.finish_reason == "length"
        return Verdict(False, "truncated") if cut else KEEP
