"""What generates. Section `engine` of params picks one by `type`; importing this loads neither torch nor vllm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rlpipe.engines.base import Completion, Engine, Request, Sampling
from rlpipe.params import PositiveInt, Section

__all__ = ["Completion", "Engine", "EngineConfig", "Request", "Sampling", "Torch", "Vllm"]


class Torch(Section):
    """The built-in engine: transformers in this process, a shared-prefix KV cache, the same numbers as the trainer."""

    type: Literal["torch"] = "torch"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """bfloat16: autocast over float32 embeddings and norms, as the trainer does it; float32: plain."""
    chunk_groups: PositiveInt = 8
    """Groups computed together. Part of what decides the bytes, and the unit of resume."""

    def open(self, policy_folder: Path, threads: int = 0) -> Engine:
        """The engine with the weights of `policy_folder/modules/policy`; `threads` 0 takes the number of cores."""
        from rlpipe.engines.torch_engine import TorchEngine

        return TorchEngine(self, policy_folder, threads)


class Vllm(Section):
    """vLLM in this process, a fresh one for every policy. Needs `make install-vllm`."""

    type: Literal["vllm"] = "vllm"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    chunk_groups: PositiveInt = 64
    """Groups handed to vLLM at once, and the unit of resume; vLLM schedules them itself."""
    max_model_len: PositiveInt | None = None
    """Most tokens of a prompt and its completion together; None takes the model's."""
    tensor_parallel_size: PositiveInt = 1
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    kv_cache_gib: PositiveInt = 1
    """Memory of the KV cache on a CPU."""

    def open(self, policy_folder: Path, threads: int = 0) -> Engine:
        """The engine with the weights of `policy_folder/modules/policy`.

        Raises:
            EngineError: vllm is not installed or does not import.
        """
        from rlpipe.engines.vllm_engine import VllmEngine

        return VllmEngine(self, policy_folder, threads)


EngineConfig = Annotated[Torch | Vllm, Field(discriminator="type")]
