"""The built-in engine: prompts prefilled once, the KV cache shared out to the attempts, one process, CPU.

Which requests are computed together is fixed by the order of submission and `chunk_groups`, so equal submissions give equal bytes.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from rlpipe.engines import decoding, weights
from rlpipe.engines.base import Completion, Request, refused, unserved
from rlpipe.engines.stopping import Ending, end_ids
from rlpipe.errors import EngineError

if TYPE_CHECKING:
    from rlpipe.engines import Torch

TOKENS_PER_FORWARD = 2048
"""Padded tokens scored at once by `logprobs`: bounds the logits, which take vocabulary x 4 bytes a token."""
UNBOUNDED = 1 << 30


class TorchEngine:
    """transformers with a `DynamicCache`; see `rlpipe.engines.base.Engine`.

    Raises:
        EngineError: it was closed.
    """

    def __init__(self, config: Torch, policy_folder: Path, threads: int = 0) -> None:
        torch.set_num_threads(threads or os.cpu_count() or 1)
        self.config = config
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self._queue: deque[Request] = deque()
        self._aborted: set[str] = set()
        self.load(policy_folder)

    def load(self, folder: Path) -> None:
        """Replace the weights by those of a policy folder."""
        self._model: Any = None
        self._model, tokenizer = weights.load(folder, self.dtype)
        self._ending = Ending(tokenizer, end_ids(tokenizer, self._model.config, self._model.generation_config))

    @property
    def model(self) -> Any:
        if self._model is None:
            raise EngineError("the engine is closed", do="open it again")
        return self._model

    @property
    def max_length(self) -> int:
        return int(self.model.config.to_dict().get(_length_key(self.model.config)) or UNBOUNDED)

    def submit(self, requests: Iterable[Request]) -> None:
        self._queue.extend(requests)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._aborted.update(request_ids)

    def stream(self) -> Iterator[Completion]:
        while self._queue:
            chunk = [self._queue.popleft() for _ in range(min(self.config.chunk_groups, len(self._queue)))]
            for request in chunk:
                error = refused(request, self.max_length)
                if error:
                    yield from unserved(request, "error", error)
            served = [request for request in chunk if not refused(request, self.max_length)]
            yield from decoding.generate(self.model, self.dtype, self._ending, served, self._aborted)
        self._aborted.clear()

    def logprobs(self, sequences: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        if temperature <= 0:
            raise EngineError("log-probs need a temperature above 0", got=temperature)
        found: list[np.ndarray] = []
        for rows in _batches(sequences):
            found.extend(decoding.score(self.model, self.dtype, rows, temperature))
        return found

    def close(self) -> None:
        self._queue.clear()
        self._model = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _length_key(config: Any) -> str:
    return str(config.attribute_map.get("max_position_embeddings", "max_position_embeddings"))


def _batches(sequences: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Sequences in order, as many at a time as stay within `TOKENS_PER_FORWARD` once padded."""
    rows: list[np.ndarray] = []
    for ids in sequences:
        longest = max([len(ids), *(len(row) for row in rows)])
        if rows and longest * (len(rows) + 1) > TOKENS_PER_FORWARD:
            yield rows
            rows = []
        rows.append(ids)
    if rows:
        yield rows
