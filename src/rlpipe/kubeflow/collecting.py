"""What tasks on a local runner finished, put where `rlpipe run` puts it.

A task is finished when it has handed over its run records, which it does last: without them nothing of it is believed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlpipe import artifact, layout, records
from rlpipe.errors import RunFailedError
from rlpipe.kubeflow.task import RECORDS

TASK_FILES = {"train_tasks": layout.TRAIN_TASKS, "eval_tasks": layout.EVAL_TASKS}
SUMMARY = layout.REPORTS / "summary.md"

Collected = set[tuple[str, int]]
"""Steps with their rounds."""


def collect(workdir: Path, folder: Path) -> Collected:
    """Move artifacts, task files, run records and pages of finished tasks into the working folder; returns the steps they are of."""
    collected: Collected = set()
    for metrics in sorted(folder.rglob("metrics"), key=lambda path: path.stat().st_mtime_ns):
        handed_over = json.loads(metrics.read_text(encoding="utf-8"))[RECORDS] if metrics.is_file() else []
        for record in [record for record in handed_over if "scalars" not in record]:
            if all((metrics.parent / name).is_dir() for name in record["outputs"]):
                _place(workdir, metrics.parent, record)
                collected.add((record["step"], record["round"]))
    for summary in folder.glob("**/finish/summary"):
        _put(summary, workdir / SUMMARY)
    return collected


def check_whole(collected: Collected, num_rounds: int) -> None:
    """A container that vanished looks like one that succeeded: believe what was handed over.

    Raises:
        RunFailedError: a step of the run is missing.
    """
    wanted = [("model", 0), ("start", 0), *((name, index) for index in range(1, num_rounds + 1) for name in layout.ROUND_STEPS)]
    if missing := [f"{name} of round {index}" for name, index in wanted if (name, index) not in collected]:
        raise RunFailedError("a task ended without handing over what it made", got=missing[0], do="run again; what is finished is kept")


def _place(workdir: Path, task: Path, record: dict[str, Any]) -> None:
    step, index = record["step"], record["round"]
    for name in record["outputs"]:
        _put(task / name, workdir / layout.place(step, name, index))
    _put_present(task, workdir, [(name, place) for name, place in TASK_FILES.items() if step == "start"])
    before = records.read(workdir, step, index)
    records.write(workdir, record)
    if before is None or before["outputs"] != record["outputs"]:
        records.forget_after(workdir, step, index)
    # a page is of the step that has scored or measured; `start` hands over the record of `model` too
    _put_present(task, workdir, [("report", layout.report_path(step, index).with_suffix(".html"))] if step != "model" else [])


def _put_present(task: Path, workdir: Path, places: Sequence[tuple[str, Path]]) -> None:
    for name, place in places:
        if (task / name).is_file():
            _put(task / name, workdir / place)


def _put(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    artifact.publish(source, place)
