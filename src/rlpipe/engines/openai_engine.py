"""Any server that speaks OpenAI's `/v1/completions` with token ids in and out, as vLLM and what is built on it do.

Attempts are asked for one by one, each with its seed, several at a time. What is computed together is the server's affair, so no bytes are promised.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rlpipe.engines import probe
from rlpipe.engines.base import Completion, Request, refused, unserved
from rlpipe.engines.openai_client import CalledOff, Client, RequestFailed
from rlpipe.engines.served import Asked, Ends, attempts, ends_of, folder_only, trained_length
from rlpipe.errors import EngineError

if TYPE_CHECKING:
    import torch

    from rlpipe.engines import OpenAI

SCORES_GIVEN = "use a server that answers `echo` with log-probs, such as vLLM, or engine.type: torch"
UNBOUNDED = 1 << 30
TOKENS_GIVEN = "use a server that answers `return_token_ids: true` and `logprobs: 0`, such as vLLM from 0.10.2 on"


@dataclass(frozen=True, slots=True)
class Serving:
    """A server that holds a policy.

    Attributes:
        model: the name it serves it by.
        max_length: most tokens that a prompt and its completion may have together.
        salt: prefixes that the server kept from other weights are not those of this salt.
    """

    client: Client
    model: str
    max_length: int
    ends: Ends
    salt: str


class OpenAIEngine:
    """A remote server behind the engine seam; see `rlpipe.engines.base.Engine`.

    Attributes:
        logprob_gap: mean gap to the trainer's log-probs that the probe found at the last load; None where it was not asked.

    Raises:
        EngineError: the server does not answer, does not serve the model, or does not hold the policy.
    """

    def __init__(self, config: OpenAI, policy_folder: Path) -> None:
        self.config = config
        self._begin(config.max_concurrency, policy_folder)

    def _begin(self, max_concurrency: int, policy_folder: Path) -> None:
        self._serving: Serving | None = None
        self.logprob_gap: float | None = None
        self._pool = ThreadPoolExecutor(max_concurrency, thread_name_prefix="rlpipe-engine")
        self._running: dict[str, tuple[Asked, Future[Completion]]] = {}
        self._ended: SimpleQueue[str] = SimpleQueue()
        self._unserved: list[Completion] = []
        self._names = (str(number) for number in itertools.count())
        with ExitStack() as failed:
            failed.callback(self.close)
            self.load(policy_folder)
            failed.pop_all()

    @property
    def serving(self) -> Serving:
        if self._serving is None:
            raise EngineError("the engine is closed or its server holds no verified policy", do="open it, or load a policy that the server holds")
        return self._serving

    @property
    def max_length(self) -> int:
        return self.serving.max_length

    def load(self, weights: Path | Mapping[str, torch.Tensor]) -> None:
        """Take a policy folder as what the server holds, once its log-probs say so; loading the server is not done from here."""
        folder = folder_only(weights, "a remote server")
        self._drop()
        config = self.config
        client = Client(config.base_url, _key(config), config.timeout_seconds, config.retries)
        expected = probe.expectation(folder, config.dtype, config.max_model_len) if config.probe else None
        with self._dropped_on_failure():
            self._connect(client, config.model, folder, config.max_model_len)
            if expected is not None:
                self.logprob_gap = probe.check(self, expected, config.dtype, config.probe_tolerance, scores=False)

    @contextmanager
    def _dropped_on_failure(self) -> Iterator[None]:
        """Within it a server is taken on; what is not verified to its end is not used."""
        with ExitStack() as failed:
            failed.callback(self._drop)
            yield
            failed.pop_all()

    def _connect(self, client: Client, model: str | None, folder: Path, max_model_len: int | None) -> None:
        name, length = _served(client, model)
        max_length = min(limit for limit in (max_model_len, length, trained_length(folder), UNBOUNDED) if limit is not None)
        self._serving = Serving(client, name, max_length, ends_of(folder), secrets.token_hex(16))

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if error := refused(request, self.max_length):
                self._unserved.extend(unserved(request, "error", error))
                continue
            for asked in attempts(request):
                name = next(self._names)
                future = self._pool.submit(self._completion, asked, name)
                self._running[name] = asked, future
                future.add_done_callback(partial(self._note, name))

    def _note(self, name: str, _: Future[Completion]) -> None:
        self._ended.put(name)

    def stream(self) -> Iterator[Completion]:
        while self._running or self._unserved:
            while self._unserved:
                yield self._unserved.pop(0)
            if self._running and (name := self._ended.get()) in self._running:
                yield self._running.pop(name)[1].result()

    def abort(self, request_ids: Iterable[str]) -> None:
        """End the named requests. What running attempts have is known to the server alone, so they come back as they were submitted."""
        wanted = set(request_ids)
        for name in [name for name, (asked, _) in self._running.items() if asked.request.request_id in wanted]:
            asked, future = self._running.pop(name)
            future.cancel()
            self.serving.client.call_off(name)
            self._unserved.append(unserved(asked.request, "abort")[asked.index])

    def logprobs(self, sequences: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        if temperature != 1.0:
            raise EngineError("servers score given tokens at temperature 1 only", got=temperature, do="use engine.type: torch")
        return list(self._pool.map(self._given, sequences))

    def close(self) -> None:
        self._drop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _drop(self) -> None:
        """End what is under way and forget the server."""
        if self._serving is not None:
            self._serving.client.close()
        self._serving = None
        for _, future in self._running.values():
            future.cancel()
        self._running.clear()
        self._unserved.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _completion(self, asked: Asked, name: str) -> Completion:
        """One attempt's completion; an error completion where this request alone came to nothing."""
        request = asked.request
        if asked.max_tokens <= 0:
            return asked.completion(np.empty(0), np.empty(0), "length", self.serving.ends.ending)
        try:
            choice = self._choice(self._body(asked), name)
        except CalledOff:
            return unserved(request, "abort")[asked.index]
        except RequestFailed as error:
            return unserved(request, "error", str(error))[asked.index]
        ids, logprobs = _tokens(choice)
        return asked.completion(ids, logprobs, str(choice.get("finish_reason")), self.serving.ends.ending)

    def _choice(self, body: Mapping[str, Any], name: str = "") -> dict[str, Any]:
        answer = self.serving.client.ask("POST", "/completions", body, name)
        choices = answer.get("choices")
        if not (isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], dict)):
            raise EngineError("the server did not answer with one choice", got=str(choices)[:200], do=TOKENS_GIVEN)
        return choices[0]

    def _body(self, asked: Asked) -> dict[str, Any]:
        """The whole vocabulary, stated in full: a server may have other defaults from the model's generation config."""
        sampling = asked.request.sampling
        return {
            "model": self.serving.model,
            "prompt": asked.prompt_ids,
            "max_tokens": asked.max_tokens,
            "seed": asked.seed,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "stop_token_ids": self.serving.ends.stop_token_ids(asked.request),
            "ignore_eos": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "cache_salt": self.serving.salt,
        }

    def _given(self, ids: np.ndarray) -> np.ndarray:
        body = {"model": self.serving.model, "prompt": ids.tolist(), "max_tokens": 1, "temperature": 1.0, "echo": True, "logprobs": 0, "return_token_ids": True}
        try:
            found = (self._choice(body | {"cache_salt": self.serving.salt}).get("logprobs") or {}).get("token_logprobs")
        except RequestFailed as error:
            raise EngineError("the server gave no log-probs of given tokens", got=str(error), do=SCORES_GIVEN) from error
        if not isinstance(found, list) or len(found) < len(ids) or found[0] is not None or None in found[1 : len(ids)]:
            raise EngineError("the server gave no log-probs of given tokens", got=f"{len(found or ())} for {len(ids)} tokens", do=SCORES_GIVEN)
        return np.array([np.nan, *found[1 : len(ids)]], dtype=np.float32)


