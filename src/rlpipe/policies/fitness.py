"""Checks that a model and its trajectories fit together before any training is spent on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlpipe.errors import ConfigError
from rlpipe.policies.causal_lm import evaluate
from rlpipe.policies.packing import ScoredSequence, collate, pack

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_evaluation(module: PreTrainedModel, shared: bool) -> None:
    """Compare `evaluate` with the model's own forward on six tokens.

    Raises:
        ConfigError: the family changes its logits after the head, or its attention does not take a packed row's mask.
    """
    import torch

    sequences = [np.array([1, 2, 3, 4]) % module.config.vocab_size, np.array([1, 2, 5, 6]) % module.config.vocab_size]
    scored = [ScoredSequence(ids, np.array([False, True, True, True]), np.ones(4)) for ids in sequences]
    with torch.no_grad():
        logits = module(torch.from_numpy(np.stack(sequences)).to(module.device), use_cache=False).logits.float()
        own = torch.log_softmax(logits, dim=-1)[:, :-1].gather(-1, torch.from_numpy(np.stack(sequences)[:, 1:, None]).to(module.device)).flatten()
        got = evaluate(module, collate(pack(scored, 16, shared))).logprobs
    gap, allowed = float((own - got).abs().max()), 1e-3 if next(module.parameters()).dtype == torch.float32 else 0.2
    if not gap <= allowed:
        kind = module.config.model_type
        do = "set train.packing: none" if shared else "use a model whose logits are its output embedding times its last hidden state"
        raise ConfigError(f"model family {kind} cannot be evaluated this way", got=f"log-probs off by {gap:.3g}", accepted=f"{allowed:g}", do=do)


def check_window(module: PreTrainedModel, num_tokens: int, shared: bool) -> None:
    """Refuse sequences longer than the model, and packed rows where the model limits how far attention looks back.

    Raises:
        ConfigError: names the length and the limit.
    """
    values = module.config.to_dict()
    longest = values.get("max_position_embeddings")
    if longest is not None and num_tokens > longest:
        raise ConfigError("a trajectory is longer than the model", got=f"{num_tokens} tokens", accepted=f"at most {longest}")
    kinds, window = values.get("layer_types") or ("unnamed",), values.get("sliding_window")
    windowed = any(kind != "full_attention" for kind in kinds)
    if shared and windowed and window is not None and num_tokens > window:
        raise ConfigError("packed rows need full attention", got=f"{values['model_type']} that looks back {window} tokens", do="set train.packing: none")
