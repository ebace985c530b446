"""Small trajectories and artifacts for the tests of filter and reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlpipe import artifact, dataset, tasks
from rlpipe.reward import history
from rlpipe.reward.section import RewardSection
from rlpipe.tasks import Task
from rlpipe.trajectory import Group, Span, Trajectory, groups_of


def trajectory(
    completion: str = " 9\n",
    *,
    group: str = "g0",
    index: int = 0,
    task: str = "t0",
    sampled: Sequence[int] = (7, 8),
    reward: float | None = None,
    **fields: str,
) -> Trajectory:
    """Two prompt tokens and `sampled` ones after them."""
    ids = np.array([1, 2, *sampled], dtype=np.int32)
    logprobs = np.array([np.nan, np.nan, *(-0.5 for _ in sampled)], dtype=np.float32)
    spans = (Span("prompt", 0, 2), Span("policy", 2, len(ids), trained=True))
    return Trajectory(f"{group}/{index}", group, task, index, 1, ids, logprobs, spans, completion=completion, reward=reward, **fields)


def group(*completions: str, name: str = "g0", task: str = "t0") -> Group:
    """One group with these completions."""
    return Group(name, tuple(trajectory(text, group=name, task=task, index=i) for i, text in enumerate(completions)))


def section(*rewards: dict[str, object], **fields: object) -> RewardSection:
    """A reward section with these rewards."""
    return RewardSection.model_validate({"rewards": rewards, **fields})


def bad(scorer: str, **fields: object) -> dict[str, object]:
    """The custom reward `scorer` of `bad_scorers`."""
    return {"type": "custom", "path": f"tests.reward.bad_scorers:{scorer}", **fields}


def finished(folder: Path, rows: Sequence[Trajectory], outcome: str | None = None) -> Path:
    """A trajectory dataset as `execute` leaves it."""
    dataset.write(folder, groups_of(rows))
    artifact.write_manifest(folder, outcome=outcome)
    return folder


def finished_history(folder: Path) -> Path:
    """An empty history as `execute` leaves it."""
    history.empty(folder)
    artifact.write_manifest(folder)
    return folder


def task_file(path: Path, references: dict[str, str]) -> Path:
    """A task file with these references."""
    tasks.save(path, [Task(task_id=name, prompt="?", reference=reference) for name, reference in references.items()])
    return path
