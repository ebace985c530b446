"""Norms, rotation and attention of Llama-like layers with a backward of their own, for training. L = positions, H = hidden width, D = head width.

Values are those of transformers' modules under autocast, bit for bit. What changes is what it takes: a norm's output is
in the precision of the products it goes to, once instead of once a product, and a backward of few passes over memory
keeps only what enters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rlpipe.policies.tree_attention import Tree, attend

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = ("llama", "mistral", "qwen2")
NORMS = ("input_layernorm", "post_attention_layernorm")


def shorten(module: PreTrainedModel) -> None:
    """Let the layers of a known family take the short way where they are given a `tree`; others are left as they are.

    Linear layers are called as modules, so that adapters and ZeRO's hooks stay in effect.
    """
    family = module.config.model_type
    if family not in FAMILIES or type(module).__module__ != f"transformers.models.{family}.modeling_{family}":
        return
    for layer in module.get_decoder().layers:
        for norm in (getattr(layer, name) for name in NORMS):
            norm.forward = _short_norm(norm)
        layer.self_attn.forward = _short_attention(layer.self_attn)


def _short_norm(norm: Any) -> Any:
    forward = norm.forward

    def short(hidden: torch.Tensor) -> torch.Tensor:
        if (hidden.dtype, norm.weight.dtype) != (torch.float32, torch.float32):
            found: torch.Tensor = forward(hidden)
            return found
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        return _Norm.apply(hidden, norm.weight, norm.variance_epsilon, dtype)

    return short


def _short_attention(attention: Any) -> Any:
    forward = attention.forward

    def short(
        hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], tree: Tree | None = None, **settings: Any
    ) -> tuple[torch.Tensor, None]:
        if tree is None:
            found: tuple[torch.Tensor, None] = forward(hidden_states=hidden_states, position_embeddings=position_embeddings, **settings)
            return found
        heads = (projection(hidden_states)[0].unflatten(-1, (-1, attention.head_dim)) for projection in (attention.q_proj, attention.k_proj, attention.v_proj))
        query, key, value = heads
        cos, sin = (table[0, :, None] for table in position_embeddings)
        query, key = _Rotation.apply(query, cos, sin), _Rotation.apply(key, cos, sin)
        return attention.o_proj(attend(query, key, value, tree, attention.scaling).flatten(1)[None]), None

    return short


class _Norm(torch.autograd.Function):
    """`hidden [..., H]`, `weight [H]` -> `weight * hidden / rms(hidden)` in `dtype` (RMSNorm, https://arxiv.org/abs/1910.07467)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
        inverse = hidden.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(hidden, weight, inverse)
        return torch.mul(hidden * inverse, weight, out=torch.empty(hidden.shape, dtype=dtype, device=hidden.device))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, inverse = ctx.saved_tensors
        normed = hidden * inverse
        of_output = gradients[0].to(hidden.dtype)
        products = (of_output * normed).flatten(0, -2)
        along = (products.mv(weight) / -len(weight)).view(inverse.shape)
        of_hidden = torch.mul(of_output, weight).addcmul_(normed, along).mul_(inverse)
        return of_hidden, products.sum(0) if ctx.needs_input_grad[1] else None, None, None


class _Rotation(torch.autograd.Function):
    """`heads [L, heads, D]`, `cos` and `sin [L, 1, D]` -> heads turned by their positions, in their own dtype (https://arxiv.org/abs/2104.09864)."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turned(gradients[0], cos, -sin), None, None


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """A head's second half turns by the angles of its first."""
    half = heads.shape[-1] // 2
    before, sin = heads.to(cos.dtype), sin[..., :half]
    turned = before * cos
    turned[..., :half].sub_(before[..., half:] * sin)
    turned[..., half:].add_(before[..., :half] * sin)
    return turned.to(heads.dtype)
