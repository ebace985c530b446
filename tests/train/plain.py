"""The same loss written the plain way: one padded row a trajectory, the model's own logits, no packing, no micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlpipe.train.batching import TrainGroup


def plain_loss(
    module: Any, groups: Sequence[TrainGroup], aggregation: str, low: float = 0.2, high: float = 0.2, horizon: int = 10, extra_padding: int = 0
) -> torch.Tensor:
    attempts = [attempt for group in groups for attempt in group.attempts]
    length = max(len(attempt.trajectory.token_ids) for attempt in attempts) + extra_padding
    losses = []
    for attempt in attempts:
        row = attempt.trajectory
        ids = torch.zeros(1, length, dtype=torch.long)
        ids[0, : len(row.token_ids)] = torch.from_numpy(row.token_ids)
        seen = (torch.arange(length) < len(row.token_ids))[None].long()
        logits = module(input_ids=ids, attention_mask=seen, use_cache=False).logits[0]
        terms = []
        for span in row.spans:
            for position in range(span.start, span.end) if span.trained else ():
                logprob = torch.log_softmax(logits[position - 1] / span.temperature, -1)[row.token_ids[position]]
                ratio = (logprob - float(row.logprobs[position])).exp()
                terms.append(-torch.min(ratio * attempt.advantage, ratio.clamp(1 - low, 1 + high) * attempt.advantage))
        losses.append(torch.stack(terms))
    if aggregation == "token_mean":
        return torch.cat(losses).mean()
    if aggregation == "sequence_mean":
        return torch.stack([row.mean() for row in losses]).mean()
    return torch.cat(losses).sum() / (len(losses) * horizon)


def gradients(module: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad(set_to_none=True)
    loss.backward()
    found = {name: value.grad.clone() for name, value in module.named_parameters() if value.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def worst_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference over all entries, relative to the largest entry."""
    assert found.keys() == expected.keys()
    largest = max(float(value.abs().max()) for value in expected.values())
    return max(float((found[name] - expected[name]).abs().max()) for name in expected) / largest
