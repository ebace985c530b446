"""Sum over tokens divided by a constant: Dr. GRPO (Liu et al. 2025), https://arxiv.org/abs/2503.20783."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from rlpipe.params import Section


class Constant(Section):
    """Five tokens of loss 2 and, in another trajectory, one of 10 give 20 / (2 x horizon 10) = 1."""

    type: Literal["constant"] = "constant"
    horizon: int = Field(ge=1)
    """Tokens a trajectory may have, such as `rollout.max_new_tokens`; fixed, so that no length changes the weight."""

    def __call__(self, num_tokens: np.ndarray) -> np.ndarray:
        """Weight `[n]` of each token of each trajectory, from the trained tokens `[n]` of ALL trajectories of the step."""
        return np.full(len(num_tokens), 1.0 / (len(num_tokens) * self.horizon))
