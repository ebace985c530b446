"""What a backend offers, and the parts all of them share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from rlpipe.errors import ConfigError
from rlpipe.params import Section
from rlpipe.policies.causal_lm import Evaluation
from rlpipe.policies.packing import Batch
from rlpipe.train.backends.moments import BLOCK, SCALES, Width
from rlpipe.train.backends.moments import MOMENTS as MOMENTS
from rlpipe.train.ranks import Ranks

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Capability = Literal["narrow_moments", "snapshot"]
"""What some backends can do and others cannot: hold moments in less than float32; put weights and optimizer aside and take them back."""


class Optimizer(Section):
    """Section `train.optimizer`: which optimizer, and what it holds its state in. Its numbers stand in `train` itself."""

    type: Literal["adamw"] = "adamw"
    state: Width = "float32"
    """What both moments are held in; bytes of them for each trained weight: float32 8, bfloat16 4, int8 a little over 2
    (blocks with a scale each: Dettmers et al. 2022, https://arxiv.org/abs/2110.02861). Narrow ones take more time a step."""


@dataclass(frozen=True, slots=True)
class AdamW:
    """Settings of the optimizer; weight decay acts on matrices only. `max_grad_norm` None clips nothing.

    `state` is what its moments are held in, `seed` decides how they are rounded.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float | None
    state: Width = "float32"
    seed: int = 0


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
        """Moments as `exp_avg/<parameter>` and `exp_avg_sq/<parameter>`, in the width they are held in, and the steps taken.

        Called on every rank; only the first is sure to get the moments.
        """

    def load_optimizer_state(self, tensors: Mapping[str, torch.Tensor], num_steps: int) -> None:
        """Go on from a state as `optimizer_state` returned it, whichever backend that was, in the width this one holds."""

    def whole_weights(self) -> AbstractContextManager[Any]:
        """Inside, `module` holds every weight whole, at least on the first rank; entered on every rank."""

    def close(self) -> None:
        """Let go of what belongs to the process."""


class Snapshot(NamedTuple):
    """Trained weights by name, and the optimizer's state, as they were; copies."""

    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    num_steps: int


class SnapshotBackend(Backend, Protocol):
    """A backend that can `snapshot`."""

    def snapshot(self) -> Snapshot:
        """What training has changed, to be taken back later; between a step and the next backward."""

    def restore(self, snapshot: Snapshot) -> None:
        """Take back weights and optimizer as they were, and forget gradients; what follows has the bytes it would have had then."""


def check_capable(kind: str, can: Collection[Capability], needs: Mapping[Capability, str]) -> None:
    """Refuse what a backend cannot do.

    Args:
        kind: the backend's `type`.
        can: what it declares.
        needs: what is needed, and the setting that needs it.

    Raises:
        ConfigError: names the first setting.
    """
    for need, setting in needs.items():
        if need not in can:
            raise ConfigError(
                f"backend.type {kind} cannot do what {setting} needs",
                got=need,
                accepted=", ".join(can) or "none of these",
                do=f"change {setting}, or set backend.type: torch",
            )


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
    import torch

    expected = {f"{moment}/{name}": shape for name, shape in shapes.items() for moment in MOMENTS}
    for name, values in tensors.items():
        moment, _, parameter = name.partition("/")
        if moment in MOMENTS and values.dtype == torch.uint8:
            expected[f"{moment}{SCALES}/{parameter}"] = torch.Size([-(-values.numel() // BLOCK)])
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in expected or name not in tensors or tensors[name].shape != expected[name]:
            got = f"{name} is {'of another shape' if name in expected and name in tensors else 'missing' if name in expected else 'not trained now'}"
            raise ConfigError("the kept optimizer state belongs to other parameters", got=got, do="set train.optimizer_state: reset, or train the same layers")
