"""Prefill and decode of one chunk. B = rows, G = groups, R = tokens of the longest remainder, V = vocabulary.

The tokens all prompts begin with are computed once for the chunk, the rest of each prompt once for its group, and the
cache is then shared out to the attempts. Masks come from lengths, never from ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlpipe.engines.base import Completion, FinishReason, Request, unserved
from rlpipe.engines.sampling import draw, uniforms
from rlpipe.engines.stopping import Ending

COMPACT_SHARE = 8
"""Rows leave the cache once one in this many has ended: moving the cache costs about as much as computing those rows."""


@dataclass(slots=True)
class Attempt:
    """One running row of the batch."""

    request: Request
    index: int
    uniforms: np.ndarray
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None

    def completion(self) -> Completion:
        """What the attempt has, as it ended."""
        ids, logprobs = np.array(self.token_ids, dtype=np.int32), np.array(self.logprobs, dtype=np.float32)
        return Completion(self.request.request_id, self.index, ids, logprobs, self.reason or "abort")


@dataclass(slots=True)
class Running:
    """The rows of a chunk with their cache.

    Attributes:
        mask: `[B, tokens in the cache]` int64, 0 where a shorter prompt was padded.
        position: `[B]` int64, position of the next token.
        logits: `[B, V]` at the last token.
    """

    rows: list[Attempt]
    cache: Any
    mask: torch.Tensor
    position: torch.Tensor
    logits: torch.Tensor

    def select(self, indices: torch.Tensor) -> None:
        """Keep, repeat or reorder rows of the tensors; `rows` is the caller's."""
        self.cache.batch_select_indices(indices)
        self.mask, self.position, self.logits = self.mask[indices], self.position[indices], self.logits[indices]


def generate(model: Any, dtype: torch.dtype, ending: Ending, chunk: Sequence[Request], aborted: AbstractSet[str]) -> Iterator[Completion]:
    """All attempts of a chunk, each as soon as it ends. `aborted` may grow meanwhile."""
    # Decided before the first yield: whoever reads the results may abort more.
    gone = [request for request in chunk if request.request_id in aborted]
    wanted = [request for request in chunk if request.request_id not in aborted]
    for request in gone:
        yield from unserved(request, "abort")
    for requests in _padding_groups(model, wanted):
        running = _prefill(model, dtype, requests)
        while running.rows:
            for attempt in _advance(running, ending, aborted):
                yield attempt.completion()
            _step(model, dtype, running)


def common_prefix(prompts: Sequence[np.ndarray]) -> int:
    """Tokens that all prompts begin with, at least one of each left over."""
    shortest = min(len(ids) for ids in prompts)
    rows = np.stack([ids[:shortest] for ids in prompts])
    differing = np.flatnonzero((rows != rows[0]).any(axis=0))
    return min(int(differing[0]) if len(differing) else shortest, shortest - 1)