def served_model(config: OpenAI, seconds: float) -> str:
    """The name that the server serves the policy by, asked once.

    Raises:
        EngineError: it does not answer within `seconds`, refuses, or does not serve the model.
    """
    return _served(Client(config.base_url, _key(config), seconds, retries=0), config.model)[0]


def _tokens(choice: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The ids and log-probs of a choice.

    Raises:
        EngineError: one is missing, or their numbers differ.
    """
    ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(ids, list):
        raise EngineError("the server returns no token ids; texts cannot stand in for them, since they need not give the same ids back", do=TOKENS_GIVEN)
    if not isinstance(logprobs, list) or None in logprobs:
        raise EngineError("the server returns no log-prob for each token that it drew", got=f"{len(ids)} tokens", do=TOKENS_GIVEN)
    if len(ids) != len(logprobs):
        raise EngineError("the server returns another number of log-probs than of tokens", got=f"{len(logprobs)} for {len(ids)} tokens", do=TOKENS_GIVEN)
    return np.array(ids, dtype=np.int32), np.array(logprobs, dtype=np.float32)


def _served(client: Client, model: str | None) -> tuple[str, int | None]:
    """The name of the model to ask for, and most tokens it takes where the server says so.

    Raises:
        EngineError: the server does not answer, or does not serve it.
    """
    try:
        listed = client.ask("GET", "/models").get("data")
    except RequestFailed as error:
        raise EngineError(f"{client.base_url} does not answer", got=str(error), do="start the server, or check engine.base_url") from error
    lengths = {str(entry.get("id")): entry.get("max_model_len") for entry in listed if isinstance(entry, dict)} if isinstance(listed, list) else {}
    name = next(iter(lengths), None) if model is None and len(lengths) == 1 else model
    if name is None or name not in lengths:
        raise EngineError("the server does not serve this model", got=model, accepted=", ".join(lengths) or "none is listed", do="set engine.model")
    length = lengths[name]
    return name, length if isinstance(length, int) else None


def _key(config: OpenAI) -> str | None:
    """The bearer token in the variable that the config names.

    Raises:
        EngineError: the variable is not set, or holds what no header can.
    """
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env, "").strip()
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        found = "characters that no header can hold" if key else "nothing"
        raise EngineError(f"the environment variable {config.api_key_env} holds no key", got=found, do="set it to the server's key")
    return key
