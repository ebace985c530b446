"""What a page shows of an evaluation: the decision, and task by task against the champion it was held against."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe import tasks
from rlpipe.errors import ArtifactError
from rlpipe.evaluate import results
from rlpipe.evaluate.results import CHAMPION, RESULTS, TaskResult
from rlpipe.tasks import Task

KINDS = {
    "lost": "The champion solved it, this policy does not",
    "won": "This policy solves it, the champion did not",
    "unscored": "Could not be scored for both",
    "neither": "Neither solves it",
    "both": "Both solve it",
}
"""What became of a task, worst first; without a champion before, `neither` and `both` speak of the policy alone."""
ALONE = {"unscored": "Could not be scored", "neither": "Not solved", "both": "Solved"}
NUM_SHOWN = 12
"""Tasks listed of each kind."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation to show.

    Attributes:
        content: its `evaluation.json`.
        before: the champion's accuracy before the decision; None where there was none.
        kinds: what each kind of task is called here.
        tasks: results by kind, in the order of the tasks.
    """

    content: dict[str, Any]
    before: float | None
    kinds: dict[str, str]
    tasks: dict[str, list[TaskResult]]

    @property
    def counts(self) -> dict[str, int]:
        """Tasks of each kind."""
        return {kind: len(found) for kind, found in self.tasks.items()}


def read(inputs: Mapping[str, Path], outputs: Mapping[str, Path]) -> Evaluation | None:
    """The evaluation a step wrote, next to the one it read; None if it wrote none.

    Raises:
        ArtifactError: a file of it is missing or damaged.
    """
    if "evaluation" not in outputs:
        return None
    folder, former = outputs["evaluation"], inputs.get("evaluation_in")
    content, found = _content(folder), results.read(folder / RESULTS)
    if former is None or _content(former) == content:
        return Evaluation(content, None, ALONE, _sorted(found, {row.task_id: row.correct for row in found}, ALONE))
    champion = {row.task_id: row.correct for row in results.read(former / CHAMPION)}
    return Evaluation(content, _content(former)["champion"]["greedy_accuracy"], KINDS, _sorted(found, champion, KINDS))


def asked(shown: Evaluation, inputs: Mapping[str, Path]) -> dict[str, Task]:
    """The held-out tasks listed on the page, by id; none of them where the step's task file is not at hand."""
    path = inputs.get("tasks", inputs.get("eval_tasks"))
    wanted = {row.task_id for found in shown.tasks.values() for row in found[:NUM_SHOWN]}
    return {task.task_id: task for task in tasks.load(path) if task.task_id in wanted} if path else {}


def _content(folder: Path) -> dict[str, Any]:
    path = folder / "evaluation.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read", got=type(error).__name__, do="run evaluate again") from error


def _sorted(found: Sequence[TaskResult], champion: Mapping[str, bool | None], kinds: Mapping[str, str]) -> dict[str, list[TaskResult]]:
    by_kind: dict[str, list[TaskResult]] = {kind: [] for kind in kinds}
    for row in found:
        by_kind[_kind(row.correct, champion.get(row.task_id))].append(row)
    return by_kind


def _kind(now: bool | None, before: bool | None) -> str:
    if now is None or before is None:
        return "unscored"
    if now == before:
        return "both" if now else "neither"
    return "won" if now else "lost"