def left_padded(rows: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `[G, R]` int64 and their mask `[G, R]`, ends aligned; the filling is id 0 and says nothing."""
    longest = max(len(ids) for ids in rows)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :] = torch.from_numpy(row.astype(np.int64))
        mask[i, longest - len(row) :] = 1
    return ids, mask


def _padding_groups(model: Any, chunk: Sequence[Request]) -> Iterator[list[Request]]:
    """The chunk whole, or split by prompt length where the model attends through a window: padding would take up places in it."""
    if not chunk:
        return
    windowed = attention_window(model.config) is not None
    lengths = sorted({len(request.prompt_ids) for request in chunk}) if windowed else [None]
    for length in lengths:
        found = [request for request in chunk if length is None or len(request.prompt_ids) == length]
        if found:
            yield found


def attention_window(config: Any) -> int | None:
    """Tokens of the model's attention window, None where it sees all."""
    found = config.to_dict().get("sliding_window")
    return None if found is None else int(found)


@torch.inference_mode()
def _prefill(model: Any, dtype: torch.dtype, requests: Sequence[Request]) -> Running:
    prompts = [request.prompt_ids for request in requests]
    shared = common_prefix(prompts)
    cache = _cache(model, dtype)
    if shared:
        ids = torch.from_numpy(prompts[0][:shared].astype(np.int64))[None]
        _forward(model, dtype, ids, torch.ones_like(ids), torch.arange(shared)[None], cache)
        cache.batch_repeat_interleave(len(prompts))
    ids, mask = left_padded([ids[shared:] for ids in prompts])
    positions = (shared + mask.cumsum(dim=1) - 1).clamp(min=0)
    mask = torch.cat([torch.ones(len(prompts), shared, dtype=torch.int64), mask], dim=1)
    logits = _forward(model, dtype, ids, mask, positions, cache)
    running = Running([], cache, mask, positions[:, -1] + 1, logits)
    running.select(torch.repeat_interleave(torch.tensor([len(request.seeds) for request in requests])))
    running.rows = [
        Attempt(request, index, uniforms(seed, request.sampling.max_new_tokens)) for request in requests for index, seed in enumerate(request.seeds)
    ]
    return running


def _cache(model: Any, dtype: torch.dtype) -> Any:
    """A `DynamicCache` that holds keys and values in the engine's dtype: attention under autocast would cast all of them at every token."""
    from transformers import DynamicCache

    class TypedCache(DynamicCache):
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return super().update(key_states.to(dtype), value_states.to(dtype), layer_idx, *args, **kwargs)

    return TypedCache(config=model.config)


@torch.inference_mode()
def _advance(running: Running, ending: Ending, aborted: AbstractSet[str]) -> list[Attempt]:
    """Draw one token per live row; returns the attempts that ended with it."""
    live = [i for i, row in enumerate(running.rows) if row.reason is None]
    temperature = torch.tensor([running.rows[i].request.sampling.temperature for i in live])
    uniform = torch.tensor([running.rows[i].uniforms[len(running.rows[i].token_ids)] for i in live], dtype=torch.float64)
    logits = running.logits if len(live) == len(running.rows) else running.logits[live]
    tokens, logprobs = draw(logits, temperature, uniform)
    ended = []
    for i, token, logprob in zip(live, tokens.tolist(), logprobs.tolist(), strict=True):
        row = running.rows[i]
        if row.request.request_id in aborted:
            row.reason = "abort"
        else:
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.reason = ending.reason(row.token_ids, row.request.sampling)
        if row.reason is not None:
            ended.append(row)
    return ended


@torch.inference_mode()
def _step(model: Any, dtype: torch.dtype, running: Running) -> None:
    """Compute the logits after the newest tokens. Rows that ended stay as dead weight until moving the cache is worth it."""
    live = [i for i, row in enumerate(running.rows) if row.reason is None]
    if not live:
        running.rows = []
        return
    if (len(running.rows) - len(live)) * COMPACT_SHARE >= len(running.rows):
        running.select(torch.tensor(live))
        running.rows = [running.rows[i] for i in live]
    alive = torch.tensor([row.reason is None for row in running.rows])
    ids = torch.tensor([row.token_ids[-1] if row.token_ids else 0 for row in running.rows])[:, None]
    running.mask = torch.cat([running.mask, torch.ones(len(running.rows), 1, dtype=torch.int64)], dim=1)
    running.logits = _forward(model, dtype, ids, running.mask, running.position[:, None], running.cache)
    running.position = running.position + alive.long()


def _forward(model: Any, dtype: torch.dtype, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
    """`[B, V]` logits at the last place; the cache grows by the ids given."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return found.logits[:, -1]


@torch.inference_mode()
def score(model: Any, dtype: torch.dtype, rows: Sequence[np.ndarray], temperature: float) -> list[np.ndarray]:
    """`[T]` float32 log-probs per row by one plain forward, padded at the end; NaN at 0."""
    longest = max(len(ids) for ids in rows)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(row.astype(np.int64))
        mask[i, : len(row)] = 1
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1).gather(2, ids[:, 1:, None])[:, :, 0].numpy()
    return [np.concatenate([[np.float32(np.nan)], logprobs[i, : max(len(row) - 1, 0)]])[: len(row)].astype(np.float32) for i, row in enumerate(rows)]
