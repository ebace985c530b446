"""Scores trajectories in the sandbox. Used by the reward step and by evaluate; imports without Arrow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlpipe.errors import CheckError
from rlpipe.reward import sandbox
from rlpipe.reward.section import RewardSection
from rlpipe.reward.tally import SKIPPED, Tally
from rlpipe.reward.worker import Limits, Outcome
from rlpipe.tasks import Task

if TYPE_CHECKING:
    from rlpipe.trajectory import Trajectory

__all__ = ["RewardSection", "Scorer"]


class Scorer:
    """Scores trajectories as a `reward` section says. Making one begins to start the scoring processes."""

    def __init__(self, section: RewardSection) -> None:
        self.section = section
        box = sandbox.shared()
        box.warm(section.own_code(box.folders))

    def score(self, trajectories: Sequence[Trajectory], tasks: Mapping[str, Task] | Iterable[Task]) -> list[Trajectory]:
        """The trajectories in their order, each with its rewards and total.

        Raises:
            ScorerError: more than `max_unscorable` of them could not be scored.
            CheckError: a trajectory's task is not among `tasks`.
            ConfigError: a custom reward cannot be loaded.
        """
        scored = self.judge(trajectories, tasks)
        tally = Tally()
        tally.add(scored)
        tally.check(self.section.max_unscorable)
        return scored

    def judge(self, trajectories: Sequence[Trajectory], tasks: Mapping[str, Task] | Iterable[Task]) -> list[Trajectory]:
        """As `score`, however many cannot be scored.

        Raises:
            CheckError, ConfigError: as `score`.
        """
        by_id = tasks if isinstance(tasks, Mapping) else {task.task_id: task for task in tasks}
        wanted = [i for i, row in enumerate(trajectories) if row.status not in SKIPPED]
        rewards = self.section.rewards
        calls = [(k, (reward.view(trajectories[i]), _task(trajectories[i], by_id))) for i in wanted for k, reward in enumerate(rewards)]
        limits = Limits(self.section.wall_seconds, self.section.cpu_seconds, self.section.memory_mb)
        outcomes = sandbox.shared().run(rewards, calls, limits, workers=self.section.workers, deadline_seconds=self.section.batch_deadline_seconds)
        found = {row: outcomes[n * len(rewards) : (n + 1) * len(rewards)] for n, row in enumerate(wanted)}
        return [self._with_rewards(row, found.get(i)) for i, row in enumerate(trajectories)]

    def _with_rewards(self, row: Trajectory, outcomes: Sequence[Outcome] | None) -> Trajectory:
        from rlpipe.trajectory import RewardValue

        rewards = self.section.rewards
        if outcomes is None:
            return row.with_rewards([RewardValue(reward.label, None, "skipped", row.status) for reward in rewards], None)
        values = [RewardValue(reward.label, *outcome) for reward, outcome in zip(rewards, outcomes, strict=True)]
        counted = [(reward.weight, value.value) for reward, value in zip(rewards, values, strict=True) if reward.weight]
        total = float(sum(weight * value for weight, value in counted if value is not None))
        if not math.isfinite(total):
            why = "NotFinite: the weighted sum of the rewards is not a finite number"
            return row.with_rewards([replace(value, value=None, status="error", reason=why) for value in values], None)
        return row.with_rewards(values, None if any(value is None for _, value in counted) else total)


def _task(row: Trajectory, tasks: Mapping[str, Task]) -> Task:
    task = tasks.get(row.task_id)
    if task is None:
        raise CheckError(
            "a trajectory's task is not in the task file", got=f"{row.task_id} of {row.trajectory_id}", do="give the tasks the rollout was made with"
        )
    return task
