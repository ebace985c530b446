"""Attention over the positions of a prefix tree, tile by tile, for the models of transformers.

A tile's keys are brought together where they are needed and forgotten, in the forward as in the backward, so that what
is kept for the backward is one query, key and value a position. Heads that share keys and values are queries of one
product. Pairs that no position may see are computed only inside a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from rlpipe.errors import ConfigError
from rlpipe.policies.packing import Tiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "rlpipe_tree"
SCORES = 1 << 19
"""Scores of all heads that the backward holds at a time: a few MB, which stay in the cache."""
CHANGES_SCORES = ("softcap", "s_aux", "position_bias")
"""What families hand to their attention that is more than a scaled product under a mask."""


class Tree:
    """The tiles of a batch on a device, with their masks and places in each form that was asked for."""

    def __init__(self, tiles: Sequence[Tiles], device: torch.device) -> None:
        self.queries = [torch.from_numpy(each.queries).to(device) for each in tiles]
        self.keys = [torch.from_numpy(each.keys).to(device) for each in tiles]
        self.shapes = [each.visible.shape for each in tiles]
        self.place = torch.from_numpy(np.argsort(np.concatenate([each.queries.ravel() for each in tiles]))).to(device)
        self.visible = [torch.from_numpy(each.visible).to(device) for each in tiles]
        self.masks: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        self.parts: dict[tuple[torch.dtype, int, int], list[Part]] = {}

    def masks_of(self, dtype: torch.dtype, share: int) -> list[torch.Tensor]:
        """`[R, 1, share * Q, K]` a tile, to be added to scores; `share` = query heads on one key head."""
        if (dtype, share) not in self.masks:
            self.masks[dtype, share] = [_additive(visible, dtype).repeat(1, share, 1)[:, None] for visible in self.visible]
        return self.masks[dtype, share]

    def parts_of(self, dtype: torch.dtype, heads: int, groups: int) -> list[Part]:
        """As many tiles of one shape at a time as `SCORES` takes."""
        if (dtype, heads, groups) not in self.parts:
            self.parts[dtype, heads, groups] = list(self._parts(dtype, heads, groups))
        return self.parts[dtype, heads, groups]

    def _parts(self, dtype: torch.dtype, heads: int, groups: int) -> Iterator[Part]:
        for queries, keys, visible, (tiles, num_queries, num_keys) in zip(self.queries, self.keys, self.visible, self.shapes, strict=True):
            step = max(1, SCORES // (heads * num_queries * num_keys))
            for start in range(0, tiles, step):
                chosen = slice(start, start + step)
                asking, seen = (_by_head(each[chosen], groups, len(self.place)) for each in (queries, keys))
                yield Part(asking, seen, _additive(visible[chosen], dtype)[:, :, None], (groups, len(queries[chosen]), num_queries, num_keys))


@dataclass(frozen=True, slots=True)
class Part:
    """Some tiles of one shape, for G key heads.

    Attributes:
        queries: `[G * R * Q]`, rows of what is laid out `[G, L, ...]`.
        keys: `[G * R * K]`, likewise.
        mask: `[R, Q, 1, K]`, to be added to scores.
        shape: G, R, Q, K.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor
    shape: tuple[int, int, int, int]


def _by_head(positions: torch.Tensor, groups: int, length: int) -> torch.Tensor:
    return (torch.arange(groups, device=positions.device)[:, None] * length + positions.flatten()).flatten()


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)


