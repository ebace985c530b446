"""Group-relative advantages without division by the standard deviation.

Dr. GRPO (Liu et al. 2025), https://arxiv.org/abs/2503.20783: the division favours tasks that are nearly always or
nearly never solved. Its other half, no division by a completion's length, is `aggregation: {type: constant}`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from rlpipe.train.advantages.base import Estimator, centred


class DrGrpo(Estimator):
    """reward - mean over the scored siblings. [1, 1, 0] gives 0.3333, 0.3333, -0.6667."""

    type: Literal["dr_grpo"] = "dr_grpo"

    def of_group(self, rewards_G: np.ndarray) -> np.ndarray:
        """Zero for a group of one."""
        return centred(rewards_G)
