"""Which attempts can teach: rewards to advantages, and what is left out with the reason counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from rlpipe.errors import ConfigError, TrainingError
from rlpipe.train.advantages import Estimator
from rlpipe.train.batching import Attempt, TrainGroup, sampling_logprobs
from rlpipe.train.kl import Kl
from rlpipe.trajectory import Group

Score = Callable[[Sequence[TrainGroup]], list[TrainGroup]]
"""Fills in the reference's log-probs of each attempt's trained tokens."""


class Signalling(Protocol):
    """The part of the section that decides which groups have signal."""

    @property
    def advantage(self) -> Estimator: ...

    @property
    def kl(self) -> Kl | None: ...


@dataclass(frozen=True, slots=True)
class Signal:
    """Groups to train on, and what was left out: trajectories `unscored`, `no_trained_tokens`; groups `zero_advantage`."""

    groups: tuple[TrainGroup, ...]
    reasons: dict[str, int]


def find_signal(groups: Sequence[Group], config: Signalling, reference: Score) -> Signal:
    """Advantages of every scored attempt; groups where all are zero are left out unless the KL in the loss teaches them.

    Args:
        groups: any sizes, any order.
        config: the estimator and the KL.
        reference: called once, only if `config.kl` is set.

    Raises:
        ConfigError: a group baseline on attempts that have no siblings.
        TrainingError: a reward or an advantage is not finite.
    """
    check_siblings(groups, config.advantage)
    trained, reasons = _attempts(groups)
    if config.kl and config.kl.placement == "reward":
        trained = reference(trained)
    rewards = [_reward(attempt, config.kl) for group in trained for attempt in group.attempts]
    place_of = [i for i, group in enumerate(trained) for _ in group.attempts]
    advantages = iter(config.advantage(np.asarray(rewards, dtype=np.float64), place_of).tolist())
    filled = [replace(group, attempts=tuple(replace(attempt, advantage=next(advantages)) for attempt in group.attempts)) for group in trained]
    if config.kl and config.kl.placement == "loss":
        kept = [group for group in map(_with_tokens, filled) if group.attempts]
        return Signal(tuple(reference(kept)), reasons)
    kept = [group for group in map(_with_tokens, filled) if any(attempt.advantage for attempt in group.attempts)]
    return Signal(tuple(kept), {**reasons, "zero_advantage": len(filled) - len(kept)})


def check_siblings(groups: Sequence[Group], advantage: Estimator) -> None:
    """Refuse a group baseline where every group was one attempt from the start.

    Raises:
        ConfigError: names the estimator.
    """
    alone = all(len(group) == 1 and group.trajectories[0].index == 0 for group in groups)
    if groups and alone and advantage.needs_siblings:
        accepted = "2 or more attempts a task, or advantage reinforce"
        raise ConfigError(
            "a group baseline on groups of one attempt teaches nothing", got=f"{len(groups)} groups of 1", accepted=accepted, do="raise rollout.num_attempts"
        )


def _attempts(groups: Sequence[Group]) -> tuple[list[TrainGroup], dict[str, int]]:
    """Scored attempts of each group; an attempt without reward is in no mean, no spread and no loss."""
    reasons: Counter[str] = Counter(unscored=0, no_trained_tokens=0)
    kept = []
    for group in groups:
        members = sorted(group, key=lambda trajectory: (trajectory.index, trajectory.trajectory_id))
        scored = [trajectory for trajectory in members if trajectory.reward is not None]
        reasons["unscored"] += len(group) - len(scored)
        reasons["no_trained_tokens"] += sum(not trajectory.mask.any() for trajectory in scored)
        if scored:
            kept.append(TrainGroup(group.group_id, tuple(Attempt(trajectory, 0.0) for trajectory in scored)))
    return kept, dict(reasons)


def _reward(attempt: Attempt, kl: Kl | None) -> float:
    trajectory = attempt.trajectory
    if trajectory.reward is None or not np.isfinite(trajectory.reward):
        raise TrainingError("a reward is not finite", got=f"{trajectory.reward} in {trajectory.trajectory_id}", do="score it as None: could not be scored")
    if kl is None or attempt.reference_logprobs is None or kl.placement == "loss" or not len(attempt.reference_logprobs):
        return trajectory.reward
    estimates = kl.of(sampling_logprobs(trajectory).astype(np.float64), attempt.reference_logprobs.astype(np.float64))
    return trajectory.reward - kl.coefficient * float(np.mean(estimates))


def _with_tokens(group: TrainGroup) -> TrainGroup:
    return replace(group, attempts=tuple(attempt for attempt in group.attempts if attempt.num_tokens))
