"""Random streams per attempt and the draw of one token per attempt. R = rows of logits, B = attempts, V = vocabulary."""

from __future__ import annotations

import numpy as np
import torch

from rlpipe.errors import EngineError

BLOCK = 256
"""Probabilities added up at a time: the sums of blocks find the block, and only that one is gone through."""


def uniforms(seed: int, count: int) -> np.ndarray:
    """`[count]` float64 in [0, 1): one number per token of the attempt with this seed, whatever else runs beside it.

    Counter-based (Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), so a shorter stream is a prefix of a longer one.
    """
    return np.random.Generator(np.random.Philox(key=seed)).random(count)


def draw(logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor, row: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per attempt by inverse CDF, and its log-softmax(logits / temperature); the likeliest token where the temperature is 0.

    Args:
        logits: `[R, V]`; overwritten where they are float32, since a copy would cost more than the draw.
        temperature: `[R]` float32; 0 counts as 1 in the log-probs.
        uniform: `[B]` float64 in [0, 1).
        row: `[B]` int64, the row each attempt draws from; None where they are the same.

    Returns:
        token ids `[B]` int64 and log-probs `[B]` float32.

    Raises:
        EngineError: a row's logits are not finite.
    """
    row = torch.arange(len(uniform), device=logits.device) if row is None else row
    weights = logits.float()
    if bool(((temperature != 0) & (temperature != 1)).any()):
        weights.div_(torch.where(temperature > 0, temperature, torch.ones_like(temperature))[:, None])
    weights.sub_(weights.amax(dim=-1, keepdim=True)).exp_()
    blocks = _in_blocks(weights)
    ends = blocks.sum(dim=-1).double().cumsum(dim=-1)
    if not bool(torch.isfinite(ends[:, -1]).all()):
        raise EngineError("the model's logits are not finite", do="look for weights that are not: the policy may have diverged")
    greedy = (temperature == 0)[row]
    tokens = _inverse_cdf(blocks, ends, uniform, row).clamp(max=weights.shape[1] - 1)
    if bool(greedy.any()):
        tokens = torch.where(greedy, weights.argmax(dim=-1)[row], tokens)
    return tokens, (weights[row, tokens].double().log() - ends[row, -1].log()).float()


def _in_blocks(weights: torch.Tensor) -> torch.Tensor:
    """`[R, V / BLOCK, BLOCK]`, the last block filled up with 0."""
    missing = -weights.shape[1] % BLOCK
    filled = torch.nn.functional.pad(weights, (0, missing)) if missing else weights
    return filled.unflatten(1, (-1, BLOCK))


def _inverse_cdf(blocks: torch.Tensor, ends: torch.Tensor, uniform: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """`[B]` tokens; `ends` `[R, V / BLOCK]` are the weights up to the end of each block."""
    ends = ends[row]
    target = torch.minimum(uniform * ends[:, -1], _below(ends[:, -1]))
    block = _first_above(ends, target)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    inside = blocks[row, block].double().cumsum(dim=-1)
    return block * BLOCK + _first_above(inside, torch.minimum(target - before, _below(inside[:, -1])))


def _first_above(ends: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """`[B]` the first place in each row of `ends` `[B, n]` above the target."""
    return torch.searchsorted(ends, target[:, None], right=True)[:, 0].clamp(max=ends.shape[1] - 1)


def _below(total: torch.Tensor) -> torch.Tensor:
    """The next number below: a target under the total even after rounding always finds a token of positive probability."""
    return torch.nextafter(total, torch.zeros_like(total))
