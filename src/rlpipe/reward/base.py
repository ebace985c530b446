"""What every reward shares, and what it sees of a trajectory. Light to import: the scoring processes start from here."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from rlpipe.params import Section
from rlpipe.tasks import Task

if TYPE_CHECKING:
    from rlpipe.trajectory import Trajectory


class OverLimit(Exception):
    """Raised by a reward when the policy's own answer breaks a limit: scored 0 with status `limit`."""


class Attempt(NamedTuple):
    """What a reward sees of a trajectory unless it asks for all of it: the same names, without arrays.

    Sending token arrays to the scoring processes would cost more than most rewards.
    """

    trajectory_id: str
    task_id: str
    prompt: str
    completion: str
    status: str
    finish_reason: str
    num_prompt_tokens: int
    num_sampled_tokens: int

    @classmethod
    def of(cls, trajectory: Trajectory) -> Attempt:
        """The attempt in a trajectory."""
        return cls(
            trajectory.trajectory_id,
            trajectory.task_id,
            trajectory.prompt,
            trajectory.completion,
            trajectory.status,
            trajectory.finish_reason,
            trajectory.num_prompt_tokens,
            trajectory.num_sampled_tokens,
        )


class Reward(Section):
    """Base of every reward: a pure function of one attempt and its task, run in a child process.

    Its result must not depend on other rows or on earlier calls: which process scores which row is not fixed.
    """

    type: str
    name: str | None = Field(None, min_length=1)
    """Name in the dataset and the report; the type if left out."""
    weight: float = 1.0
    """Its share of the total; a reward of weight 0 is recorded and does not count."""

    @property
    def label(self) -> str:
        """Name in the dataset and the report."""
        return self.name or self.type

    def view(self, trajectory: Trajectory) -> Any:
        """What `__call__` gets as `trajectory`."""
        return Attempt.of(trajectory)

    def prepare(self) -> None:
        """Import what scoring needs, before any row's clock starts."""

    @abstractmethod
    def __call__(self, trajectory: Attempt, task: Task) -> float | None:
        """The reward; None if this attempt cannot be scored.

        Raises:
            OverLimit: the policy's answer broke a limit.
        """


def up_to(text: str, until: tuple[str, ...]) -> str:
    """`text` before the first of `until` that it contains."""
    found = (text.find(stop) for stop in until)
    return text[: min((place for place in found if place >= 0), default=len(text))]
