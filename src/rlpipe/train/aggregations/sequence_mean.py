"""Mean of each trajectory's mean, as GRPO states it: Shao et al. 2024, https://arxiv.org/abs/2402.03300, equation 3."""

from __future__ import annotations

from typing import Literal

import numpy as np

from rlpipe.params import Section


class SequenceMean(Section):
    """Five tokens of loss 2 and, in another trajectory, one of 10 give (2 + 10) / 2 = 6. Short ones weigh more a token."""

    type: Literal["sequence_mean"] = "sequence_mean"

    def __call__(self, num_tokens: np.ndarray) -> np.ndarray:
        """Weight `[n]` of each token of each trajectory, from the trained tokens `[n]` of ALL trajectories of the step."""
        return 1.0 / (len(num_tokens) * num_tokens)
