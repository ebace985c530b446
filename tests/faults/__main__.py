"""`python -m tests.faults [--points N] [--draw TEXT]`: a table of kill points, each followed by a run that must end in the undisturbed run's bytes.

The last line is `points=N survived=N lost=N`. A point that could not be tried counts as lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe import artifact
from tests.faults.hook import DEATHS, Death, Fault, recorded
from tests.faults.surfaces import start, warm

FULL = 64
"""Points of the full run."""
SHARE = {"run": 0.8, "dvc": 0.125, "kfp-local": 0.075}
"""How many of the points each surface gets; a run of the last two starts a process for every step."""
WRITES = {"rollout": ("trajectories", "progress"), "filter": ("kept",), "reward": ("scored", "history"), "train": ("policy",), "evaluate": ("evaluation",)}
STEP_OF = {name: step for step, names in WRITES.items() for name in names}


@dataclass(frozen=True)
class Point:
    """One place to end a run at."""

    surface: str
    at: int
    step: str
    event: str
    death: Death


def main() -> int:
    """Try the points on all cores; returns 0 if every one survived and none is missing."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--points", type=int, default=FULL, help="how many")
    options.add_argument("--draw", default="", help="text that decides which points are drawn, such as a commit's hash")
    options.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = options.parse_args()
    began = time.monotonic()
    warm()
    root = Path(tempfile.mkdtemp(prefix="rlpipe-faults-"))  # not `TemporaryDirectory`, which a forked process would remove at its exit
    try:
        wanted = _wanted(given.points)
        points = [point for surface, num in wanted.items() for point in _points(surface, num, root, given.draw)]
        expected = {surface: state_of(root / f"whole-{surface}", surface) for surface in wanted}
        rows = _tried(points, expected, root, given.jobs)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    survived = sum(row["verdict"] == "survived" for row in rows)
    lost = given.points - survived
    print(_table(rows))
    print(f"seconds={time.monotonic() - began:.0f}")
    print(f"points={given.points} survived={survived} lost={lost}")
    return int(lost > 0)


def _wanted(num_points: int) -> dict[str, int]:
    others = {surface: max(1, round(SHARE[surface] * num_points)) for surface in ("dvc", "kfp-local")}
    return {"run": num_points - sum(others.values()), **others}


def _points(surface: str, num: int, root: Path, draw: str) -> list[Point]:
    """Points spread over the steps and kinds of events of an undisturbed run, which is left in `root`."""
    folder, counter = root / f"whole-{surface}", root / f"counter-{surface}"
    folder.mkdir()
    code = start(surface, folder, root / f"whole-{surface}.log", Fault(str(folder), str(counter), 0))
    if code:
        raise SystemExit(f"the undisturbed run of {surface} ended with {code}:\n{(root / f'whole-{surface}.log').read_text()[-2000:]}")
    rng = random.Random(f"{draw}/{surface}")
    kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, (event, place) in enumerate(recorded(counter), start=1):
        kinds[_step(event, place), event].append(number)
    waiting = [(step, event, rng.sample(numbers, len(numbers))) for (step, event), numbers in sorted(kinds.items())]
    rng.shuffle(waiting)
    found: list[Point] = []
    while len(found) < num and any(numbers for _, _, numbers in waiting):
        for step, event, numbers in waiting:
            if numbers and len(found) < num:
                found.append(Point(surface, numbers.pop(), step, event, DEATHS[len(found) % len(DEATHS)]))
    return found


def _step(event: str, place: str) -> str:
    """Whose event it is, by where it happens."""
    parts = Path(place).parts
    if event == "tracking" or "mlflow" in parts[0]:
        return "tracking"
    if parts[0] == "rounds" and len(parts) > 2:
        name = parts[2].removeprefix(".").partition(".")[0]
        return "start" if parts[1] == "00" else STEP_OF.get(name, name)
    return {"models": "model", "tasks": "tasks", "reports": "records", ".dvc": "versioning", "dvc.lock": "versioning"}.get(parts[0], "workspace")


