"""What a loss is given and what it returns. K = trained tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Everything `[K]`; only `logprobs` carries gradient."""

    logprobs: torch.Tensor
    sampling_logprobs: torch.Tensor
    advantages: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """`losses` `[K]` with gradient; `clipped` `[K]` bool, true where the bound took the gradient away."""

    losses: torch.Tensor
    clipped: torch.Tensor
