"""The reward itself as advantage, less a baseline that needs no siblings. Williams 1992, doi:10.1007/BF00992696."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal

import numpy as np

from rlpipe.train.advantages.base import Estimator, centred, check_finite


class Reinforce(Estimator):
    """reward - baseline: 0 (`none`), a `constant`, or the mean over all scored attempts of the round (`batch_mean`)."""

    needs_siblings: ClassVar[bool] = False
    scope: ClassVar[Literal["group", "batch"]] = "batch"

    type: Literal["reinforce"] = "reinforce"
    baseline: Literal["none", "batch_mean"] | float = "none"

    def __call__(self, rewards: np.ndarray, group_ids: Sequence[Hashable]) -> np.ndarray:
        """Advantages `[n]`; see the base class."""
        rewards = np.asarray(rewards, dtype=np.float64)
        if self.baseline != "batch_mean":
            return super().__call__(rewards, group_ids)
        advantages, scored = rewards.copy(), ~np.isnan(rewards)
        if scored.any():
            advantages[scored] = centred(rewards[scored])
        check_finite(advantages, rewards, group_ids)
        return advantages

    def of_group(self, rewards_G: np.ndarray) -> np.ndarray:
        """Each reward less the constant."""
        return rewards_G - (self.baseline if isinstance(self.baseline, float) else 0.0)
