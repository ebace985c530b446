"""A causal language model made ready to generate: matrix weights in the engine's dtype, the rest in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlpipe.policies import causal_lm


def load(policy_folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model of `policy_folder/modules/policy`, frozen and in evaluation mode, and its tokenizer."""
    folder = policy_folder / causal_lm.POLICY_MODULE
    model = causal_lm.load_module(folder, torch.float32).requires_grad_(False)
    if dtype != torch.float32:
        cast_matrices(model, dtype)
    # The last position of a longer input is a strided view, for which torch would copy the whole head (`contiguous` keeps the strides of a single row).
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0].clone(memory_format=torch.contiguous_format),))
    return model, causal_lm.load_tokenizer(folder)


def cast_matrices(model: Any, dtype: torch.dtype) -> None:
    """Cast once what autocast would cast at every call, so that the numbers are those of a trainer that autocasts float32 weights.

    Embeddings, norms and the head stay float32.
    """
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    for module in model.modules():
        if module is not head and isinstance(module, torch.nn.Linear | Conv1D):
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(weight.to(dtype), requires_grad=False))
