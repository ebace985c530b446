"""Metrics over tasks."""

from __future__ import annotations

import math
from collections.abc import Iterable


def pass_at_k(num_attempts: int, num_correct: int, k: int) -> float | None:
    """Probability that one of `k` attempts, drawn without replacement from those made, is correct; None if fewer than `k` were made.

    1 - C(n - c, k) / C(n, k): Chen et al., "Evaluating large language models trained on code", arXiv:2107.03374.
    """
    if num_attempts < k:
        return None
    return 1 - math.comb(num_attempts - num_correct, k) / math.comb(num_attempts, k)


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of what could be measured; None if nothing could."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def mean_pass_at_k(attempts: Iterable[tuple[int, int]], k: int) -> float | None:
    """Mean of `pass_at_k` over tasks, given (attempts made, correct ones) of each; a task with fewer than `k` attempts is left out."""
    return mean(pass_at_k(num_attempts, num_correct, k) for num_attempts, num_correct in attempts)
