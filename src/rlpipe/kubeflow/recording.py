"""The task `snapshot`: hands a round's artifacts to DVC at the places of `dvc.yaml`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpipe import artifact, layout, params
from rlpipe.kubeflow import wire
from rlpipe.kubeflow.pod import guarded
from rlpipe.kubeflow.section import Snapshot
from rlpipe.kubeflow.task import Artifact, records_of

FIXED = {"model": layout.MODEL, "train_tasks": layout.TRAIN_TASKS, "eval_tasks": layout.EVAL_TASKS}
"""What lies outside the rounds."""


def record_round(
    config: Mapping[str, Any],
    run_id: str,
    round_index: int,
    resolved: Artifact,
    made: Mapping[str, Artifact],
    metrics: Sequence[Artifact],
    expect: str | None,
) -> str:
    """Record a round's artifacts on the run's branch; returns the commit."""
    from rlpipe.kubeflow.snapshot import snapshot

    round_index = int(round_index)
    with guarded("snapshot", round_index), tempfile.TemporaryDirectory() as folder:
        records = [_kept(Path(folder), record) for numbers in metrics for record in records_of(numbers)]
        return snapshot(
            params.validated(Snapshot, wire.received(config), "kubeflow.snapshot"),
            run_id=run_id,
            round_index=round_index,
            artifacts={_place(name, round_index): Path(handed.path) for name, handed in made.items()},
            records=records,
            params=params.read_yaml(Path(resolved.path)),
            expect=expect,
        )


def _place(name: str, round_index: int) -> str:
    return (FIXED.get(name) or layout.artifact_path(name, round_index)).as_posix()


def _kept(folder: Path, record: dict[str, Any]) -> Path:
    path = folder / f"{record['step']}.json"
    artifact.write_json(path, record)
    return path
