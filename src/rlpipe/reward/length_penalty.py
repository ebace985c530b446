from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rlpipe.reward.base import Attempt, Reward
from rlpipe.tasks import Task


class LengthPenalty(Reward):
    """0 up to `free` sampled tokens, then falling linearly to -1 at `budget` tokens and above.

    DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13) with budget = L_max and free = L_max - L_cache.
    """

    type: Literal["length_penalty"] = "length_penalty"
    budget: int = Field(ge=1)
    """Sampled tokens at which the penalty is complete."""
    free: int = Field(0, ge=0)
    """Sampled tokens that cost nothing."""

    @model_validator(mode="after")
    def _falls(self) -> LengthPenalty:
        if self.free >= self.budget:
            raise ValueError(f"free ({self.free}) must be below budget ({self.budget})")
        return self

    def __call__(self, trajectory: Attempt, task: Task) -> float:
        over = trajectory.num_sampled_tokens - self.free
        return -min(1.0, max(0.0, over / (self.budget - self.free))) + 0.0
