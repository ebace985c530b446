"""What an advantage estimator is: rewards and group ids in, one advantage an attempt out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal

import numpy as np

from rlpipe.errors import TrainingError
from rlpipe.params import Section


class Estimator(Section):
    """Groups attempts by id, whatever their order and number, and leaves out those that could not be scored."""

    needs_siblings: ClassVar[bool] = True
    """Whether a group of one gets advantage 0 whatever its reward."""
    scope: ClassVar[Literal["group", "batch"]] = "group"
    """`group`: adding another group changes no advantage."""

    def __call__(self, rewards: np.ndarray, group_ids: Sequence[Hashable]) -> np.ndarray:
        """Advantages `[n]` of rewards `[n]`, where NaN means "could not be scored" and stays NaN.

        Raises:
            TrainingError: a reward or an advantage is infinite.
        """
        rewards = np.asarray(rewards, dtype=np.float64)
        advantages = np.full(len(rewards), np.nan)
        for members in positions_by_group(group_ids).values():
            scored = members[~np.isnan(rewards[members])]
            if len(scored):
                advantages[scored] = self.of_group(rewards[scored])
        check_finite(advantages, rewards, group_ids)
        return advantages

    @abstractmethod
    def of_group(self, rewards_G: np.ndarray) -> np.ndarray:
        """Advantages `[G]` of the scored attempts of one group, G >= 1."""


def positions_by_group(group_ids: Sequence[Hashable]) -> dict[Hashable, np.ndarray]:
    """Where the members of each group stand."""
    positions: dict[Hashable, list[int]] = {}
    for i, group_id in enumerate(group_ids):
        positions.setdefault(group_id, []).append(i)
    return {group_id: np.asarray(where) for group_id, where in positions.items()}


def check_finite(advantages: np.ndarray, rewards: np.ndarray, group_ids: Sequence[Hashable]) -> None:
    """Refuse a scored attempt without a finite advantage.

    Raises:
        TrainingError: names the groups.
    """
    broken = np.flatnonzero(~np.isnan(rewards) & ~np.isfinite(advantages))
    if len(broken):
        names = ", ".join(sorted({str(group_ids[i]) for i in broken})[:20])
        raise TrainingError("an advantage is not finite", got=f"rewards {rewards[broken][:5].tolist()} in {names}", do="fix the reward that gives such values")


def centred(rewards_G: np.ndarray) -> np.ndarray:
    """Rewards less their mean; exactly 0 where all are equal, which rounding of the mean would spoil."""
    if rewards_G.min() == rewards_G.max():
        return np.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()
