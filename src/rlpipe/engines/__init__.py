"""What generates. Section `engine` of params picks one by `type`; importing this loads neither torch nor vllm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from rlpipe.engines.base import Begun, Completion, Engine, Request, Sampling
from rlpipe.params import PositiveInt, Section

__all__ = ["Begun", "Completion", "Engine", "EngineConfig", "OpenAI", "Request", "Sampling", "Torch", "Vllm"]


class Torch(Section):
    """The built-in engine: transformers in this process, what siblings share computed once, the same numbers as the trainer."""

    type: Literal["torch"] = "torch"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """bfloat16: autocast over float32 embeddings and norms, as the trainer does it; float32: plain."""
    chunk_groups: PositiveInt = 8
    """Groups computed together. Part of what decides the bytes, and the unit of resume."""
    max_tokens_in_flight: PositiveInt | None = None
    """Bounds the cache: most tokens of the prompts in it and of what the attempts that run may still become; None runs a chunk's attempts all at once."""

    def open(self, policy_folder: Path, threads: int = 0) -> Engine:
        """The engine with the weights of `policy_folder/modules/policy`; `threads` 0 takes the number of cores."""
        from rlpipe.engines.torch_engine import TorchEngine

        return TorchEngine(self, policy_folder, threads)


class Vllm(Section):
    """vLLM, a fresh one for every policy, its log-probs compared with the trainer's after each load. Needs `make install-vllm`."""

    type: Literal["vllm"] = "vllm"
    served: Literal["process", "server"] = "process"
    """process: in the step's own process; server: as an OpenAI-compatible server on this machine, in processes of its own."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    chunk_groups: PositiveInt = 64
    """Groups handed to vLLM at once, and the unit of resume; vLLM schedules them itself."""
    max_model_len: PositiveInt | None = None
    """Most tokens of a prompt and its completion together; None takes the model's."""
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    data_parallel_size: PositiveInt = 1
    """Copies of the model; more than one needs `served: server`."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    kv_cache_gib: PositiveInt = 1
    """Memory of the KV cache on a CPU."""
    block_size: PositiveInt | None = None
    """Tokens of a cache block, the least that attempts share of a prompt; None takes vLLM's: 16 on GPUs, 128 on CPUs, which need multiples of 32."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest mean gap between vLLM's and the trainer's log-probs after a load; None: 1e-4 in float32, 0.5 in bfloat16."""
    max_concurrency: PositiveInt = 256
    """Attempts asked for at once, with `served: server`."""
    start_seconds: float = Field(900, gt=0)
    """How long a server may take to start."""
    timeout_seconds: float = Field(1_800, gt=0)
    """How long a server may take over one attempt."""
    retries: int = Field(2, ge=0)
    """Tries after the first one, with `served: server`."""

    def open(self, policy_folder: Path, threads: int = 0) -> Engine:
        """The engine with the weights of `policy_folder/modules/policy`.

        Raises:
            EngineError: vllm is not installed, does not import or start, or does not compute what the policy folder says.
        """
        from rlpipe.engines.vllm_engine import VllmEngine
        from rlpipe.engines.vllm_server import VllmServerEngine

        return VllmEngine(self, policy_folder, threads) if self.served == "process" else VllmServerEngine(self, policy_folder, threads)

    @model_validator(mode="after")
    def _copies_need_a_server(self) -> Self:
        if self.data_parallel_size > 1 and self.served == "process":
            raise ValueError(f"data_parallel_size {self.data_parallel_size} needs served: server; in one process vLLM runs one copy")
        return self


class OpenAI(Section):
    """A server that is there already and speaks OpenAI's `/v1/completions` with token ids, such as vLLM; others load it with each round's policy."""

    type: Literal["openai"] = "openai"
    base_url: str
    """Address with the path before `/completions`, such as http://host:8000/v1."""
    model: str | None = None
    """Name it serves the policy by; None takes the only one it serves."""
    api_key_env: str | None = None
    """Name of the environment variable that holds its key."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What the server computes in."""
    chunk_groups: PositiveInt = 64
    """Groups asked for together, and the unit of resume."""
    max_model_len: PositiveInt | None = None
    """Most tokens of a prompt and its completion together; None takes the smaller of the server's and the model's."""
    max_concurrency: PositiveInt = 64
    """Attempts asked for at once."""
    timeout_seconds: float = Field(600, gt=0)
    """Of one try, up to the last byte of the answer."""
    retries: int = Field(4, ge=0)
    """Tries after the first one, where the server is busy, fails or does not answer."""
    probe: bool = True
    """Whether the server's log-probs are compared with the trainer's at each load; false takes its word for which policy it holds."""
    probe_tolerance: float | None = Field(None, gt=0)
    """Largest mean gap of log-probs; None: 1e-4 in float32, which tells policies a step apart, 0.5 in bfloat16, which tells models apart."""

    def open(self, policy_folder: Path, threads: int = 0) -> Engine:
        """The engine, once the server is known to hold `policy_folder/modules/policy`.

        Raises:
            EngineError: the server does not answer, does not serve the model, gives no ids or log-probs, or holds another policy.
        """
        from rlpipe.engines.openai_engine import OpenAIEngine

        return OpenAIEngine(self, policy_folder)

    # of the whole section, so that no message repeats a key or password that was written here by mistake
    @model_validator(mode="after")
    def _holds_no_secret(self) -> Self:
        if not re.fullmatch(r"https?://[A-Za-z0-9._\-\[\]:]+(/[^@?#\s]*)?", self.base_url) or urlsplit(self.base_url).port == 0:
            raise ValueError("base_url must be http://host[:port]/path or https://…, without user, password and query")
        if self.api_key_env is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.api_key_env):
            raise ValueError("api_key_env must be the name of an environment variable, not the key")
        return self


EngineConfig = Annotated[Torch | Vllm | OpenAI, Field(discriminator="type")]
