"""Counts what was scored, and refuses a dataset of which too much could not be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlpipe.errors import ScorerError

if TYPE_CHECKING:
    from rlpipe.trajectory import RewardValue, Trajectory

SKIPPED = ("partial", "aborted", "infra_error")
"""Statuses of trajectories that are never scored: what failed was not the policy."""
NAMED_REASONS = 5


class Tally:
    """Values and failures over all trajectories seen."""

    def __init__(self) -> None:
        self.num_trajectories = self.num_skipped = self.num_unscorable = self.num_limited = 0
        self.totals: list[float] = []
        self.values: dict[str, list[float]] = {}
        self.kinds: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Count trajectories that went through the scorer."""
        for row in trajectories:
            self.num_trajectories += 1
            if row.status in SKIPPED:
                self.num_skipped += 1
                continue
            if row.reward is None:
                self.num_unscorable += 1
            else:
                self.totals.append(row.reward)
            self.num_limited += any(reward.status == "limit" for reward in row.rewards)
            for reward in row.rewards:
                self._count(reward)

    def _count(self, reward: RewardValue) -> None:
        if reward.value is not None:
            self.values.setdefault(reward.name, []).append(reward.value)
            return
        self.kinds[f"{reward.name}.{kind(reward)}"] += 1
        self.reasons[f"{reward.name}: {reward.status}: {reward.reason}"] += 1

    def check(self, max_unscorable: float, total: int | None = None) -> None:
        """Refuse more unscorable trajectories than allowed.

        Args:
            max_unscorable: allowed share of the trajectories that are scored at all.
            total: trajectories there will be in the end, so that a hopeless dataset is refused early.

        Raises:
            ScorerError: names the exception types with their counts.
        """
        among = max(1, (self.num_trajectories if total is None else total) - self.num_skipped)
        if self.num_unscorable <= max_unscorable * among:
            return
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.kinds.items()))
        examples = " | ".join(f"{reason} (x{count})" for reason, count in sorted(self.reasons.items(), key=lambda found: (-found[1], found[0]))[:NAMED_REASONS])
        raise ScorerError(
            f"{self.num_unscorable} of {among} trajectories could not be scored",
            got=f"{kinds}; {examples}",
            accepted=f"a share of at most {max_unscorable:g} (reward.max_unscorable)",
            do="mend the reward, raise its limits, or allow a larger share",
        )

    def numbers(self) -> dict[str, float | int | None]:
        """Counts, the mean total (`sampled_reward`) and each reward's mean over what was scored."""
        means = {f"reward_{name}": mean(values) for name, values in sorted(self.values.items())}
        return {
            "sampled_reward": mean(self.totals),
            "num_trajectories": self.num_trajectories,
            "num_scored": len(self.totals),
            "num_unscorable": self.num_unscorable,
            "num_skipped": self.num_skipped,
            "num_limited": self.num_limited,
            **means,
        }


def kind(reward: RewardValue) -> str:
    """Under which name a failure is counted: the exception's type, `non_finite`, `no_score`, or the status."""
    return (reward.reason or reward.status).partition(":")[0] if reward.status == "error" else reward.status


def mean(values: list[float]) -> float | None:
    """Exactly rounded mean, of values whose sum is no number too; None of nothing."""
    try:
        return math.fsum(values) / len(values) if values else None
    except OverflowError:
        return math.fsum(value / len(values) for value in values)
