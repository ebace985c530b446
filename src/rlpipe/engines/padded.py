"""Generation for families that `tree_model` does not take: padded rows over the cache of transformers, one row an attempt.

Slower and larger, by the same law: each row computes and holds its prompt. Attempts run in batches that stay within the
tokens in flight, one batch after the other. Masks come from lengths, never from ids.
B = rows, L = tokens of the longest row, V = vocabulary.
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


@dataclass(slots=True)
class Row:
    """One attempt."""

    request: Request
    index: int
    uniforms: np.ndarray
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def ids(self) -> np.ndarray:
        """`[P + b]` the prompt and what the attempt has."""
        return np.concatenate([self.request.prompt_ids, np.array(self.token_ids, dtype=np.int32)])

    def completion(self) -> Completion:
        """What the attempt has, as it ended."""
        ids, logprobs = np.array(self.token_ids, dtype=np.int32), np.array(self.logprobs, dtype=np.float32)
        return Completion(self.request.request_id, self.index, ids, logprobs, self.reason or "abort")


@dataclass(slots=True)
class Running:
    """The rows of a batch with their cache.

    Attributes:
        mask: `[B, tokens in the cache]` int64, 0 where a shorter row was padded.
        position: `[B]` int64, position of the next token.
        logits: `[B, V]` at the last token.
    """

    rows: list[Row]
    cache: Any
    mask: torch.Tensor
    position: torch.Tensor
    logits: torch.Tensor


def generate(
    model: Any, dtype: torch.dtype, ending: Ending, chunk: Sequence[Request], aborted: AbstractSet[str], max_tokens_in_flight: int | None = None
) -> Iterator[Completion]:
    """All attempts of a chunk, each as soon as it ends. `aborted` may grow meanwhile."""
    gone = [request for request in chunk if request.request_id in aborted]
    rows = [row for request in chunk if request.request_id not in aborted for row in _rows(request)]
    for request in gone:
        yield from unserved(request, "abort")
    for batch in _batches(rows, max_tokens_in_flight, attention_window(model.config) is not None):
        for row in batch:
            row.reason = ending.reason(row.token_ids, row.request.sampling) if row.token_ids else None
            if row.reason is not None:
                yield row.completion()
        running = _begin(model, dtype, [row for row in batch if row.reason is None])
        while running is not None:
            for row in _advance(running, ending, aborted):
                yield row.completion()
            running = _step(model, dtype, running)


def left_padded(rows: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `[B, L]` int64 and their mask `[B, L]`, ends aligned; the filling is id 0 and says nothing."""
    longest = max(len(ids) for ids in rows)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.int64), torch.zeros(len(rows), longest, dtype=torch.int64)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :] = torch.from_numpy(row.astype(np.int64))
        mask[i, longest - len(row) :] = 1
    return ids, mask


def attention_window(config: Any) -> int | None:
    """Tokens of the model's attention window, None where it sees all."""
    found = config.to_dict().get("sliding_window")
    return None if found is None else int(found)


def _rows(request: Request) -> Iterator[Row]:
    for index, seed in enumerate(request.seeds):
        row = Row(request, index, uniforms(seed, request.sampling.max_new_tokens))
        if request.begun:
            row.token_ids, row.logprobs = request.begun[index].token_ids.tolist(), request.begun[index].logprobs.tolist()
        yield row


def _batches(rows: Sequence[Row], limit: int | None, windowed: bool) -> Iterator[list[Row]]:
    """Rows in order, as many at a time as the limit allows; of one length where a window would count the padding."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.ids)) if windowed else rows:
        longest = max(len(one.request.prompt_ids) + one.request.sampling.max_new_tokens for one in [*batch, row])
        full = limit is not None and longest * (len(batch) + 1) > limit
        if batch and (full or (windowed and len(row.ids) != len(batch[0].ids))):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.inference_mode()
def _begin(model: Any, dtype: torch.dtype, rows: list[Row]) -> Running | None:
    if not rows:
        return None
    ids, mask = (tensor.to(model.device) for tensor in left_padded([row.ids for row in rows]))
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    cache = _cache(model, dtype)
    logits = _forward(model, dtype, ids, mask, positions, cache)
    return Running(rows, cache, mask, positions[:, -1] + 1, logits)


def _cache(model: Any, dtype: torch.dtype) -> Any:
    """A `DynamicCache` that holds keys and values in the engine's dtype: attention under autocast would cast all of them at every token."""
    from transformers import DynamicCache

    class TypedCache(DynamicCache):
        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return super().update(key_states.to(dtype), value_states.to(dtype), layer_idx, *args, **kwargs)

    return TypedCache(config=model.config)


@torch.inference_mode()
def _advance(running: Running, ending: Ending, aborted: AbstractSet[str]) -> list[Row]:
    """Draw one token per row; returns the rows that ended with it."""
    device = running.logits.device
    temperature = torch.tensor([row.request.sampling.temperature for row in running.rows], device=device)
    uniform = torch.tensor([row.uniforms[len(row.token_ids)] for row in running.rows], dtype=torch.float64, device=device)
    tokens, logprobs = draw(running.logits, temperature, uniform)
    for row, token, logprob in zip(running.rows, tokens.tolist(), logprobs.tolist(), strict=True):
        if row.request.request_id in aborted:
            row.reason = "abort"
        else:
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            row.reason = ending.reason(row.token_ids, row.request.sampling)
    return [row for row in running.rows if row.reason is not None]


@torch.inference_mode()
def _step(model: Any, dtype: torch.dtype, running: Running) -> Running | None:
    """Take out the rows that ended and compute the logits after the newest tokens."""
    live = [i for i, row in enumerate(running.rows) if row.reason is None]
    if not live:
        return None
    mask, position = running.mask, running.position
    if len(live) < len(running.rows):
        kept = torch.tensor(live, device=mask.device)
        running.cache.batch_select_indices(kept)
        mask, position = mask[kept], position[kept]
    rows = [running.rows[i] for i in live]
    ids = torch.tensor([[row.token_ids[-1]] for row in rows], device=mask.device)
    mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return Running(rows, running.cache, mask, position + 1, _forward(model, dtype, ids, mask, position[:, None], running.cache))


def _forward(model: Any, dtype: torch.dtype, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
    """`[B, V]` logits at the last place; the cache grows by the ids given."""
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
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
    ids, mask = ids.to(model.device), mask.to(model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1).gather(2, ids[:, 1:, None])[:, :, 0].cpu().numpy()
    return [np.concatenate([[np.float32(np.nan)], logprobs[i, : max(len(row) - 1, 0)]])[: len(row)].astype(np.float32) for i, row in enumerate(rows)]
