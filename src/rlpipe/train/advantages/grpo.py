"""Group-relative advantages with division by the group's standard deviation.

DeepSeekMath (Shao et al. 2024), https://arxiv.org/abs/2402.03300, equation 4.2.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from rlpipe.train.advantages.base import Estimator, centred


class Grpo(Estimator):
    """(reward - mean) / (std + eps) over the scored siblings. The paper leaves n against n-1 open, so `ddof` says it.

    [0, 2] gives -1, 1 with ddof 0 and -0.7071, 0.7071 with ddof 1 (eps 0).
    """

    type: Literal["grpo"] = "grpo"
    ddof: Literal[0, 1] = 1
    """0 divides the sum of squares by n (population), 1 by n-1 (sample)."""
    eps: float = Field(default=1e-4, ge=0)
    """Added to the standard deviation."""

    def of_group(self, rewards_G: np.ndarray) -> np.ndarray:
        """Zero for a group of one and for equal rewards."""
        differences = centred(rewards_G)
        if not differences.any():
            return differences
        return differences / (rewards_G.std(ddof=self.ddof) + self.eps)
