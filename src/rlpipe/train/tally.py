"""The numbers of a round's training, gathered over micro-batches by token and over optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class MicroNumbers:
    """Of one micro-batch: `loss` is its share of the step's, the others are sums over its tokens.

    Attributes:
        gaps: |training - sampling log-prob| of the tokens sampled with exactly these weights.
        kl: None where no reference was asked for.
    """

    loss: float
    num_tokens: int
    approx_kl: float
    num_clipped: int
    entropy: float
    kl: float | None
    gaps: np.ndarray


@dataclass(slots=True)
class Tally:
    """Sums so far; `micros` are this rank's until they are gathered."""

    num_steps: int = 0
    micros: list[MicroNumbers] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)

    def add(self, numbers: MicroNumbers) -> None:
        """Take in a micro-batch."""
        self.micros.append(numbers)

    def finish_step(self, grad_norm: float) -> None:
        """Close an optimizer step."""
        self.grad_norms.append(grad_norm)
        self.num_steps += 1

    def numbers(self, seconds: float) -> dict[str, float | int | None]:
        """The report's numbers: means over tokens, `loss` and `grad_norm` (before the clip) means over optimizer steps."""
        num_tokens = sum(micro.num_tokens for micro in self.micros)
        with_kl = [(micro.kl, micro.num_tokens) for micro in self.micros if micro.kl is not None]
        gaps = np.concatenate([micro.gaps for micro in self.micros] or [np.empty(0)])
        return {
            "optimizer_steps": self.num_steps,
            "num_tokens_trained": num_tokens,
            "loss": _ratio(sum(micro.loss for micro in self.micros), self.num_steps),
            "approx_kl": _ratio(sum(micro.approx_kl for micro in self.micros), num_tokens),
            "clip_fraction": _ratio(sum(micro.num_clipped for micro in self.micros), num_tokens),
            "entropy": _ratio(sum(micro.entropy for micro in self.micros), num_tokens),
            "grad_norm": _ratio(sum(self.grad_norms), self.num_steps),
            "kl": _ratio(sum(kl for kl, _ in with_kl), sum(count for _, count in with_kl)),
            "logprob_gap_max": float(gaps.max()) if len(gaps) else None,
            "logprob_gap_p95": float(np.quantile(gaps, 0.95)) if len(gaps) else None,
            "seconds_per_optimizer_step": _ratio(seconds, self.num_steps),
        }


def _ratio(total: float, count: int) -> float | None:
    return total / count if count else None
