"""KL to a reference policy, estimated a token at a time from its log-prob under both (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from pydantic import Field, model_validator

from rlpipe.params import Section

if TYPE_CHECKING:
    import torch

    Values = TypeVar("Values", np.ndarray, torch.Tensor)


class Kl(Section):
    """Section `train.kl`; leave it out for no KL.

    `placement: reward` takes `coefficient` x the mean KL over an attempt's trained tokens off its reward before the
    advantage: reward 1, tokens [0.5, 0.5], coefficient 0.1 give 0.95. `placement: loss` adds it to each token's loss.
    """

    coefficient: float = Field(gt=0)
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log policy - log reference: d, d^2 / 2, or exp(-d) - 1 + d."""
    placement: Literal["loss", "reward"] = "loss"
    reference: Literal["start", "incoming"] = "start"
    """The start policy (kept in the policy folder), or the policy this round began with, which holds nothing back at a round's first optimizer step."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Kl:
        if self.placement == "loss" and self.estimator == "k1":
            raise ValueError("k1 in the loss has no effect: its expected gradient is 0; use k2 or k3, or placement: reward")
        if self.placement == "reward" and self.reference == "incoming":
            raise ValueError(
                "KL to the incoming policy in the reward has no effect: it sampled the attempts, so the KL is 0; use reference: start or placement: loss"
            )
        return self

    def of(self, logprobs: Values, reference_logprobs: Values) -> Values:
        """The estimate for each token; arrays or tensors of one shape, differentiable in `logprobs`."""
        difference = logprobs - reference_logprobs
        if self.estimator == "k1":
            return difference
        if self.estimator == "k2":
            return difference**2 / 2
        exponential = np.exp(-difference) if isinstance(difference, np.ndarray) else (-difference).exp()
        return exponential - 1 + difference
