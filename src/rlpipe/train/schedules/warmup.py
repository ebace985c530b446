"""Linear warm-up of the learning rate, then constant."""

from __future__ import annotations


def learning_rate(base: float, version: int, warmup_steps: int) -> float:
    """The rate of the optimizer step that leaves policy version `version`, counted over all rounds from 0.

    `base` 1 and 4 warm-up steps give 0.25, 0.5, 0.75, 1, 1, …
    """
    return base * min(1.0, (version + 1) / warmup_steps) if warmup_steps else base
