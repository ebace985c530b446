"""The built-in engine: what siblings share is computed once, continuous batching within a chunk, one process.

Which requests are computed together is fixed by the order of submission, `chunk_groups` and `max_tokens_in_flight`, so
equal submissions give equal bytes. Nothing that was computed outlives its chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from rlpipe.engines import cached_attention, decoding, padded, weights
from rlpipe.engines.base import Completion, Request, refused, unserved
from rlpipe.engines.cached_attention import Unfit
from rlpipe.engines.stopping import Ending, end_ids
from rlpipe.engines.tree_model import TOKENS_PER_PASS, TreeModel
from rlpipe.errors import EngineError
from rlpipe.policies.device import num_cores

if TYPE_CHECKING:
    from rlpipe.engines import Torch

UNBOUNDED = 1 << 30


class TorchEngine:
    """A transformers model in this process; see `rlpipe.engines.base.Engine`.

    Llama, Qwen2, Mistral, GPT-2 and whatever else leaves attention to one function and computes logits as its output
    embedding times its last hidden state are decoded over a tree of shared tokens (`decoding`); others row by row (`padded`).

    Raises:
        EngineError: it was closed.
    """

    def __init__(self, config: Torch, policy_folder: Path, threads: int = 0) -> None:
        torch.set_num_threads(threads or num_cores())
        cached_attention.register()
        self.config = config
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self._queue: deque[Request] = deque()
        self._aborted: set[str] = set()
        self._waiting: set[str] = set()
        self._generating = self._closed = False
        self._open(policy_folder)

    def load(self, weights_from: Path | Mapping[str, torch.Tensor]) -> None:
        """Replace the weights by those of a policy folder, or in place by named tensors.

        Raises:
            EngineError: the tensors are not those of the model, attempts are running, or the engine was closed. After a
                folder that cannot be read the engine has no weights until another one is loaded.
        """
        if self._closed:
            raise EngineError("the engine is closed", do="open it again")
        if self._generating:
            raise EngineError("weights cannot change while attempts are running", do="read stream() to its end first")
        if isinstance(weights_from, Path):
            self._open(weights_from)
        else:
            weights.replace(self.model, weights_from)

    def _open(self, policy_folder: Path) -> None:
        self._model: Any = None
        self._tree: TreeModel | None = None
        model, tokenizer = weights.load(policy_folder, self.dtype)
        self._ending = Ending(tokenizer, end_ids(tokenizer, model.config, model.generation_config))
        try:
            self._tree = TreeModel(model, self.dtype)
        except Unfit:
            self._tree = None
        self._model = model

    @property
    def model(self) -> Any:
        if self._model is None:
            raise EngineError(
                "the engine is closed" if self._closed else "the engine holds no weights", do="open it again" if self._closed else "load a policy"
            )
        return self._model

    @property
    def max_length(self) -> int:
        """The model's length, or `max_tokens_in_flight` where that is less."""
        longest = int(self.model.config.to_dict().get(_length_key(self.model.config)) or UNBOUNDED)
        return min(longest, self.config.max_tokens_in_flight or UNBOUNDED)

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._queue.append(request)
            self._waiting.add(request.request_id)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._aborted.update(self._waiting.intersection(request_ids))

    def stream(self) -> Iterator[Completion]:
        self._generating = True
        try:
            while self._queue:
                chunk = [self._queue.popleft() for _ in range(min(self.config.chunk_groups, len(self._queue)))]
                yield from self._generate(chunk)
            self._aborted.clear()
            self._waiting.clear()
        finally:
            self._generating = False

    def _generate(self, chunk: Sequence[Request]) -> Iterator[Completion]:
        errors = {id(request): refused(request, self.max_length, self.model.config.vocab_size) for request in chunk}
        for request in chunk:
            if errors[id(request)]:
                yield from unserved(request, "error", errors[id(request)])
        served = [request for request in chunk if not errors[id(request)]]
        limit = self.config.max_tokens_in_flight
        if self._tree is None:
            yield from padded.generate(self.model, self.dtype, self._ending, served, self._aborted, limit)
        else:
            yield from decoding.generate(self._tree, self._ending, served, self._aborted, limit)

    def logprobs(self, sequences: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        if temperature <= 0:
            raise EngineError("log-probs need a temperature above 0", got=temperature)
        model, found = self.model, []
        if any(len(ids) == 0 for ids in sequences):
            raise EngineError("a sequence to be scored has no tokens", accepted="1 or more each")
        for rows in _batches(sequences):
            found.extend(padded.score(model, self.dtype, rows, temperature) if self._tree is None else self._tree.score(rows, temperature))
        return found

    def close(self) -> None:
        self._queue.clear()
        self._closed = True
        self._model = self._tree = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _length_key(config: Any) -> str:
    return str(config.attribute_map.get("max_position_embeddings", "max_position_embeddings"))


def _batches(sequences: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Sequences in order, as many at a time as stay within `TOKENS_PER_PASS` were they padded."""
    rows: list[np.ndarray] = []
    for ids in sequences:
        longest = max([len(ids), *(len(row) for row in rows)])
        if rows and longest * (len(rows) + 1) > TOKENS_PER_PASS:
            yield rows
            rows = []
        rows.append(ids)
    if rows:
        yield rows
