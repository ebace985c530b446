"""vLLM in this process. A new policy means a new vLLM: on CPUs its in-place weight update is silently wrong for tied embeddings."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rlpipe.engines import probe
from rlpipe.engines.base import Completion, Request, refused, unserved
from rlpipe.engines.served import Asked, Ends, attempts, ends_of, folder_only, plain_weights
from rlpipe.errors import EngineError
from rlpipe.policies.device import num_cores

if TYPE_CHECKING:
    import torch

    from rlpipe.engines import Vllm

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
"""No child process, no telemetry, no threads tied to cores (the trainer runs in this process afterwards), no network."""
FAILURES = (ImportError, OSError, RuntimeError, AttributeError, AssertionError, ValueError, TypeError)
"""A broken build raises what its libraries raise; the list is what vLLM has been seen to end with."""
REMEDY = "run `make install-vllm`, or set engine.type: torch"


@dataclass(slots=True)
class Running:
    """An attempt under way and what has come of it, step by step."""

    asked: Asked
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, output: Any) -> None:
        """Take in the tokens of one step."""
        new = list(output.token_ids)
        self.token_ids += new
        self.logprobs += [step[i].logprob for i, step in zip(new, output.logprobs or (), strict=True)]

    def completion(self, reason: str, ends: Ends) -> Completion:
        """The attempt as it ended."""
        return self.asked.completion(np.array(self.token_ids, dtype=np.int32), np.array(self.logprobs, dtype=np.float32), reason, ends.ending)


class VllmEngine:
    """An in-process vLLM behind the engine seam; see `rlpipe.engines.base.Engine`.

    Attributes:
        logprob_gap: mean gap to the trainer's log-probs that the probe found at the last load.

    Raises:
        EngineError: vllm is not installed, fails to import or start, or does not compute what the policy folder says.
    """

    def __init__(self, config: Vllm, policy_folder: Path, threads: int = 0) -> None:
        self.config, self.threads = config, threads
        self._vllm = _import(config)
        self._llm: Any = None
        self._left = False
        self.logprob_gap: float | None = None
        self._running: dict[str, Running] = {}
        self._finished: list[Completion] = []
        self.load(policy_folder)

    def load(self, weights: Path | Mapping[str, torch.Tensor]) -> None:
        """Replace the weights: the running vLLM is shut down, a fresh one started, and its log-probs compared with the trainer's.

        Raises:
            EngineError: vLLM does not start, or does not compute what the folder says; the engine is then closed.
        """
        folder = folder_only(weights, "vLLM")
        self.close()
        expected = probe.expectation(folder, self.config.dtype, self.config.max_model_len)
        self._ends = ends_of(folder)
        self._left = True
        try:
            with plain_weights(folder, self.config.dtype) as model:
                self._llm = _started(self._vllm, self.config, model, self.threads)
            self.logprob_gap = probe.check(self, expected, self.config.dtype, self.config.probe_tolerance)
            self._reset_prefix_cache()
        except EngineError:
            self.close()
            raise

    def _reset_prefix_cache(self) -> None:
        answer = self.llm.reset_prefix_cache()
        if answer is not True:
            raise EngineError("vLLM did not empty its prefix cache", got=repr(answer), accepted="True", do="use a vLLM that supports it, or engine.type: torch")

    @property
    def llm(self) -> Any:
        if self._llm is None:
            raise EngineError("the engine is closed", do="open it again")
        return self._llm

    @property
    def max_length(self) -> int:
        return int(self.llm.llm_engine.model_config.max_model_len)

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if error := refused(request, self.max_length):
                self._finished.extend(unserved(request, "error", error))
                continue
            for asked in attempts(request):
                self._submit(asked)

    def _submit(self, asked: Asked) -> None:
        running, name = Running(asked), f"{asked.request.request_id}\0{asked.index}"
        if asked.max_tokens <= 0:
            self._finished.append(running.completion("length", self._ends))
            return
        try:
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": asked.prompt_ids}, self._params(asked))
        except _failures(ValueError) as error:  # this request's own fault, as an id outside of the vocabulary is
            self._finished.append(unserved(asked.request, "error", " ".join(str(error).split())[:300])[asked.index])
            return
        self._running[name] = running

    def _params(self, asked: Asked) -> Any:
        sampling = asked.request.sampling
        return self._vllm.SamplingParams(
            n=1,
            seed=asked.seed,
            temperature=sampling.temperature,
            max_tokens=asked.max_tokens,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            stop_token_ids=self._ends.stop_token_ids(asked.request),
            ignore_eos=True,
            logprobs=0,
            skip_special_tokens=False,
            detokenize=bool(sampling.stop),
            output_kind=_new_tokens_only(),
        )

    def abort(self, request_ids: Iterable[str]) -> None:
        wanted = set(request_ids)
        gone = [name for name, running in self._running.items() if running.asked.request.request_id in wanted]
        self.llm.llm_engine.abort_request(gone)
        self._finished.extend(self._running.pop(name).completion("abort", self._ends) for name in gone)

    def stream(self) -> Iterator[Completion]:
        while self._running or self._finished:
            while self._finished:
                yield self._finished.pop(0)
            if self._running:
                self._step()

    def _step(self) -> None:
        with _explained("vLLM failed while generating", "see its log; lower engine.gpu_memory_utilization if memory ran out, or set engine.type: torch"):
            outputs = self.llm.llm_engine.step()
        for output in outputs:
            if (running := self._running.get(output.request_id)) is not None:
                running.add(output.outputs[0])
                if output.finished:
                    self._finished.append(self._running.pop(output.request_id).completion(str(output.outputs[0].finish_reason), self._ends))

    def logprobs(self, sequences: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        if temperature != 1.0:
            raise EngineError("vLLM scores given tokens at temperature 1 only", got=temperature, do="use engine.type: torch")
        if self._running:
            raise EngineError("vLLM scores given tokens while nothing is queued", got=f"{len(self._running)} attempts", do="read the stream to its end first")
        params = self._vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        with _explained("vLLM cannot score these tokens", "see its log, or set engine.type: torch"):
            outputs = self.llm.generate([{"prompt_token_ids": ids.tolist()} for ids in sequences], params, use_tqdm=False)
        return [_prompt_logprobs(ids, output) for ids, output in zip(sequences, outputs, strict=True)]

    def close(self) -> None:
        self._running.clear()
        self._finished.clear()
        if not self._left:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        # a start that failed half-way leaves a process group too
        self._llm, self._left = None, False
        gc.collect()
        cleanup_dist_env_and_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _import(config: Vllm) -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(config.kv_cache_gib)
    try:
        import vllm
    except ModuleNotFoundError as error:
        raise EngineError("vllm is not installed" if error.name == "vllm" else "vllm does not import", got=_line(error), do=REMEDY) from error
    except FAILURES as error:
        raise EngineError("vllm does not import", got=_line(error), do=REMEDY) from error
    return vllm


def _started(vllm: Any, config: Vllm, model: Path, threads: int) -> Any:
    """A fresh `vllm.LLM` with the weights of a Hugging Face folder."""
    import torch

    set_num_threads = torch.set_num_threads
    try:
        with _explained("vLLM does not start", "see its log, or set engine.type: torch"):
            return vllm.LLM(
                model=str(model),
                dtype=config.dtype,
                max_model_len=config.max_model_len,
                tensor_parallel_size=config.tensor_parallel_size,
                pipeline_parallel_size=config.pipeline_parallel_size,
                gpu_memory_utilization=config.gpu_memory_utilization,
                block_size=config.block_size,
                enforce_eager=not torch.cuda.is_available(),
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",
                disable_log_stats=True,
                seed=0,
            )
    finally:
        # vLLM on a CPU replaces this function by one that does nothing, for the whole process; the trainer needs it.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads or num_cores())


@contextmanager
def _explained(what: str, do: str) -> Iterator[None]:
    try:
        yield
    except _failures(*FAILURES) as error:
        raise EngineError(what, got=_line(error), do=do) from error


def _failures(*kinds: type[Exception]) -> tuple[type[Exception], ...]:
    """These and what vLLM raises by names of its own, in versions that have a common base for it."""
    from vllm import exceptions

    own: type[Exception] | None = getattr(exceptions, "VLLMError", None)
    return kinds if own is None else (*kinds, own)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _new_tokens_only() -> Any:
    """Each step's output holds that step's tokens: what an attempt has is known when it is aborted, and no list is built twice."""
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.DELTA


def _prompt_logprobs(ids: np.ndarray, output: Any) -> np.ndarray:
    found = [np.nan, *(step[int(i)].logprob for i, step in zip(ids[1:], output.prompt_logprobs[1:], strict=True))]
    return np.array(found, dtype=np.float32)
