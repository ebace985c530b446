"""vLLM in this process. A new policy means a new vLLM: on CPUs its in-place weight update is silently wrong for tied embeddings."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rlpipe.engines.base import Completion, FinishReason, Request, refused, unserved
from rlpipe.engines.stopping import end_ids
from rlpipe.errors import EngineError
from rlpipe.policies import causal_lm

if TYPE_CHECKING:
    from rlpipe.engines import Vllm

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
"""No child process, no telemetry, no threads tied to cores (the trainer runs in this process afterwards), no network."""
REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
REMEDY = "run `make install-vllm`, or set engine.type: torch"


class VllmEngine:
    """An in-process vLLM behind the engine seam; see `rlpipe.engines.base.Engine`.

    Raises:
        EngineError: vllm is not installed or fails to import or start.
    """

    def __init__(self, config: Vllm, policy_folder: Path, threads: int = 0) -> None:
        self.config, self.threads = config, threads
        self._vllm = _import(config)
        self._llm: Any = None
        self._requests: dict[str, tuple[Request, int]] = {}
        self._unserved: list[Completion] = []
        self.load(policy_folder)

    def load(self, folder: Path) -> None:
        """Replace the weights: the running vLLM is shut down and a fresh one started."""
        import torch

        self.close()
        model = folder / causal_lm.POLICY_MODULE
        tokenizer = causal_lm.load_tokenizer(model)
        config, set_num_threads = self.config, torch.set_num_threads
        self._llm = self._vllm.LLM(
            model=str(model),
            dtype=config.dtype,
            max_model_len=config.max_model_len,
            tensor_parallel_size=config.tensor_parallel_size,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enforce_eager=not torch.cuda.is_available(),
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            disable_log_stats=True,
            seed=0,
        )
        # vLLM on a CPU replaces this function by one that does nothing, for the whole process; the trainer needs it.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(self.threads or os.cpu_count() or 1)
        self._end_ids = sorted(end_ids(tokenizer, *_configs(model)))

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
            error = refused(request, self.max_length)
            if error:
                self._unserved.extend(unserved(request, "error", error))
                continue
            for index, seed in enumerate(request.seeds):
                name = f"{request.request_id}\0{index}"
                self._requests[name] = (request, index)
                self.llm.llm_engine.add_request(name, {"prompt_token_ids": request.prompt_ids.tolist()}, self._params(request, seed))

    def _params(self, request: Request, seed: int) -> Any:
        sampling = request.sampling
        return self._vllm.SamplingParams(
            n=1,
            seed=seed,
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            stop_token_ids=[*self._end_ids, *sampling.stop_token_ids],
            ignore_eos=True,
            logprobs=0,
            skip_special_tokens=False,
            detokenize=bool(sampling.stop),
        )

    def abort(self, request_ids: Iterable[str]) -> None:
        wanted = set(request_ids)
        gone = [name for name, (request, _) in self._requests.items() if request.request_id in wanted]
        self.llm.llm_engine.abort_request(gone)
        for name in gone:
            request, index = self._requests.pop(name)
            self._unserved.append(unserved(request, "abort")[index])

    def stream(self) -> Iterator[Completion]:
        while self._requests or self._unserved:
            while self._unserved:
                yield self._unserved.pop(0)
            for output in self.llm.llm_engine.step() if self._requests else ():
                if output.finished and output.request_id in self._requests:
                    request, index = self._requests.pop(output.request_id)
                    yield _completion(request, index, output.outputs[0])

    def logprobs(self, sequences: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        if temperature != 1.0:
            raise EngineError("vLLM scores given tokens at temperature 1 only", got=temperature, do="use engine.type: torch")
        params = self._vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": ids.tolist()} for ids in sequences], params, use_tqdm=False)
        return [_prompt_logprobs(ids, output) for ids, output in zip(sequences, outputs, strict=True)]

    def close(self) -> None:
        self._requests.clear()
        self._unserved.clear()
        if self._llm is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()
        cleanup_dist_env_and_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _import(config: Vllm) -> Any:
    for name, value in {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib)}.items():
        os.environ.setdefault(name, value)
    try:
        import vllm
    # A broken build raises what its libraries raise; the list is what imports have been seen to end with.
    except (ImportError, OSError, RuntimeError, AttributeError, AssertionError, ValueError, TypeError) as error:
        what = "vllm is not installed" if isinstance(error, ModuleNotFoundError) and error.name == "vllm" else "vllm does not import"
        raise EngineError(what, got=" ".join(f"{type(error).__name__}: {error}".split())[:200], do=REMEDY) from error
    return vllm


def _configs(model: Path) -> tuple[Any, Any]:
    from transformers import AutoConfig, GenerationConfig

    generation = GenerationConfig.from_pretrained(model) if (model / "generation_config.json").is_file() else None
    return AutoConfig.from_pretrained(model), generation


def _completion(request: Request, index: int, output: Any) -> Completion:
    ids = np.array(output.token_ids, dtype=np.int32)
    logprobs = np.array([step[int(i)].logprob for i, step in zip(ids, output.logprobs, strict=True)], dtype=np.float32)
    reason = REASONS.get(str(output.finish_reason), "error")
    return Completion(request.request_id, index, ids, logprobs, reason, f"vllm ended it as {output.finish_reason}" if reason == "error" else None)


def _prompt_logprobs(ids: np.ndarray, output: Any) -> np.ndarray:
    found = [np.nan, *(step[int(i)].logprob for i, step in zip(ids[1:], output.prompt_logprobs[1:], strict=True))]
    return np.array(found, dtype=np.float32)
