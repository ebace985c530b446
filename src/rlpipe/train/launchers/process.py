"""Training in the step's own process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rlpipe.params import Section
from rlpipe.step import Report

if TYPE_CHECKING:
    from rlpipe.train.job import Job


class Process(Section):
    """Train in the step's own process."""

    type: Literal["process"] = "process"

    @property
    def num_ranks(self) -> int:
        """Processes that train."""
        return 1

    def run(self, job: Job) -> Report:
        """Train; see `rlpipe.train.step.run`."""
        return job.fit()
