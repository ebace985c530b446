"""Leave-one-out baseline: REINFORCE Leave-One-Out (Ahmadian et al. 2024), https://arxiv.org/abs/2402.14740."""

from __future__ import annotations

from typing import Literal

import numpy as np

from rlpipe.train.advantages.base import Estimator, centred


class Rloo(Estimator):
    """reward - mean of the other scored siblings. Three right of eight give 0.7143 and -0.4286."""

    type: Literal["rloo"] = "rloo"

    def of_group(self, rewards_G: np.ndarray) -> np.ndarray:
        """Zero for a group of one, which has no others."""
        size = len(rewards_G)
        if size == 1:
            return np.zeros(1)
        return centred(rewards_G) * (size / (size - 1))
