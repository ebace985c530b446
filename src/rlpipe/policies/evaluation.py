"""Log-probs and what else a loss asks for, of a batch's scored tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlpipe.errors import ConfigError
from rlpipe.policies.packing import Batch

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from rlpipe.policies.head import Reading


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `evaluate` was asked for, axes as in `Batch`.

    Attributes:
        logprobs: `[K]`, log-softmax(logits / temperature) of each target.
        entropy: `[K]`, of the distribution each target came from, in nats, at its temperature; without gradient.
        hidden: `[K, H]`, the last hidden state that predicts each target.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None = None
    hidden: torch.Tensor | None = None


def evaluate(module: PreTrainedModel, batch: Batch, needs: Collection[str] = ("logprobs",)) -> Evaluation:
    """Log-probs, and what else `needs` names (`entropy`, `hidden`), of a batch's targets.

    Logits are computed only where a target is predicted, a chunk at a time: no `[K, vocabulary]` tensor is ever whole,
    see `rlpipe.policies.head`. Gradients flow where grad mode and `requires_grad` say so.

    Args:
        module: from `load_module`.
        batch: from `pack`.
        needs: names of fields of `Evaluation`.
    """
    import torch

    # index_select throughout: its backward adds in a fixed order on CPU, where indexing with [] does not.
    hidden = _last_hidden(module, batch).flatten(0, 1).index_select(0, torch.from_numpy(batch.predicting).to(module.device))
    reading, pair_of = _reading(module, batch, "entropy" in needs)
    logprobs, entropy = module.get_output_embeddings()(hidden, reading)
    readout = torch.from_numpy(batch.readout).to(module.device)
    return Evaluation(
        logprobs=logprobs.index_select(0, pair_of),
        entropy=entropy.index_select(0, readout) if "entropy" in needs else None,
        hidden=hidden.index_select(0, readout) if "hidden" in needs else None,
    )


def _last_hidden(module: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """`[B, L, H]`."""
    import torch

    device = module.device
    ids, places = (torch.from_numpy(each).to(device) for each in (batch.input_ids, batch.position_ids))
    settings = {}
    if batch.tiles:
        from rlpipe.policies import tree_attention

        tree_attention.prepare(module)
        # a mask of four dimensions is handed through as it is; without one the library would build its own, [L, L]
        settings = {"tree": tree_attention.Tree(batch.tiles, device), "attention_mask": torch.empty(1, 1, 1, 0, device=device)}
    last: torch.Tensor = module.get_decoder()(input_ids=ids, position_ids=places, use_cache=False, **settings).last_hidden_state
    return last


def _reading(module: PreTrainedModel, batch: Batch, entropy: bool) -> tuple[Reading, torch.Tensor]:
    """What is read from the head, and `[K]` which of the pairs read each target is."""
    import torch

    from rlpipe.policies.head import Reading

    device = module.device
    size = int(batch.targets.max()) + 1
    pairs, pair_of = np.unique(batch.readout * size + batch.targets, return_inverse=True)
    warm = (batch.temperatures != 1.0).any()
    return Reading(
        rows=torch.from_numpy(pairs // size).to(device),
        token_ids=torch.from_numpy(pairs % size).to(device),
        temperatures=torch.from_numpy(batch.temperatures[:, None]).to(device, module.dtype) if warm else None,
        entropy=entropy,
        narrow=torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
    ), torch.from_numpy(pair_of).to(device)


def checkpoint_activations(module: PreTrainedModel) -> None:
    """Let each layer keep only what enters it for the backward, and compute the rest again (Chen et al. 2016,
    https://arxiv.org/abs/1604.06174).

    Raises:
        ConfigError: the family has no checkpoints.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not module.supports_gradient_checkpointing:
        raise ConfigError(f"model family {module.config.model_type} has no activation checkpoints", do="set train.activation_checkpointing: false")
    module.gradient_checkpointing_enable({"use_reentrant": False})
    for part in module.modules():
        if isinstance(part, GradientCheckpointingLayer):
            part.training = True  # what the library asks for; the layers' own parts stay without dropout
