"""Training with torch alone: every rank holds everything, gradients are added up over the ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from rlpipe.params import Section
from rlpipe.policies import causal_lm
from rlpipe.policies.causal_lm import Evaluation
from rlpipe.policies.device import device
from rlpipe.policies.packing import Batch
from rlpipe.train.backends.base import MOMENTS, AdamW, Backend, Capability, Snapshot, autocast, check_state, parameter_groups
from rlpipe.train.backends.moments import Moment, Width, in_width, restored, stored
from rlpipe.train.ranks import ALONE, Ranks

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Torch(Section):
    """Section `backend`, `type: torch`."""

    type: Literal["torch"] = "torch"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What matrix products run in; trained weights are float32 in any case."""

    can: ClassVar[frozenset[Capability]] = frozenset({"narrow_moments", "snapshot"})

    def open(self, module: PreTrainedModel, optimizer: AdamW, ranks: Ranks = ALONE) -> Backend:
        """A backend that trains the parameters of `module` that require a gradient."""
        return TorchBackend(module, optimizer, self.dtype, ranks)


class TorchBackend:
    """Fused AdamW over the trained parameters, or one with narrow moments."""

    def __init__(self, module: PreTrainedModel, optimizer: AdamW, dtype: str, ranks: Ranks) -> None:
        self.module, self.dtype, self.max_grad_norm, self.ranks = module, dtype, optimizer.max_grad_norm, ranks
        module.to(device())  # type: ignore[arg-type]
        self.parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self.width: Width = optimizer.state
        self.optimizer = _optimizer(parameter_groups(self.parameters, optimizer.weight_decay), optimizer)

    def evaluate(self, batch: Batch, needs: Collection[str]) -> Evaluation:
        with autocast(self.module, self.dtype):
            return causal_lm.evaluate(self.module, batch, needs)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()
        if last:
            self.ranks.add_up(list(self.gradients().values()))

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: value.grad for name, value in self.parameters.items() if value.grad is not None}

    def step(self, learning_rate: float) -> float:
        import torch

        norm = float(torch.nn.utils.get_total_norm(list(self.gradients().values())))
        if math.isfinite(norm):
            if self.max_grad_norm is not None and norm > self.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self.max_grad_norm, torch.tensor(norm))
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def optimizer_state(self) -> tuple[dict[str, torch.Tensor], int]:
        state = self.optimizer.state
        tensors: dict[str, torch.Tensor] = {}
        for name, value in self.parameters.items():
            for moment in MOMENTS if value in state else ():
                held = state[value][moment]
                tensors |= stored(held, moment, name, value.shape) if isinstance(held, Moment) else {f"{moment}/{name}": held}
        return tensors, max((int(entry["step"]) for entry in state.values()), default=0)

    def load_optimizer_state(self, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        import torch

        check_state(tensors, {name: value.shape for name, value in self.parameters.items()})
        tensors = in_width(tensors, self.width)
        for name, value in self.parameters.items():
            if self.width == "float32":
                moments = {moment: tensors[f"{moment}/{name}"].to(value, copy=True) for moment in MOMENTS}
                self.optimizer.state[value] = {"step": torch.tensor(float(num_steps), device=value.device), **moments}
            else:
                self.optimizer.state[value] = {"step": num_steps, **{moment: restored(tensors, moment, value, name) for moment in MOMENTS}}

    def snapshot(self) -> Snapshot:
        """See `SnapshotBackend`."""
        tensors, num_steps = self.optimizer_state()
        weights = {name: value.detach().clone() for name, value in self.parameters.items()}
        return Snapshot(weights, {name: value.clone() for name, value in tensors.items()}, num_steps)

    def restore(self, snapshot: Snapshot) -> None:
        """See `SnapshotBackend`."""
        for name, value in self.parameters.items():
            value.data.copy_(snapshot.weights[name])
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        if snapshot.moments:
            self.load_optimizer_state(snapshot.moments, snapshot.num_steps)

    def whole_weights(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def close(self) -> None:
        pass


def _optimizer(groups: list[dict[str, Any]], settings: AdamW) -> torch.optim.Optimizer:
    import torch

    if settings.state == "float32":
        return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=True)
    from rlpipe.train.backends.narrow_adamw import NarrowAdamW

    return NarrowAdamW(groups, settings.betas, settings.eps, settings.state, settings.seed)
