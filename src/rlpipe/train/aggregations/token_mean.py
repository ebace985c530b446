"""Mean over all trained tokens of the optimizer step: DAPO (Yu et al. 2025), https://arxiv.org/abs/2503.14476, section 3.3."""

from __future__ import annotations

from typing import Literal

import numpy as np

from rlpipe.params import Section


class TokenMean(Section):
    """Five tokens of loss 2 and one of 10 give 20 / 6 = 3.3333."""

    type: Literal["token_mean"] = "token_mean"

    def __call__(self, num_tokens: np.ndarray) -> np.ndarray:
        """Weight `[n]` of each token of each trajectory, from the trained tokens `[n]` of ALL trajectories of the step."""
        return np.full(len(num_tokens), 1.0 / num_tokens.sum())
