"""Attention over a tree of token runs: what siblings share is stored once, and what a token sees comes in parts.

A token sees the runs above its own (the beginning all prompts share, its prompt) and its own run. Each part is one
batched attention; parts are joined by their log-sum-exp, which is exact (the merge of FlashAttention, Dao et al. 2022,
https://arxiv.org/abs/2205.14135, as used for shared prefixes by Hydragen, Juravsky et al. 2024,
https://arxiv.org/abs/2402.05099). Key heads are never repeated: the query heads of one key head count as further queries.

N = tokens of a pass, H = query heads, K = key heads, R = H / K, D = head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rlpipe.engines.kv_store import Store

NAME = "rlpipe_cached_tree"
UNSEEN = -1e30
"""Added to scores of keys that a query does not see; finite, so that a part of which nothing is seen joins with weight 0 and not as NaN."""
PLAIN = frozenset({"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "is_causal"})
"""Arguments that do not change what attention computes here."""


class Unfit(Exception):
    """A model asks attention for something this one does not compute."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which run each query looks at, in the form of one batch: `width` places a run, the spare ones filled with any query.

    Attributes:
        order: `[runs * width]` the query at each place; None where the places are the queries in their order.
        back: `[Q]` the place of each query; None likewise.
    """

    width: int
    order: torch.Tensor | None
    back: torch.Tensor | None

    @classmethod
    def of(cls, run: np.ndarray, num_runs: int, device: torch.device, queries: np.ndarray | None = None) -> Layout:
        """Lay out queries by `run`, `[Q]` of 0 to `num_runs` - 1; `queries` `[Q]` are their numbers in the pass."""
        counts = np.bincount(run, minlength=num_runs)
        width = int(counts.max())
        by_run = np.argsort(run, kind="stable")
        place = np.empty_like(run)
        place[by_run] = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
        place += run * width
        if queries is None and len(run) == num_runs * width and (place == np.arange(len(run))).all():
            return cls(width, None, None)
        order = np.zeros(num_runs * width, dtype=np.int64)
        order[place] = np.arange(len(run)) if queries is None else queries
        return cls(width, torch.from_numpy(order).to(device), torch.from_numpy(place).to(device))


@dataclass(slots=True)
class Part:
    """Stored runs `first` to before `last`, and the queries that see them.

    Attributes:
        lengths: tokens to be seen of each run; `starts`: the position of its first token.
        queries: `[Q]` which tokens of the pass look, None for all of them.
    """

    store: Store
    first: int
    last: int
    lengths: np.ndarray
    starts: np.ndarray
    layout: Layout
    queries: torch.Tensor | None
    _masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)

    def again(self) -> Part:
        """The same for a pass with other positions: only masks that hang on them are made anew."""
        return replace(self, _masks={window: mask for window, mask in self._masks.items() if window is None})

    def attend(self, layer: int, query: torch.Tensor, scale: float, window: int | None, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the queries get of these runs, `[Q, K, R, D]`, and its log-sum-exp, `[Q, K, R]`."""
        keys, values = self.store.read(layer, self.first, self.last, int(self.lengths.max()))
        width, (heads, group) = self.layout.width, query.shape[1:3]
        placed = query if self.layout.order is None else query.index_select(0, self.layout.order)
        placed = placed.unflatten(0, (-1, width)).transpose(1, 2).flatten(2, 3)
        out, lse = attend(placed, keys, values, scale, self._mask(window, positions, group))
        out = out.unflatten(2, (width, group)).transpose(1, 2).reshape(-1, heads, group, values.shape[-1])
        lse = lse.unflatten(2, (width, group)).transpose(1, 2).reshape(-1, heads, group)
        return (out, lse) if self.layout.back is None else (out.index_select(0, self.layout.back), lse.index_select(0, self.layout.back))

    def _mask(self, window: int | None, positions: torch.Tensor, group: int) -> torch.Tensor | None:
        """`[runs, 1, 1 or width * R, length]`, the same in every layer; None where all queries see all."""
        if window not in self._masks:
            self._masks[window] = self._masked(window, positions, group)
        return self._masks[window]

    def _masked(self, window: int | None, positions: torch.Tensor, group: int) -> torch.Tensor | None:
        device, longest = positions.device, int(self.lengths.max())
        if window is None and (self.lengths == longest).all():
            return None
        place = torch.arange(longest, device=device)
        seen = (place < torch.from_numpy(self.lengths).to(device)[:, None])[:, None]
        if window is not None:
            at = (positions if self.layout.order is None else positions[self.layout.order]).unflatten(0, (-1, self.layout.width))
            distance = at[:, :, None] - torch.from_numpy(self.starts).to(device)[:, None, None] - place
            seen = (seen & (distance < window)).repeat_interleave(group, dim=1)
        return torch.zeros(seen.shape, device=device).masked_fill_(~seen, UNSEEN)[:, None]


