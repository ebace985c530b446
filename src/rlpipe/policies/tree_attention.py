"""Attention over the positions of a prefix tree, tile by tile, for the models of transformers.

A tile's keys are brought together where they are needed and forgotten, in the forward as in the backward, so that what
is kept for the backward is one query, key and value a position. Heads that share keys and values are queries of one
product. Pairs that no position may see are computed only inside a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
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
CHANGES_SCORES = ("softcap", "s_aux", "position_bias")
"""What families hand to their attention that is more than a scaled product under a mask."""


class Tree:
    """The tiles of a batch on a device, with their masks in each form that was asked for."""

    def __init__(self, tiles: Sequence[Tiles], device: torch.device) -> None:
        self.queries = [torch.from_numpy(each.queries.ravel()).to(device) for each in tiles]
        self.keys = [torch.from_numpy(each.keys.ravel()).to(device) for each in tiles]
        self.shapes = [each.visible.shape for each in tiles]
        self.place = torch.from_numpy(np.argsort(np.concatenate([each.queries.ravel() for each in tiles]))).to(device)
        self.visible = [torch.from_numpy(each.visible).to(device) for each in tiles]
        self.masks: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

    def masks_of(self, dtype: torch.dtype, share: int) -> list[torch.Tensor]:
        """`[R, 1, share * Q, K]` a tile, to be added to scores; `share` = query heads on one key head."""
        if (dtype, share) not in self.masks:
            self.masks[dtype, share] = [_additive(visible, dtype).repeat(1, share, 1)[:, None] for visible in self.visible]
        return self.masks[dtype, share]


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
    by_position = [each[0].transpose(0, 1) for each in (query, key, value)]
    return _TreeAttention.apply(*by_position, tree, settings.get("scaling"))[None], None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class _TreeAttention(torch.autograd.Function):
    """`query [L, H, D]`, `key` and `value [L, G, D]` -> `[L, H, D]`.

    The backward computes a tile's forward again. It runs in float32 at least: on tiles of this size the CPU kernel for
    bfloat16 takes up to ten times as long.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tree: Tree, scale: float | None) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.tree, ctx.scale = tree, scale
        masks = tree.masks_of(query.dtype, query.shape[1] // key.shape[1])
        outputs = [
            _attend(query.index_select(0, queries), key.index_select(0, keys), value.index_select(0, keys), mask, shape, scale)
            for queries, keys, mask, shape in zip(tree.queries, tree.keys, masks, tree.shapes, strict=True)
        ]
        return torch.cat(outputs).index_select(0, tree.place)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tree, inputs = ctx.tree, ctx.saved_tensors
        wide = torch.promote_types(inputs[0].dtype, torch.float32)
        sums = [torch.zeros(each.shape, dtype=wide, device=each.device) for each in inputs]
        masks = tree.masks_of(wide, inputs[0].shape[1] // inputs[1].shape[1])
        for queries, keys, mask, shape in zip(tree.queries, tree.keys, masks, tree.shapes, strict=True):
            places = (queries, keys, keys)
            with torch.enable_grad(), torch.autocast(queries.device.type, enabled=False):
                query, key, value = (each.index_select(0, place).to(wide).requires_grad_() for each, place in zip(inputs, places, strict=True))
                output = _attend(query, key, value, mask, shape, ctx.scale)
            found = torch.autograd.grad(output, (query, key, value), gradients[0].index_select(0, queries).to(wide))
            for total, place, part in zip(sums, places, found, strict=True):
                total.flatten(1).index_add_(0, place, part.flatten(1))
        return (*(total.to(each.dtype) for total, each in zip(sums, inputs, strict=True)), None, None)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, shape: tuple[int, int, int], scale: float | None) -> torch.Tensor:
    """Tiles' queries `[R * Q, H, D]` and keys `[R * K, G, D]` -> `[R * Q, H, D]`; H / G heads become queries of one product."""
    (tiles, num_queries, num_keys), (heads, width), groups = shape, query.shape[1:], key.shape[1]
    folded = query.view(tiles, num_queries, groups, heads // groups, width).permute(0, 2, 3, 1, 4).reshape(tiles, groups, -1, width)
    key, value = (each.view(tiles, num_keys, groups, width).transpose(1, 2) for each in (key, value))
    output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return output.view(tiles, groups, heads // groups, num_queries, width).permute(0, 3, 1, 2, 4).reshape(-1, heads, width)
