"""A causal language model made ready to generate: matrix weights in the engine's dtype, the rest in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rlpipe.engines import llama_forward, packed_linear
from rlpipe.engines.packed_linear import PackedHead, PackedLinear
from rlpipe.errors import EngineError
from rlpipe.policies import causal_lm
from rlpipe.policies.device import device


def load(policy_folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """The model of `policy_folder/modules/policy`, frozen and in evaluation mode, and its tokenizer."""
    folder = policy_folder / causal_lm.POLICY_MODULE
    model: Any = causal_lm.load_module(folder, torch.float32)
    model.requires_grad_(False).to(device())
    prepare(model, dtype)
    return model, causal_lm.load_tokenizer(folder)


@torch.no_grad()
def prepare(model: Any, dtype: torch.dtype) -> None:
    """Cast once what autocast would cast at every call, so that the numbers are those of a trainer that autocasts float32 weights.

    Embeddings, norms and the head stay float32. On a CPU the matrices are packed as well.
    """
    head: Any = model.get_output_embeddings()
    packs = packed_linear.available(model.device)
    if packs and llama_forward.has_the_structure(model):
        for attention in (layer.self_attn for layer in model.get_decoder().layers):
            attention.q_proj, attention.k_proj, attention.v_proj = packed_linear.stacked([attention.q_proj, attention.k_proj, attention.v_proj], dtype)
    for parent, name, layer in list(_matrices(model)):
        if layer is head:
            continue
        if packs:
            setattr(parent, name, PackedLinear(layer.weight, layer.bias, dtype, transposed=not isinstance(layer, torch.nn.Linear)))
        elif dtype != torch.float32:
            layer.to(dtype)
    if packs and type(head) is torch.nn.Linear:
        vars(head)["forward"] = PackedHead(head, dtype)


def _matrices(model: Any) -> Iterator[tuple[Any, str, Any]]:
    """Parent, name and layer of every plain product with a matrix."""
    from transformers.pytorch_utils import Conv1D

    for parent in model.modules():
        for name, layer in parent.named_children():
            if type(layer) in (torch.nn.Linear, Conv1D):
                yield parent, name, layer


@torch.no_grad()
def replace(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put other weights of the same model in place of those it has.

    Raises:
        EngineError: not every parameter is named once with its shape, or another one is; the model is then as before.
    """
    parameters = dict(model.named_parameters())
    _check(parameters, tensors)
    for name, parameter in parameters.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, PackedLinear) and name.endswith(".weight"):
            owner.pack(tensors[name])
        else:
            parameter.copy_(tensors[name])
    head = model.get_output_embeddings()
    if isinstance(head.forward, PackedHead):
        head.forward.pack()


def _check(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    wrong = {
        "missing": [name for name in parameters if name not in tensors],
        "unknown": [name for name in tensors if name not in parameters],
        "of another shape": [name for name in parameters if name in tensors and tensors[name].shape != parameters[name].shape],
        "not of numbers": [name for name in parameters if name in tensors and not tensors[name].is_floating_point()],
    }
    found = "; ".join(f"{problem}: {', '.join(sorted(names)[:3])}{' …' if len(names) > 3 else ''}" for problem, names in wrong.items() if names)
    if found:
        accepted = f"the {len(parameters)} tensors of named_parameters()"
        raise EngineError("these are not the model's weights", got=found, accepted=accepted, do="hand over the module's named_parameters()")
