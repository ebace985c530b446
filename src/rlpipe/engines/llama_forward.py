"""The forward of Llama, Mistral and Qwen2 in few operations, on a CPU with packed weights. N = tokens of a pass, H = hidden width, D = head width.

The numbers are to the bit those of the modules under a trainer's autocast: residual stream, norms and rotation in float32, products in the engine's dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from rlpipe.engines.cached_attention import Pass
from rlpipe.engines.packed_linear import PackedLinear, StackedLinear, product

FAMILIES = ("llama", "mistral", "qwen2")
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def has_the_structure(module: Any) -> bool:
    """Whether the module is transformers' own of a known family, with plain linear layers."""
    return _made_of(module, (torch.nn.Linear,))


def _made_of(module: Any, kinds: tuple[type, ...]) -> bool:
    family = module.config.model_type
    if family not in FAMILIES or type(module).__module__ != f"transformers.models.{family}.modeling_{family}" or module.config.hidden_act != "silu":
        return False
    decoder = module.get_decoder()
    return set(dict(decoder.named_children())) == {"embed_tokens", "layers", "norm", "rotary_emb"} and all(
        _layer_fits(layer, kinds) for layer in decoder.layers
    )


def _layer_fits(layer: Any, kinds: tuple[type, ...]) -> bool:
    attention, mlp = dict(layer.self_attn.named_children()), dict(layer.mlp.named_children())
    products = [attention.get(name) for name in ATTENTION] + [mlp.get(name) for name in MLP]
    known = set(dict(layer.named_children())) == LAYER and set(attention) == set(ATTENTION) and set(mlp) == {*MLP, "act_fn"}
    return known and all(type(one) in kinds for one in products) and len({attention[name].bias is None for name in ATTENTION[:3]}) == 1


class LlamaForward:
    """Last hidden states of a pass."""

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.decoder, self.dtype = module.get_decoder(), dtype
        config = module.config
        self.windows = [_window(config, layer.self_attn) for layer in self.decoder.layers]
        self.eps = config.rms_norm_eps

    @staticmethod
    def fits(module: Any) -> bool:
        """Whether the module was made ready for this forward (`weights.prepare`)."""
        return _made_of(module, (PackedLinear, StackedLinear))

    def __call__(self, tokens: Pass) -> torch.Tensor:
        """`[N, H]` float32; keys and values of the tokens are stored on the way."""
        hidden = torch.nn.functional.embedding(tokens.ids, self.decoder.embed_tokens.weight)
        # One table for both halves: a head's second half turns by the angles of its first.
        cos, sin = (table[0].unsqueeze(1) for table in self.decoder.rotary_emb(hidden[None], tokens.positions[None]))
        sin = sin[..., : sin.shape[-1] // 2]
        for number, layer in enumerate(self.decoder.layers):
            attention, mlp = layer.self_attn, layer.mlp
            hidden.add_(self._attended(tokens, number, attention, self._normed(hidden, layer.input_layernorm.weight, self.dtype), cos, sin))
            inputs = self._normed(hidden, layer.post_attention_layernorm.weight, self.dtype)
            gate = torch.nn.functional.silu(product(inputs, mlp.gate_proj.packed, mlp.gate_proj.bias), inplace=True)
            gated = gate.mul_(product(inputs, mlp.up_proj.packed, mlp.up_proj.bias))
            hidden.add_(product(gated, mlp.down_proj.packed, mlp.down_proj.bias))
        return self._normed(hidden, self.decoder.norm.weight, torch.float32)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """RMSNorm, rounded once to the dtype; to the bit the modules' own, which other sums of squares are not."""
        scaled = hidden * hidden.pow(2).mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return torch.mul(scaled, weight, out=torch.empty(hidden.shape, dtype=dtype))

    def _attended(self, tokens: Pass, number: int, attention: Any, inputs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`[N, H]` of one layer's attention."""
        width = attention.head_dim
        heads = attention.q_proj.weight.shape[0] // width
        turned_heads = heads + attention.k_proj.weight.shape[0] // width
        mixed = attention.q_proj.stack(inputs).unflatten(-1, (-1, width))
        before = mixed[:, :turned_heads].float()
        turned, half = before * cos, width // 2
        turned[..., :half].addcmul_(before[..., half:], sin, value=-1)
        turned[..., half:].addcmul_(before[..., :half], sin)
        turned, values = turned.to(self.dtype).transpose(0, 1), mixed[:, turned_heads:].transpose(0, 1)
        out = tokens.attend(number, turned[:heads], turned[heads:], values, attention.scaling, self.windows[number])
        return product(out.flatten(1).to(self.dtype), attention.o_proj.packed, attention.o_proj.bias)


def _window(config: Any, attention: Any) -> int | None:
    """How many tokens the layer looks back: Qwen2 says it by layer, Mistral for all, Llama not at all."""
    window: int | None = {"mistral": getattr(config, "sliding_window", None), "qwen2": getattr(attention, "sliding_window", None)}.get(config.model_type)
    return window
