"""Random streams per attempt and the draw of one token per row. B = rows, V = vocabulary."""

from __future__ import annotations

import numpy as np
import torch


def uniforms(seed: int, count: int) -> np.ndarray:
    """`[count]` float64 in [0, 1): one number per token of the attempt with this seed, whatever else runs beside it.

    Counter-based (Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), so a shorter stream is a prefix of a longer one.
    """
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def log_softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """`[B, V]` float32 log-softmax(logits / temperature); temperature `[B]`, 0 counts as 1."""
    scale = torch.where(temperature > 0, temperature, torch.ones_like(temperature))
    return torch.log_softmax(logits.float() / scale[:, None], dim=-1)


def draw(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row by inverse CDF, and its log-prob; the likeliest token where the temperature is 0.

    Args:
        logits: `[B, V]`.
        temperature: `[B]` float32.
        uniform: `[B]` float64 in [0, 1).

    Returns:
        token ids `[B]` int64 and log-probs `[B]` float32.
    """
    logprobs = log_softmax(logits, temperature)
    greedy = temperature == 0
    tokens = logprobs.argmax(dim=-1)
    if not bool(greedy.all()):
        tokens = torch.where(greedy, tokens, _inverse_cdf(logprobs, uniform))
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def _inverse_cdf(logprobs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    cdf = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1]
    # Below the total even after rounding, so that the token found always has a positive probability.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target[:, None], right=True)[:, 0]
