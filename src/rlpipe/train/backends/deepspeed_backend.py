"""Training with DeepSpeed ZeRO: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from rlpipe.errors import BROKEN_IMPORT, EngineError
from rlpipe.params import Section
from rlpipe.policies import causal_lm
from rlpipe.policies.causal_lm import Evaluation
from rlpipe.policies.device import device
from rlpipe.policies.packing import Batch
from rlpipe.train.backends.base import MOMENTS, AdamW, Backend, Capability, autocast, check_state, parameter_groups
from rlpipe.train.backends.moments import in_width
from rlpipe.train.ranks import ALONE, Ranks, exchange

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel
LOWEST_STAGE = {"none": 0, "optimizer": 1, "all": 3}
"""The ZeRO stage from which on each `offload` is possible."""
BUCKET = 50_000_000
"""Numbers exchanged at once; DeepSpeed's own default of 500 million takes 2 GB of an accelerator."""


class DeepSpeed(Section):
    """Section `backend`, `type: deepspeed`."""

    type: Literal["deepspeed"] = "deepspeed"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What matrix products run in; trained weights and the optimizer are float32 in any case."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What ranks hold a part of instead of the whole: 0 nothing, 1 the optimizer's moments, 2 also gradients, 3 also weights."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What lies in main memory instead of the accelerator's: nothing, the moments (stage 1 and up, stepped by the CPU), or weights too (stage 3)."""
    compile_ops: bool = False
    """Let DeepSpeed compile operators of its own at first use, a minute or more each: CPU Adam for `offload`, sums through shared memory between CPU ranks."""

    can: ClassVar[frozenset[Capability]] = frozenset()

    @model_validator(mode="after")
    def _can_be_offloaded(self) -> DeepSpeed:
        lowest = LOWEST_STAGE[self.offload]
        if self.zero_stage < lowest:
            raise ValueError(f"offload: {self.offload} needs zero_stage {lowest}{'' if lowest == 3 else ' or more'}; got {self.zero_stage}")
        return self

    def open(self, module: PreTrainedModel, optimizer: AdamW, ranks: Ranks = ALONE) -> Backend:
        """A backend that trains the parameters of `module` that require a gradient.

        Raises:
            EngineError: DeepSpeed is not installed or cannot be imported here.
        """
        return DeepSpeedBackend(module, optimizer, self, ranks)


def import_deepspeed(compile_ops: bool = False) -> Any:
    """The library, told to use the CPU where there is nothing else, and to compile nothing unless it may.

    Raises:
        EngineError: it is not installed or cannot be imported here.
    """
    if device().type == "cpu":
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
    if compile_ops:
        vars(deepspeed.ops).pop("__compatible_ops__", None)  # it finds out anew, by running the compilers
    else:
        deepspeed.ops.__compatible_ops__ = {}  # else the first start compiles what sums through shared memory, for a minute
    return deepspeed


