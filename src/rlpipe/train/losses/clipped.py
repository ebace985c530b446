"""The clipped surrogate: PPO (Schulman et al. 2017), https://arxiv.org/abs/1707.06347, equation 7; separate bounds as in
DAPO (Yu et al. 2025), https://arxiv.org/abs/2503.14476, section 3.1."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from rlpipe.params import Section
from rlpipe.train.losses.base import LossInputs, TokenLosses


class Clipped(Section):
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), ratio = training over sampling probability of a token."""

    needs: ClassVar[tuple[str, ...]] = ("logprobs",)

    type: Literal["clipped"] = "clipped"
    clip_low: float = Field(default=0.2, ge=0, le=1)
    clip_high: float = Field(default=0.2, ge=0)

    def __call__(self, inputs: LossInputs) -> TokenLosses:
        """Losses `[K]`."""
        import torch

        ratio = torch.exp(inputs.logprobs - inputs.sampling_logprobs)
        free = -inputs.advantages * ratio
        bounded = -inputs.advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return TokenLosses(torch.maximum(free, bounded), (bounded > free).detach())
