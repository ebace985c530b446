"""A run record and datasets of a few rows, small enough to check by eye."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe import artifact, dataset
from rlpipe.evaluate import results
from rlpipe.evaluate.results import TaskResult
from rlpipe.trajectory import RewardValue, Span, Trajectory, groups_of


def attempt(place: int, num_tokens: int = 3, reward: float | None = None, **changes: Any) -> Trajectory:
    """Attempt `place % 4` of group `place // 4`: two prompt tokens, then `num_tokens` sampled ones of log-prob -0.5."""
    logprobs = np.array([np.nan, np.nan, *[-0.5] * num_tokens], dtype=np.float32)
    group = f"01/task-{place // 4}/0"
    values: dict[str, Any] = {
        "trajectory_id": f"{group}/{place % 4}",
        "group_id": group,
        "task_id": f"task-{place // 4}",
        "index": place % 4,
        "round": 1,
        "token_ids": np.arange(2 + num_tokens, dtype=np.int32),
        "logprobs": logprobs,
        "spans": (Span("prompt", 0, 2), Span("policy", 2, 2 + num_tokens, policy_version=7, trained=True)),
        "prompt": f"question {place}",
        "completion": f"answer {place}",
        "reward": reward,
        "rewards": () if reward is None else (RewardValue("exact_match", reward),),
    }
    return Trajectory(**values | changes)


def written(folder: Path, rows: Iterable[Trajectory], **facts: Any) -> Path:
    """A finished dataset; returns `folder`."""
    dataset.write(folder, groups_of(rows))
    artifact.write_manifest(folder, artifact=folder.name, round=1, **facts)
    return folder


def record(step: str = "reward", outcome: str | None = None, numbers: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The parts of a run record that a report looks at."""
    values = {"step": step, "round": 1, "outcome": outcome, "numbers": numbers or {}, "reasons": {}, "inputs": {}, "outputs": {}, "params": {}}
    return values | changes


def evaluated(folder: Path, correct: dict[str, bool | None], champion: dict[str, bool | None], *, round_index: int, decision: str, accuracy: float) -> Path:
    """A finished evaluation; returns `folder`."""
    for name, verdicts in ((results.RESULTS, correct), (results.CHAMPION, champion)):
        rows = [TaskResult(task, verdict, f"says {task}", 2, 0, 0, "engine lost" if verdict is None else None) for task, verdict in verdicts.items()]
        results.write(folder / name, rows)
    content = {
        "round": round_index,
        "greedy_accuracy": accuracy,
        "pass_at": {},
        "decision": decision,
        "reason": "1 tasks won and 1 lost of 4",
        "champion": {"greedy_accuracy": 0.5},
    }
    artifact.write_json(folder / "evaluation.json", content)
    artifact.write_manifest(folder)
    return folder
