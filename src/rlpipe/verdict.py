"""What a filter says, in the filter step and at the tail of the reward step."""

from __future__ import annotations

from typing import NamedTuple


class Verdict(NamedTuple):
    """Whether to keep a trajectory or group, and the name under which a drop is counted."""

    keep: bool
    reason: str | None = None


KEEP = Verdict(True)
