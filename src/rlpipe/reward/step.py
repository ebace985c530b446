"""The reward step: what each attempt earned, and which groups can teach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from rlpipe import artifact
from rlpipe import tasks as task_files
from rlpipe.reward import history as task_history
from rlpipe.reward.group_filters.zero_signal import spread
from rlpipe.reward.scoring import RewardSection, Scorer
from rlpipe.reward.tally import SKIPPED, Tally
from rlpipe.step import In, Out, Report

if TYPE_CHECKING:
    from pathlib import Path

    from rlpipe.tasks import Task
    from rlpipe.trajectory import Group, Trajectory

Config = RewardSection


def run(config: Config, *, kept: In, tasks: In, history_in: In, scored: Out, history: Out, round_index: int) -> Report:
    """Score the kept trajectories in child processes, add them to the tasks' history, and drop groups without signal.

    An interrupted call goes on after the last batch that was scored.
    """
    from rlpipe import dataset

    scoring = Scoring(config, total=sum(dataset.shard_rows(kept).values()), folder=scored)
    past = task_history.read(history_in)
    known = {task.task_id: task for task in task_files.load(tasks)}
    num_written = dataset.write(scored, scoring.run(dataset.read_groups(kept), known, past, round_index))
    task_history.write(history, past)
    return Report(
        numbers={**scoring.numbers(), "num_written": num_written},
        reasons=scoring.reasons(),
        outcome=artifact.outcome(kept) or (None if num_written else "no_signal"),
        facts={"dropped": {**artifact.read_manifest(kept).get("facts", {}).get("dropped", {}), **scoring.reasons()}},
    )


class Scoring:
    """The way of groups through scorers, history and group filters, counted; scored batches are kept in `folder` until all are."""

    def __init__(self, config: Config, total: int, folder: Path) -> None:
        self.config, self.total, self.folder = config, total, folder
        self.tally = Tally()
        self.dropped: Counter[str] = Counter()
        self.num_groups = self.num_groups_with_signal = self.num_groups_kept = 0

    @cached_property
    def scorer(self) -> Scorer:
        """Made when there is something to score: an empty round starts no process."""
        return Scorer(self.config)

    def run(self, groups: Iterable[Group], tasks: dict[str, Task], past: dict[str, task_history.TaskHistory], round_index: int) -> Iterator[Group]:
        """The scored groups that the group filters keep, in order; `past` grows by all of them.

        Raises:
            ScorerError: as soon as more than `max_unscorable` of all trajectories could not be scored.
        """
        from rlpipe import chunks
        from rlpipe.trajectory import groups_of

        def judge(batch: list[Group]) -> list[Trajectory]:
            return self.scorer.judge([row for group in batch for row in group], tasks)

        for rows in chunks.resumed(self.folder, batches(groups, self.config.batch_rows), judge, is_settled):
            self.tally.add(rows)
            self.tally.check(self.config.max_unscorable, total=self.total)
            judged = groups_of(rows)
            past.update(task_history.update(past, judged, round_index))
            for group in judged:
                self.num_groups += 1
                self.num_groups_with_signal += spread(group) > 0
                if self.keeps(group):
                    self.num_groups_kept += 1
                    yield group
        self.tally.check(self.config.max_unscorable)

    def keeps(self, group: Group) -> bool:
        """Whether the group is written; counts the first group filter that says no."""
        for ask in self.config.group_filters:
            verdict = ask(group)
            if not verdict.keep:
                self.dropped[str(verdict.reason)] += 1
                return self.config.keep == "all"
        return True

    def numbers(self) -> dict[str, float | int | None]:
        """What the step reports as numbers."""
        counts = {"num_groups": self.num_groups, "num_groups_with_signal": self.num_groups_with_signal, "num_groups_kept": self.num_groups_kept}
        return {**self.tally.numbers(), **counts}

    def reasons(self) -> dict[str, int]:
        """Groups dropped by filter, and unscored rewards by name and kind."""
        return {**dict(sorted(self.dropped.items())), **dict(sorted(self.tally.kinds.items()))}


def is_settled(row: Trajectory) -> bool:
    """Whether scoring the row again could give nothing else."""
    return row.reward is not None or row.status in SKIPPED


def batches(groups: Iterable[Group], num_rows: int) -> Iterator[list[Group]]:
    """Whole groups, in lists of at least `num_rows` trajectories but for the last."""
    batch: list[Group] = []
    num_waiting = 0
    for group in groups:
        batch.append(group)
        num_waiting += len(group)
        if num_waiting >= num_rows:
            yield batch
            batch, num_waiting = [], 0
    if batch:
        yield batch