class DeepSpeedBackend:
    """One engine a rank; the optimizer is torch's AdamW, so nothing is compiled, unless `compile_ops` asks for DeepSpeed's."""

    def __init__(self, module: PreTrainedModel, optimizer: AdamW, config: DeepSpeed, ranks: Ranks) -> None:
        import torch

        self.deepspeed = import_deepspeed(config.compile_ops)
        self.module, self.ranks, self.stage = module, ranks, config.zero_stage
        self.parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self.shapes = {name: value.shape for name, value in self.parameters.items()}
        self.owns_process_group = not torch.distributed.is_initialized()
        if self.owns_process_group:
            torch.distributed.init_process_group(exchange(), store=torch.distributed.HashStore(), rank=0, world_size=1)
        client = self._client(optimizer, config.compile_ops and config.offload != "none")
        settings = _settings(config, optimizer)
        self.environment = ExitStack()
        with ExitStack() as starting:
            (self.environment if self.stage == 3 else starting).enter_context(_only_process())
            self._place(settings)
            self.engine, self.optimizer, _, _ = self.deepspeed.initialize(model=_scored(module, config.dtype), optimizer=client, config=settings)

    def _client(self, optimizer: AdamW, compiled: bool) -> torch.optim.Optimizer:
        """What steps the parts that this rank holds; made before ZeRO 3 takes the parameters' shapes away."""
        import torch

        groups = parameter_groups(self.parameters, optimizer.weight_decay)
        if compiled:
            made: torch.optim.Optimizer = self.deepspeed.ops.adam.DeepSpeedCPUAdam(groups, betas=optimizer.betas, eps=optimizer.eps)
            return made
        return torch.optim.AdamW(groups, betas=optimizer.betas, eps=optimizer.eps, fused=True)

    def _place(self, settings: dict[str, Any]) -> None:
        """Bring the module to this rank's device; with ZeRO 3 one parameter after the other, each leaving only its part there."""
        import torch

        if self.stage < 3:
            self.module.to(device())  # type: ignore[arg-type]
            return
        self.environment.callback(setattr, torch.nn.functional, "linear", torch.nn.functional.linear)  # DeepSpeed's own stays otherwise
        self.deepspeed.zero.Init(module=self.module, config_dict_or_path=settings)
        for buffer in self.module.buffers():
            buffer.data = buffer.data.to(device())

    def evaluate(self, batch: Batch, needs: Collection[str]) -> Evaluation:
        return Evaluation(*self.engine(batch, needs))  # the engine counts micro-batches by its own forward

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed takes the mean over ranks; the weights of the loss already are those of the whole step.
        self.engine.backward(loss * self.ranks.size, scale_wrt_gas=False)

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {name: self.deepspeed.utils.safe_get_full_grad(value) for name, value in self.parameters.items()}
        return {name: value for name, value in found.items() if value is not None}

    def step(self, learning_rate: float) -> float:
        import torch

        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if self.stage:
            self.engine.step()
            return float(self.engine.get_global_grad_norm())  # infinite where it was not finite, and then nothing moved
        norm = float(torch.nn.utils.get_total_norm(list(self.gradients().values())))
        if math.isfinite(norm):
            self.engine.step()
        else:
            self.engine.zero_grad()
        return norm

    @property
    def _inner(self) -> torch.optim.Optimizer:
        """The AdamW that steps what this rank holds."""
        inner: torch.optim.Optimizer = self.optimizer.optimizer if self.stage else self.optimizer
        return inner

    def optimizer_state(self) -> tuple[dict[str, torch.Tensor], int]:
        """See `Backend`; only the first rank holds the moments, in main memory, since all of them may fit nowhere else."""
        state = self._inner.state
        if not state:
            return {}, 0
        self._link_moments()
        tensors = {}
        for name, value in self.parameters.items():
            for moment in MOMENTS:
                whole = self._moment(value, moment)
                if self.ranks.first:
                    tensors[f"{moment}/{name}"] = whole.to("cpu")
        return tensors, max(int(entry["step"]) for entry in state.values())

    def _moment(self, value: torch.nn.Parameter, moment: str) -> torch.Tensor:
        whole: torch.Tensor = self.deepspeed.utils.safe_get_full_optimizer_state(value, moment) if self.stage else self._inner.state[value][moment]
        return whole

    def load_optimizer_state(self, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        import torch

        check_state(tensors, self.shapes)
        tensors = in_width(tensors, "float32")
        held = {
            0: lambda: list(self.parameters.values()),
            3: lambda: self.optimizer.fp32_partitioned_groups_flat,
        }.get(self.stage, lambda: self.optimizer.single_partition_of_fp32_groups)
        for part in held():
            step = torch.tensor(float(num_steps)) if isinstance(self._inner, torch.optim.AdamW) else num_steps
            self._inner.state[part] = {"step": step, **{moment: torch.zeros_like(part) for moment in MOMENTS}}
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
        """See `Backend`; with ZeRO 3 only the first rank holds them, in main memory, since all of them may fit nowhere else."""
        return nullcontext() if self.stage < 3 else self._brought_together()

    @contextmanager
    def _brought_together(self) -> Iterator[None]:
        parts = {}
        for value in self.module.parameters():
            with self.deepspeed.zero.GatheredParameters([value]):
                whole = value.data.to("cpu", copy=True) if self.ranks.first else None
            if whole is not None:
                parts[value], value.data = value.data, whole
        try:
            yield
        finally:
            for value, part in parts.items():
                value.data = part

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


def _settings(config: DeepSpeed, optimizer: AdamW) -> dict[str, Any]:
    aside = {"device": "cpu", "pin_memory": device().type != "cpu"}
    offloaded = {"none": (), "optimizer": ("offload_optimizer",), "all": ("offload_optimizer", "offload_param")}[config.offload]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": config.zero_stage,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            **dict.fromkeys(offloaded, aside),
        },
        "gradient_clipping": optimizer.max_grad_norm or 0.0,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