@dataclass(frozen=True, slots=True)
class Fresh:
    """Runs of new tokens that see each other, each token those before it in its run; lengths may differ by what padding is worth."""

    layout: Layout
    queries: torch.Tensor | None

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Part.attend`; key and value `[N, K, D]`. What fills up a run stands behind it, where nothing looks."""
        heads, group = query.shape[1:3]
        if self.layout.order is not None:
            query, key, value = (tensor.index_select(0, self.layout.order) for tensor in (query, key, value))
        length = self.layout.width
        query = query.flatten(1, 2).unflatten(0, (-1, length)).transpose(1, 2)
        key, value = (tensor.repeat_interleave(group, dim=1).unflatten(0, (-1, length)).transpose(1, 2) for tensor in (key, value))
        mask = None
        if window is not None and window < length:
            place = torch.arange(length, device=query.device)
            distance = place[:, None] - place
            mask = torch.zeros(length, length, device=query.device).masked_fill_((distance < 0) | (distance >= window), UNSEEN)[None, None]
        out, lse = attend(query, key, value, scale, mask, causal=mask is None)
        out = out.transpose(1, 2).flatten(0, 1).unflatten(1, (heads, group))
        lse = lse.transpose(1, 2).flatten(0, 1).unflatten(1, (heads, group))
        return (out, lse) if self.layout.back is None else (out.index_select(0, self.layout.back), lse.index_select(0, self.layout.back))


@dataclass(frozen=True, slots=True)
class Written:
    """New tokens `first` to before `last` of the pass, to be stored as tokens `start` and on of a run."""

    first: int
    last: int
    store: Store
    slot: int
    start: int


@dataclass(slots=True)
class Pass:
    """One forward of N tokens in one row.

    Attributes:
        ids, positions: `[N]` int64.
        written: where runs of tokens go; or, where each token goes on one of the first N runs of `appended`, nothing.
        fresh: runs of new tokens among themselves; every token is in one, unless `appended`.
        parts: stored runs; each token is in as many as it has runs above it.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    parts: Sequence[Part]
    written: Sequence[Written] = ()
    fresh: Sequence[Fresh] = ()
    appended: Store | None = None
    append_at: int | torch.Tensor = 0
    longest: int = 0
    """One more than the largest position: a window of so many tokens hides nothing."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        """`[N, K, R, D]` float of `query` `[H, N, D]`, `key` and `value` `[K, N, D]`, which are stored."""
        window = None if window is None or window >= self.longest else window
        self._store(layer, key, value)
        query = query.unflatten(0, (key.shape[0], -1)).permute(2, 0, 1, 3)
        found = [(one.attend(query, key.transpose(0, 1), value.transpose(0, 1), scale, window), one.queries) for one in self.fresh]
        found += [(part.attend(layer, query, scale, window, self.positions), part.queries) for part in self.parts]
        return joined(found, len(self.ids))

    def _store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if self.appended is not None:
            self.appended.append(layer, self.append_at, key, value)
        for run in self.written:
            run.store.write(layer, run.slot, run.start, key[:, run.first : run.last], value[:, run.first : run.last])


def joined(found: Sequence[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]], num_tokens: int) -> torch.Tensor:
    """Attention over all parts from those over each: weights are their shares of the sum of exponentials."""
    (out, lse), queries = found[0]
    if queries is not None:
        out, lse = (
            torch.zeros(num_tokens, *part.shape[1:], dtype=torch.float32, device=part.device).index_copy_(0, queries, part.float()) for part in (out, lse)
        )
        lse = lse if len(queries) == num_tokens else lse.index_fill_(0, _others(queries, num_tokens), UNSEEN)
    for (more, more_lse), queries in found[1:]:
        if queries is None:
            out = torch.lerp(out.float(), more.float(), torch.sigmoid(more_lse - lse).unsqueeze(-1))
            lse = torch.logaddexp(lse, more_lse)
            continue
        before, before_lse = out.index_select(0, queries).float(), lse.index_select(0, queries)
        out = out.float().index_copy(0, queries, torch.lerp(before, more.float(), torch.sigmoid(more_lse - before_lse).unsqueeze(-1)))
        lse = lse.index_copy(0, queries, torch.logaddexp(before_lse, more_lse))
    return out


def _others(queries: torch.Tensor, num_tokens: int) -> torch.Tensor:
    left = torch.ones(num_tokens, dtype=torch.bool, device=queries.device)
    left[queries] = False
    return left.nonzero()[:, 0]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention `[b, h, q, D]` and its log-sum-exp `[b, h, q]` float32, sums in float32.

    On a CPU the kernel behind `scaled_dot_product_attention`, which alone gives the log-sum-exp; elsewhere written out.
    """
    if query.device.type == "cpu" and query.shape[-1] == value.shape[-1]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        return out, lse
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        length = scores.shape[-1]
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool, device=scores.device).triu_(1), UNSEEN)
    lse = torch.logsumexp(scores, dim=-1)
    return (torch.exp(scores - lse[..., None]).to(value.dtype) @ value), lse


def forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    tree: Pass | None = None,
    tree_dtype: torch.dtype = torch.float32,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers' models call; `tree` is handed through by the model's forward.

    Raises:
        Unfit: the model does not hand `tree` through, or wants something else computed.
    """
    unknown = sorted(name for name, argument in others.items() if argument is not None and name not in PLAIN)
    if tree is None or unknown or attention_mask is not None or query.shape[0] != 1:
        raise Unfit(f"attention arguments {unknown}")
    query, key, value = (tensor[0].to(tree_dtype) for tensor in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = tree.attend(module.layer_idx, query, key, value, scale, sliding_window)
    return out.flatten(1, 2).to(tree_dtype)[None], None


def register() -> None:
    """Make the function known to transformers; it builds no mask for one whose name has none."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, forward)
