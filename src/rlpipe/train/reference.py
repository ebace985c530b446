"""Log-probs under the reference policy of a KL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlpipe.policies import causal_lm
from rlpipe.policies.device import device
from rlpipe.train.backends.base import autocast
from rlpipe.train.batching import Attempt, TrainGroup, micro_batches
from rlpipe.train.lineage import Start, start_policy
from rlpipe.train.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rlpipe.train.section import Config


class Reference:
    """Fills in `reference_logprobs`; the model is loaded when called and let go after."""

    def __init__(self, config: Config, policy_in: Path, start: Start, ranks: Ranks = ALONE) -> None:
        self.config, self.policy_in, self.start, self.ranks = config, policy_in, start, ranks

    def __call__(self, groups: Sequence[TrainGroup]) -> list[TrainGroup]:
        """The same groups, every attempt with the log-probs `[k]` of its trained tokens under the reference."""
        incoming = self.config.kl is not None and self.config.kl.reference == "incoming"
        module = causal_lm.load_module(self.start.folder if incoming else start_policy(self.policy_in))
        module.to(device())  # type: ignore[arg-type]  # the stub of `to` is for tensors
        return with_reference(groups, module, self.config, self.ranks)


def with_reference(groups: Sequence[TrainGroup], module: PreTrainedModel, config: Config, ranks: Ranks = ALONE) -> list[TrainGroup]:
    """The groups with log-probs of their trained tokens under `module`, at the temperatures they were sampled with.

    Each rank computes its share and gets what the others computed.
    """
    import torch

    found: dict[tuple[int, int], np.ndarray] = {}
    for micro in micro_batches(groups, config.micro_batch, config.max_row_tokens, config.packing, ranks, config.micro_batch_tokens):
        with torch.no_grad(), autocast(module, config.backend.dtype):
            logprobs = causal_lm.evaluate(module, micro.batch).logprobs.cpu().numpy()
        counts = [groups[place].attempts[member].num_tokens for place, member in micro.owners]
        found |= zip(micro.owners, np.split(logprobs, np.cumsum(counts)[:-1]), strict=True)
    found = {owner: logprobs for part in ranks.gather(found) for owner, logprobs in part.items()}
    return [replace(group, attempts=tuple(_filled(attempt, found.get((i, j))) for j, attempt in enumerate(group.attempts))) for i, group in enumerate(groups)]


def _filled(attempt: Attempt, logprobs: np.ndarray | None) -> Attempt:
    return replace(attempt, reference_logprobs=np.empty(0, np.float32) if logprobs is None else logprobs)
