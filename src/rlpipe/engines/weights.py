"""A causal language model made ready to generate: matrix weights in the engine's dtype, the rest in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load(policy_folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model of `policy_folder/modules/policy`, frozen and in evaluation mode, and its tokenizer."""
    folder = policy_folder / "modules" / "policy"
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    if dtype != torch.float32:
        cast_matrices(model, dtype)
    return model, AutoTokenizer.from_pretrained(folder)


def cast_matrices(model: Any, dtype: torch.dtype) -> None:
    """Cast once what autocast would cast at every call, so that the numbers are those of a trainer that autocasts float32 weights.

    Embeddings and norms stay float32; a head tied to the embeddings gets a copy of its own.
    """
    from transformers.pytorch_utils import Conv1D

    for module in model.modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            for name, weight in list(module.named_parameters(recurse=False)):
                setattr(module, name, torch.nn.Parameter(weight.to(dtype), requires_grad=False))
