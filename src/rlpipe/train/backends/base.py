"""What a backend offers, and the parts all of them share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlpipe.errors import ConfigError
from rlpipe.policies.causal_lm import Evaluation
from rlpipe.policies.packing import Batch
from rlpipe.train.ranks import Ranks

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class AdamW:
    """Settings of the optimizer; weight decay acts on matrices only. `max_grad_norm` None clips nothing."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float | None


class Backend(Protocol):
    """Holds a module's weights and steps them. The order is: evaluate and backward as often as wanted, then step.

    With several ranks all make the same calls, each on its own rows; gradients are the sum over all ranks.
    """

    module: PreTrainedModel
    ranks: Ranks

    def evaluate(self, batch: Batch, needs: Collection[str]) -> Evaluation:
        """The policy's log-probs of a batch in the backend's precision, with gradient where grad mode is on."""

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add a micro-batch's gradient; `last` marks the optimizer step's last one."""

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradients by parameter name, between the last backward and the step."""

    def step(self, learning_rate: float) -> float:
        """Clip, step, and forget the gradients; returns their norm before the clip. Nothing moves if that is not finite."""

    def optimizer_state(self) -> tuple[dict[str, torch.Tensor], int]:
        """Moments as `exp_avg/<parameter>` and `exp_avg_sq/<parameter>` in float32, and the steps taken."""

    def load_optimizer_state(self, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        """Go on from a state as `optimizer_state` returned it, whichever backend that was."""

    def whole_weights(self) -> AbstractContextManager[Any]:
        """Inside, `module` holds every weight whole, on every rank."""

    def close(self) -> None:
        """Let go of what belongs to the process."""


def autocast(module: PreTrainedModel, dtype: str) -> AbstractContextManager[Any]:
    """Automatic casting to bfloat16 on float32 weights, or nothing."""
    import torch

    return torch.autocast(module.device.type, dtype=torch.bfloat16) if dtype == "bfloat16" else nullcontext()


def parameter_groups(parameters: Mapping[str, torch.Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without; empty groups left out."""
    matrices = [value for value in parameters.values() if value.ndim >= 2]
    others = [value for value in parameters.values() if value.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def check_state(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Refuse optimizer state that belongs to other parameters.

    Raises:
        ConfigError: names the first that is missing, unknown or of another shape.
    """
    expected = {f"{moment}/{name}": shape for name, shape in shapes.items() for moment in MOMENTS}
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in expected or name not in tensors or tensors[name].shape != expected[name]:
            got = f"{name} is {'of another shape' if name in expected and name in tensors else 'missing' if name in expected else 'not trained now'}"
            raise ConfigError("the kept optimizer state belongs to other parameters", got=got, do="set train.optimizer_state: reset, or train the same layers")
