"""The optimizer steps of one round."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpipe.errors import TrainingError
from rlpipe.progress import track
from rlpipe.train.backends import Backend
from rlpipe.train.batching import MicroBatch, TrainGroup, micro_batches, weighted
from rlpipe.train.checkpoints import Checkpoints
from rlpipe.train.losses import LossInputs
from rlpipe.train.schedules.passes import num_dropped, optimizer_steps
from rlpipe.train.schedules.warmup import learning_rate
from rlpipe.train.tally import MicroNumbers, Tally

if TYPE_CHECKING:
    import torch

    from rlpipe.train.section import Config


@dataclass(frozen=True, slots=True)
class Updated:
    """The policy version after the round, and the numbers of its report."""

    version: int
    numbers: dict[str, float | int | None]


def update(
    groups: Sequence[TrainGroup],
    backend: Backend,
    config: Config,
    *,
    version: int,
    round_index: int,
    incoming: bool = True,
    checkpoints: Checkpoints | None = None,
) -> Updated:
    """Train `backend` on `groups`, `config.epochs` times over; the policy version goes up by one an optimizer step.

    Args:
        groups: with advantages, in any order.
        backend: holds the weights.
        config: section `train`.
        version: of the weights the backend holds.
        round_index: goes into the order of groups.
        incoming: whether these weights sampled the tokens of `version`, so that log-probs can be compared at the first step.
        checkpoints: saves now and then; where it holds what an interrupted call saved, `backend` has that and goes on from it.

    Raises:
        TrainingError: a loss or gradient is not finite; names the optimizer step and the groups.
    """
    tally, began = checkpoints.tally() if checkpoints else Tally(), time.monotonic()
    done = tally.num_steps
    version += done
    order = (config.run.seed, round_index)
    steps = list(optimizer_steps([group.group_id for group in groups], config.groups_per_step, config.epochs, config.drop_last, order))
    for number, chosen in enumerate(track(steps[done:], total=len(steps) - done, label="train"), start=done):
        rate = learning_rate(config.learning_rate, version, config.warmup_steps)
        optimizer_step([groups[i] for i in chosen], backend, config, rate, tally, version if incoming and number == 0 else None)
        version += 1
        if checkpoints:
            checkpoints.after_step(number + 1, tally, last=number + 1 == len(steps))
    dropped = num_dropped(len(groups), config.groups_per_step, config.drop_last)
    tally.micros = [micro for part in backend.ranks.gather(tally.micros) for micro in part]
    return Updated(version, {**tally.numbers(checkpoints.seconds if checkpoints else time.monotonic() - began), "num_groups_dropped": dropped})


def optimizer_step(groups: Sequence[TrainGroup], backend: Backend, config: Config, rate: float, tally: Tally, fresh: int | None) -> None:
    """One step of the optimizer on the mean over all of `groups`, however they are split into micro-batches and over ranks.

    Args:
        groups: of this step alone.
        backend: holds the weights.
        config: section `train`.
        rate: learning rate.
        tally: takes the numbers.
        fresh: the version the weights still have, where tokens sampled with it must get the log-probs they were sampled with.

    Raises:
        TrainingError: the loss or gradient is not finite.
    """
    whole_step = weighted(groups, config.aggregation)
    micros = micro_batches(whole_step, config.micro_batch, config.max_row_tokens, config.packing, backend.ranks, config.micro_batch_tokens)
    for number, micro in enumerate(micros, start=1):
        loss, numbers = loss_of(micro, backend, config, fresh)
        if not np.isfinite(numbers.loss):
            raise _not_finite("loss", numbers.loss, tally.num_steps, micro.group_ids)
        backend.backward(loss, last=number == len(micros))
        if not micro.idle:
            tally.add(numbers)
    norm = backend.step(rate)
    if not np.isfinite(norm):
        raise _not_finite("gradient", norm, tally.num_steps, [group.group_id for group in groups])
    tally.finish_step(norm)


def loss_of(micro: MicroBatch, backend: Backend, config: Config, fresh: int | None = None) -> tuple[torch.Tensor, MicroNumbers]:
    """A micro-batch's share of the optimizer step's loss, a scalar with gradient, and its numbers."""
    needs = {"entropy", *config.loss.needs}
    evaluation = backend.evaluate(micro.batch, needs)
    inputs = _inputs(micro, evaluation.logprobs)
    token_losses = config.loss(inputs)
    losses, kl = token_losses.losses, None
    if config.kl and micro.tokens.reference_logprobs is not None:
        kl = config.kl.of(inputs.logprobs, _like(micro.tokens.reference_logprobs, inputs.logprobs))
        if config.kl.placement == "loss":
            losses = losses + config.kl.coefficient * kl
    loss = (losses * _like(micro.tokens.weights, losses)).sum()
    return loss, _numbers(micro, inputs, loss, token_losses.clipped, evaluation.entropy, kl, fresh)


def _inputs(micro: MicroBatch, logprobs: torch.Tensor) -> LossInputs:
    return LossInputs(logprobs, _like(micro.tokens.sampling_logprobs, logprobs), _like(micro.tokens.advantages, logprobs))


def _like(values: np.ndarray, other: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.from_numpy(values).to(other)


def _numbers(micro: MicroBatch, inputs: LossInputs, loss: torch.Tensor, clipped: torch.Tensor, entropy: Any, kl: Any, fresh: int | None) -> MicroNumbers:
    difference = (inputs.logprobs.detach() - inputs.sampling_logprobs).double()
    return MicroNumbers(
        loss=float(loss.detach()),
        num_tokens=len(micro.tokens.weights),
        approx_kl=float((difference.exp() - 1 - difference).sum()),
        num_clipped=int(clipped.sum()),
        entropy=float(entropy.double().sum()),
        kl=None if kl is None else float(kl.detach().double().sum()),
        gaps=np.empty(0) if fresh is None else difference.abs().cpu().numpy()[micro.tokens.versions == fresh],
    )


def _not_finite(what: str, got: float, step: int, group_ids: Collection[str]) -> TrainingError:
    where = f"{got} at optimizer step {step + 1} of the round, groups {', '.join(sorted(group_ids)[:20])}"
    return TrainingError(f"the {what} is not finite", got=where, do="lower train.learning_rate or train.max_grad_norm, or inspect these groups")