TOLD = {
    "runs": "select name, status from runs order by name",
    "points": "select r.name, m.key, m.step, count(*) from metrics m join runs r using (run_uuid) group by r.name, m.key, m.step order by 1, 2, 3",
    "params": "select r.name, p.key, p.value from params p join runs r using (run_uuid) order by 1, 2",
    "inputs": """select r.name, d.name, d.digest from inputs i
                 join datasets d on i.source_id = d.dataset_uuid join runs r on i.destination_id = r.run_uuid order by 1, 2, 3""",
    "versions": "select key, value from model_version_tags where key in ('sha256', 'dvc', 'champion_because', 'champion_after') order by 1, 2",
    "champion": "select value from registered_model_aliases a join model_version_tags t on a.version = t.version where t.key = 'sha256'",
}


def told(folder: Path) -> dict[str, Any]:
    """What MLflow was told, each thing once: runs, points of metrics, params, inputs, versions, the champion."""
    with sqlite3.connect(folder / "mlflow.db") as store:
        return {name: store.execute(query).fetchall() for name, query in TOLD.items()}


def state_of(folder: Path, surface: str) -> dict[str, Any]:
    """What a run leaves that counts: every artifact's content as read, what DVC recorded, and what MLflow was told.

    Not what a task of kfp's runner told: one that is killed after that is run, and told, again.
    """
    found = {path.parent.relative_to(folder).as_posix(): artifact.fingerprint(path.parent) for path in sorted(folder.glob("rounds/*/*/manifest.json"))}
    tasks = {path.name: artifact.sha256(path) for path in sorted((folder / "tasks").glob("*.jsonl"))}
    left = sorted(path.relative_to(folder).as_posix() for path in folder.glob("rounds/*/.*"))
    lock = artifact.sha256(folder / "dvc.lock") if (folder / "dvc.lock").is_file() else None
    mlflow = {} if surface == "kfp-local" else {f"mlflow {name}": rows for name, rows in told(folder).items()}
    return {"artifacts": found, "tasks": tasks, "lock": lock, "left": left, **mlflow}


def _tried(points: Sequence[Point], expected: dict[str, Any], root: Path, jobs: int) -> list[dict[str, Any]]:
    """Every point's row, tried by `jobs` processes."""
    children = []
    for job in range(jobs):
        child = os.fork()
        if child == 0:
            for number in range(job, len(points), jobs):
                row = _try(points[number], expected[points[number].surface], root / f"point-{number:03d}")
                (root / f"row-{number:03d}.json").write_text(json.dumps(row), encoding="utf-8")
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    files = [root / f"row-{number:03d}.json" for number in range(len(points))]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]


def _try(point: Point, expected: dict[str, Any], root: Path) -> dict[str, Any]:
    folder = root / "run"
    folder.mkdir(parents=True)
    fault = Fault(str(folder), str(root / "counter"), point.at, point.death)
    ended = start(point.surface, folder, root / "log", fault)
    row = {"surface": point.surface, "step": point.step, "event": point.event, "death": point.death, "at": point.at, "ended": ended}
    believed = [str(error) for error in _half_written(folder)]
    if believed:
        return {**row, "verdict": f"lost: {believed[0]}"}
    again = start(point.surface, folder, root / "log")
    found = state_of(folder, point.surface)
    wrong = [name for name in expected if expected[name] != found[name]]
    verdict = "survived" if not again and not wrong else f"lost: the next run ended with {again}, other {', '.join(wrong) or 'nothing'}"
    if verdict == "survived":
        shutil.rmtree(root)
    else:
        print((root / "log").read_text(errors="replace")[-3000:], file=sys.stderr)
    return {**row, "verdict": verdict}


def _half_written(folder: Path) -> list[artifact.ArtifactError]:
    """What claims to be whole and is not."""
    found = []
    for manifest in folder.glob("rounds/*/*/manifest.json"):
        if not manifest.parent.name.startswith("."):
            try:
                artifact.verify(manifest.parent)
            except artifact.ArtifactError as error:
                found.append(error)
    return found


def _table(rows: Sequence[dict[str, Any]]) -> str:
    names = ("surface", "step", "event", "death", "at", "ended", "verdict")
    cells = [list(names), *[[str(row[name]) for name in names] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells)


if __name__ == "__main__":
    sys.exit(main())