def prepare(module: PreTrainedModel) -> None:
    """Let the module's layers take a `tree`; without one they go on as they were."""
    module.config._attn_implementation = NAME


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, tree: Tree | None = None, **settings: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: heads `[1, H, L, D]` in, `[1, L, H, D]` out.

    Raises:
        ConfigError: the family's attention is not a scaled product under a mask.
    """
    if tree is None:
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
        return found
    changed = [name for name in CHANGES_SCORES if settings.get(name) is not None]
    if changed:
        raise ConfigError("packed rows need plain attention", got=f"attention with {', '.join(changed)}", do="set train.packing: none")
    # under autocast rotation leaves queries and keys in float32; values are in the precision of products
    asking, seen, values = (each[0].transpose(0, 1).to(value.dtype) for each in (query, key, value))
    return attend(asking, seen, values, tree, settings.get("scaling"))[None], None


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: Tree, scale: float | None = None) -> torch.Tensor:
    """`query [L, H, D]`, `key` and `value [L, G, D]` -> `[L, H, D]`."""
    found: torch.Tensor = _TreeAttention.apply(query, key, value, tree, scale)
    return found


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class _TreeAttention(torch.autograd.Function):
    """`query [L, H, D]`, `key` and `value [L, G, D]` -> `[L, H, D]`.

    The backward computes the weights of a few tiles again, as the softmax of scores in float32 at least; products with
    the weights and their gradient run in the inputs' precision. Written out as products it takes a third of the time of
    the CPU's attention kernels, whose backward runs at a tenth of the speed of a product in bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: Tree, scale: float | None) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.tree, ctx.scale = tree, query.shape[2] ** -0.5 if scale is None else scale
        masks = tree.masks_of(query.dtype, query.shape[1] // key.shape[1])
        outputs = [
            _attend(query.index_select(0, asking.flatten()), key.index_select(0, seen.flatten()), value.index_select(0, seen.flatten()), mask, shape, ctx.scale)
            for asking, seen, mask, shape in zip(tree.queries, tree.keys, masks, tree.shapes, strict=True)
        ]
        return torch.cat(outputs).index_select(0, tree.place)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        (length, heads, width), groups = query.shape, key.shape[1]
        wide = torch.promote_types(query.dtype, torch.float32)
        with torch.autocast(query.device.type, enabled=False):
            asked, gradient = (each.view(length, groups, -1).transpose(0, 1).flatten(0, 1) for each in (query, gradients[0].to(query.dtype)))
            key, value = (each.transpose(0, 1).flatten(0, 1) for each in (key, value))
            of_query = torch.empty_like(asked)
            of_key, of_value = (torch.zeros(each.shape, dtype=wide, device=each.device) for each in (key, value))
            for part in ctx.tree.parts_of(wide, heads, groups):
                asking, of_output = (each.index_select(0, part.queries).view(*part.shape[:2], -1, width) for each in (asked, gradient))
                keys, values = (each.index_select(0, part.keys).view(*part.shape[:2], -1, width) for each in (key, value))
                found = _gradients(asking, of_output, keys, values, part, ctx.scale)
                of_query.index_copy_(0, part.queries, found[0].view(-1, asked.shape[1]))
                of_key.index_add_(0, part.keys, found[1].view(-1, width).to(wide))
                of_value.index_add_(0, part.keys, found[2].view(-1, width).to(wide))
        of_query = of_query.view(groups, length, -1).transpose(0, 1).reshape(query.shape)
        return of_query, *(each.to(query.dtype).view(groups, length, width).transpose(0, 1) for each in (of_key, of_value)), None, None


def _gradients(
    query: torch.Tensor, gradient: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: Part, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `query [G, R, Q * H / G, D]`, `key` and `value [G, R, K, D]`, of softmax(scale q kᵀ + mask) v.

    With weights P and the output's gradient dO: dV = Pᵀ dO, dP = dO Vᵀ, dS = P (dP - sum of P dP), as in FlashAttention
    (Dao et al. 2022, https://arxiv.org/abs/2205.14135, appendix B).
    """
    (groups, tiles, num_queries, num_keys), wide = part.shape, part.mask.dtype
    scores = torch.matmul(query.to(wide) * scale, key.to(wide).transpose(-1, -2))
    scores.view(groups, tiles, num_queries, -1, num_keys).add_(part.mask)
    weights = torch.softmax(scores, -1)
    of_weights = torch.matmul(gradient, value.transpose(-1, -2)).to(wide)
    of_scores = torch._softmax_backward_data(of_weights, weights, -1, wide).to(query.dtype)
    of_value = torch.matmul(weights.to(query.dtype).transpose(-1, -2), gradient)
    return torch.matmul(of_scores, key).mul_(scale), torch.matmul(of_scores.transpose(-1, -2), query).mul_(scale), of_value


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, shape: tuple[int, int, int], scale: float) -> torch.Tensor:
    """Tiles' queries `[R * Q, H, D]` and keys `[R * K, G, D]` -> `[R * Q, H, D]`; H / G heads become queries of one product."""
    (tiles, num_queries, num_keys), (heads, width), groups = shape, query.shape[1:], key.shape[1]
    folded = query.view(tiles, num_queries, groups, heads // groups, width).permute(0, 2, 3, 1, 4).reshape(tiles, groups, -1, width)
    key, value = (each.view(tiles, num_keys, groups, width).transpose(1, 2) for each in (key, value))
    output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return output.view(tiles, groups, heads // groups, num_queries, width).permute(0, 3, 1, 2, 4).reshape(-1, heads, width)
