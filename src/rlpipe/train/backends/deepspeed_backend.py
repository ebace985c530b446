"""Training with DeepSpeed ZeRO stage 1 in one process: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from rlpipe.errors import EngineError
from rlpipe.params import Section
from rlpipe.policies import causal_lm
from rlpipe.policies.causal_lm import Evaluation
from rlpipe.policies.packing import Batch
from rlpipe.train.backends.base import MOMENTS, AdamW, Backend, autocast, check_state, parameter_groups

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

BROKEN_IMPORT = (ImportError, OSError, RuntimeError, AttributeError, ValueError, TypeError, AssertionError)
"""What an optional library that does not fit the machine was seen to raise when imported."""


class DeepSpeed(Section):
    """Section `backend`, `type: deepspeed`."""

    type: Literal["deepspeed"] = "deepspeed"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What matrix products run in; trained weights and the optimizer are float32 in any case."""
    zero_stage: Literal[1] = 1

    def open(self, module: PreTrainedModel, optimizer: AdamW) -> Backend:
        """A backend that trains the parameters of `module` that require a gradient.

        Raises:
            EngineError: DeepSpeed is not installed or cannot be imported here.
        """
        return DeepSpeedBackend(module, optimizer, self.dtype, self.zero_stage)


def import_deepspeed() -> Any:
    """The library, told to use the CPU and to compile nothing.

    Raises:
        EngineError: it is not installed or cannot be imported here.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        import deepspeed.utils
    except BROKEN_IMPORT as error:
        raise EngineError(
            "backend.type deepspeed cannot be used",
            got=f"{type(error).__name__}: {' '.join(str(error).split())}",
            do="pip install 'rlpipe[deepspeed]', or set backend.type: torch",
        ) from error
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else the first start compiles it for a minute
    return deepspeed


class DeepSpeedBackend:
    """One engine of world size 1; the optimizer is torch's AdamW, so nothing is compiled."""

    def __init__(self, module: PreTrainedModel, optimizer: AdamW, dtype: str, zero_stage: int) -> None:
        import torch

        self.deepspeed = import_deepspeed()
        self.module, self.dtype = module, dtype
        self.parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self.owns_process_group = not torch.distributed.is_initialized()
        if self.owns_process_group:
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        client = torch.optim.AdamW(parameter_groups(self.parameters, optimizer.weight_decay), betas=optimizer.betas, eps=optimizer.eps)
        with _only_process():
            self.engine, self.optimizer, _, _ = self.deepspeed.initialize(model=module, optimizer=client, config=_settings(zero_stage, optimizer))

    def evaluate(self, batch: Batch, needs: Collection[str]) -> Evaluation:
        with autocast(self.module, self.dtype):
            return causal_lm.evaluate(self.module, batch, needs)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, scale_wrt_gas=False)

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {name: self.deepspeed.utils.safe_get_full_grad(value) for name, value in self.parameters.items()}
        return {name: value for name, value in found.items() if value is not None}

    def step(self, learning_rate: float) -> float:
        import torch

        norm = float(torch.nn.utils.get_total_norm(list(self.gradients().values())))
        if not math.isfinite(norm):
            self.engine.zero_grad()
            return norm
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        return norm

    def optimizer_state(self) -> tuple[dict[str, torch.Tensor], int]:
        inner = self.optimizer.optimizer.state
        if not inner:
            return {}, 0
        self._link_moments()
        state = self.deepspeed.utils.safe_get_full_optimizer_state
        tensors = {f"{moment}/{name}": state(value, moment) for name, value in self.parameters.items() for moment in MOMENTS}
        return tensors, max(int(entry["step"]) for entry in inner.values())

    def load_optimizer_state(self, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        import torch

        check_state(tensors, self.parameters)
        inner = self.optimizer.optimizer.state
        for partition in self.optimizer.single_partition_of_fp32_groups:
            inner[partition] = {"step": torch.tensor(float(num_steps)), **{moment: torch.zeros_like(partition) for moment in MOMENTS}}
        self._link_moments()
        for name, value in self.parameters.items():
            for moment in MOMENTS:
                self.deepspeed.utils.safe_set_full_optimizer_state(value, tensors[f"{moment}/{name}"], moment)

    def _link_moments(self) -> None:
        """Let parameters find their moments. DeepSpeed does it after the first parameter group's first step, too early for the second."""
        self.optimizer._hp_optimizer_states_linked = False
        self.optimizer._lazy_init_hp_params_optimizer_state()

    def close(self) -> None:
        self.engine.destroy()
        if self.owns_process_group:
            self.deepspeed.comm.destroy_process_group()


@contextmanager
def _only_process() -> Iterator[None]:
    """What a launcher would say, said only while the engine starts: other libraries read these names too."""
    added = {name: value for name, value in (("LOCAL_RANK", "0"), ("RANK", "0"), ("WORLD_SIZE", "1")) if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _settings(zero_stage: int, optimizer: AdamW) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero_stage},
        "gradient_clipping": optimizer.max_grad_norm or 0.0,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
