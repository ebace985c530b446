"""Training with DeepSpeed ZeRO: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from rlpipe.errors import EngineError
from rlpipe.params import Section
from rlpipe.policies import causal_lm
from rlpipe.policies.causal_lm import Evaluation
from rlpipe.policies.packing import Batch
from rlpipe.train.backends.base import MOMENTS, AdamW, Backend, autocast, check_state, parameter_groups
from rlpipe.train.ranks import ALONE, Ranks

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
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What ranks hold a part of instead of the whole: 0 nothing, 1 the optimizer's moments, 2 also gradients, 3 also weights."""

    def open(self, module: PreTrainedModel, optimizer: AdamW, ranks: Ranks = ALONE) -> Backend:
        """A backend that trains the parameters of `module` that require a gradient.

        Raises:
            EngineError: DeepSpeed is not installed or cannot be imported here.
        """
        return DeepSpeedBackend(module, optimizer, self.dtype, self.zero_stage, ranks)


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
    """One engine a rank; the optimizer is torch's AdamW, so nothing is compiled."""

    def __init__(self, module: PreTrainedModel, optimizer: AdamW, dtype: str, zero_stage: int, ranks: Ranks) -> None:
        import torch

        self.deepspeed = import_deepspeed()
        self.module, self.ranks, self.stage = module, ranks, zero_stage
        self.parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self.shapes = {name: value.shape for name, value in self.parameters.items()}
        self.owns_process_group = not torch.distributed.is_initialized()
        if self.owns_process_group:
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        client = torch.optim.AdamW(parameter_groups(self.parameters, optimizer.weight_decay), betas=optimizer.betas, eps=optimizer.eps)
        self.scored = _scored(module, dtype)
        self.environment = ExitStack()
        with ExitStack() as starting:
            (self.environment if zero_stage == 3 else starting).enter_context(_only_process())
            self.engine, self.optimizer, _, _ = self.deepspeed.initialize(model=self.scored, optimizer=client, config=_settings(zero_stage, optimizer))

    def evaluate(self, batch: Batch, needs: Collection[str]) -> Evaluation:
        return Evaluation(*self.scored(batch, needs))

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed takes the mean over ranks; the weights of the loss already are those of the whole step.
        self.engine.backward(loss * self.ranks.size, scale_wrt_gas=False)

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

    @property
    def _inner(self) -> torch.optim.Optimizer:
        """The AdamW that steps what this rank holds."""
        inner: torch.optim.Optimizer = self.optimizer.optimizer if self.stage else self.optimizer
        return inner

    def optimizer_state(self) -> tuple[dict[str, torch.Tensor], int]:
        state = self._inner.state
        if not state:
            return {}, 0
        self._link_moments()
        tensors = {f"{moment}/{name}": self._moment(value, moment) for name, value in self.parameters.items() for moment in MOMENTS}
        return tensors, max(int(entry["step"]) for entry in state.values())

    def _moment(self, value: torch.nn.Parameter, moment: str) -> torch.Tensor:
        whole: torch.Tensor = self.deepspeed.utils.safe_get_full_optimizer_state(value, moment) if self.stage else self._inner.state[value][moment]
        return whole

    def load_optimizer_state(self, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        import torch

        check_state(tensors, self.shapes)
        held = {
            0: lambda: list(self.parameters.values()),
            3: lambda: self.optimizer.fp32_partitioned_groups_flat,
        }.get(self.stage, lambda: self.optimizer.single_partition_of_fp32_groups)
        for part in held():
            self._inner.state[part] = {"step": torch.tensor(float(num_steps)), **{moment: torch.zeros_like(part) for moment in MOMENTS}}
        self._link_moments()
        for name, value in self.parameters.items():
            for moment in MOMENTS:
                self._set_moment(value, moment, tensors[f"{moment}/{name}"])

    def _set_moment(self, value: torch.nn.Parameter, moment: str, whole: torch.Tensor) -> None:
        import torch

        if self.stage == 0:
            self._inner.state[value][moment].copy_(whole)
        elif self.stage == 3:
            num = value.ds_tensor.numel()  # type: ignore[attr-defined]
            padded = torch.nn.functional.pad(whole.flatten(), (0, num * self.ranks.size - whole.numel()))
            self.deepspeed.utils.safe_set_local_optimizer_state(value, padded[num * self.ranks.rank :][:num], moment)
        else:
            self.deepspeed.utils.safe_set_full_optimizer_state(value, whole, moment)

    def _link_moments(self) -> None:
        """Let parameters find their moments. DeepSpeed does it after the first parameter group's first step, too early for the second."""
        if self.stage in (1, 2):
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def whole_weights(self) -> AbstractContextManager[Any]:
        if self.stage < 3:
            return nullcontext()
        gathered: AbstractContextManager[Any] = self.deepspeed.zero.GatheredParameters(list(self.module.parameters()))
        return gathered

    def close(self) -> None:
        self.engine.destroy()
        self.environment.close()
        if self.owns_process_group:
            self.deepspeed.comm.destroy_process_group()


def _scored(module: PreTrainedModel, dtype: str) -> torch.nn.Module:
    """The module with the policy's log-probs as its forward, through which ZeRO 3 brings weights together and lets them go."""
    import torch

    class Scored(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, batch: Batch, needs: Collection[str]) -> tuple[torch.Tensor | None, ...]:
            with autocast(module, dtype):
                evaluation = causal_lm.evaluate(module, batch, needs)
            return evaluation.logprobs, evaluation.entropy, evaluation.hidden  # ZeRO 3 looks into tuples alone

    return Scored()


@contextmanager
def _only_process() -> Iterator[None]:
    """What a launcher would say, said only while the engine starts (ZeRO 3: is at work): other libraries read these names too."""
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
