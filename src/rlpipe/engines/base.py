"""The seam of what generates: token ids in, token ids and their log-probs out. P = prompt tokens, C = completion tokens, T = all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Protocol, Self

import numpy as np

MAX_SEED = 2**128

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn from the whole vocabulary.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token, and log-probs are then those at temperature 1.
        stop: texts that end a completion; the token that completes one is kept.
        stop_token_ids: ids that end a completion, besides the model's own; kept too.
    """

    max_new_tokens: int
    temperature: float
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """What an attempt had when it was put aside.

    Attributes:
        token_ids: `[b]` int32, b >= 0, as sampled.
        logprobs: `[b]` float32, as sampled.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its attempts.

    Attributes:
        prompt_ids: `[P]` int32, P >= 1.
        seeds: one per attempt; an attempt's random numbers depend on its seed alone.
        begun: empty, or one per seed: the attempt goes on after these tokens, with the random numbers that come next. Its
            completion holds them and the new ones, and `max_new_tokens` counts both.
    """

    request_id: str
    prompt_ids: np.ndarray
    seeds: tuple[int, ...]
    sampling: Sampling
    begun: tuple[Begun, ...] = ()

    def only(self, indices: Sequence[int]) -> Request:
        """The same prompt with some of its attempts."""
        return replace(self, seeds=tuple(self.seeds[i] for i in indices), begun=tuple(self.begun[i] for i in indices) if self.begun else ())


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished attempt; `index` is the place of its seed in the request.

    Attributes:
        token_ids: `[C]` int32, exactly as sampled, the token that ended it included.
        logprobs: `[C]` float32, log-softmax(logits / temperature) of each token.
        finish_reason: stop (an end token or a stop text), length, abort, or error; never guessed from the ids.
        error: why nothing usable came, where `finish_reason` is error.
    """

    request_id: str
    index: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    error: str | None = None


class Engine(Protocol):
    """What generates; a context manager. A request that cannot be served ends as an error completion and leaves the others alone."""

    @property
    def max_length(self) -> int:
        """Most tokens a prompt and its completion may have together."""

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; the order of submission decides what is computed together."""

    def stream(self) -> Iterator[Completion]:
        """Finished attempts of everything queued, in any order, until nothing is left."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """End the named requests: queued attempts come back empty, running ones with what they have, reason `abort`."""

    def logprobs(self, sequences: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        """`[T]` float32 per sequence of ids `[T]`: the log-prob of each token after those before it, NaN at 0."""

    def load(self, weights: Path | Mapping[str, torch.Tensor]) -> None:
        """Replace the weights; nothing computed with the old ones is used again.

        Args:
            weights: a policy folder, or every tensor of `module.named_parameters()` by name, on any device, float32 or narrower.

        Raises:
            EngineError: the tensors are not those of the model, or the engine takes none; the weights are then as before.
        """

    def close(self) -> None:
        """Free memory and processes; harmless twice."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def refused(request: Request, max_length: int, vocab_size: int | None = None) -> str | None:
    """Why a request cannot be served within this length, with ids below `vocab_size`, or None."""
    length, new = len(request.prompt_ids), request.sampling.max_new_tokens
    if length == 0:
        return "the prompt has no tokens"
    if new < 1:
        return f"max_new_tokens is {new}, 1 or more are accepted"
    outside = [int(i) for i in request.prompt_ids if vocab_size is not None and not 0 <= i < vocab_size]
    if outside:
        return f"the prompt holds token id {outside[0]}, the model knows 0 to {vocab_size - 1}"  # type: ignore[operator]
    if not 0 <= request.sampling.temperature < math.inf:
        return f"the temperature is {request.sampling.temperature}, 0 or more is accepted"
    if wrong := [seed for seed in request.seeds if not 0 <= seed < MAX_SEED]:
        return f"the seed {wrong[0]} is outside of 0 to {MAX_SEED - 1}"
    return _wrong_begun(request, vocab_size) or _too_long(request, max_length)


def _wrong_begun(request: Request, vocab_size: int | None) -> str | None:
    if request.begun and len(request.begun) != len(request.seeds):
        return f"{len(request.begun)} begun attempts for {len(request.seeds)} seeds"
    for had in request.begun:
        if len(had.token_ids) != len(had.logprobs):
            return f"a begun attempt has {len(had.token_ids)} tokens and {len(had.logprobs)} log-probs"
        if len(had.token_ids) > request.sampling.max_new_tokens:
            return f"a begun attempt has {len(had.token_ids)} tokens, max_new_tokens is {request.sampling.max_new_tokens}"
        if vocab_size is not None and any(not 0 <= i < vocab_size for i in had.token_ids):
            return f"a begun attempt holds a token id outside of 0 to {vocab_size - 1}"
    return None


def _too_long(request: Request, max_length: int) -> str | None:
    length, new = len(request.prompt_ids), request.sampling.max_new_tokens
    if length + new > max_length:
        return f"a prompt of {length} tokens and {new} new ones are over the model's length of {max_length}"
    return None


def unserved(request: Request, reason: FinishReason, error: str | None = None) -> list[Completion]:
    """One completion per attempt: empty, or what an aborted one had begun with."""
    nothing = Begun(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))
    found = request.begun if request.begun and reason == "abort" else [nothing] * len(request.seeds)
    return [Completion(request.request_id, index, had.token_ids, had.logprobs, reason, error) for index, had in enumerate(found)]
