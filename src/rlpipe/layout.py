"""Where each artifact lies in a working folder, which step writes it, and what code decides it.

The rest of rlpipe never joins these names itself, so `dvc.yaml`, the CLI and `rlpipe run` agree by construction.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

ROUND_STEPS = ("rollout", "filter", "reward", "train", "evaluate")

MODULES = {
    "model": "rlpipe.policies.step",
    "start": "rlpipe.start",
    "rollout": "rlpipe.rollout.step",
    "filter": "rlpipe.filter.step",
    "reward": "rlpipe.reward.step",
    "train": "rlpipe.train.step",
    "evaluate": "rlpipe.evaluate.step",
}
"""The module whose `run` is the step."""

MODEL = Path("models/start")
TRAIN_TASKS = Path("tasks/train.jsonl")
EVAL_TASKS = Path("tasks/eval.jsonl")
REPORTS = Path("reports")
RUN_REPORT = REPORTS / "run.json"

CORE = ("artifact.py", "chunks.py", "columns.py", "dataset.py", "params.py", "seeds.py", "step.py", "tasks.py", "trajectory.py", "verdict.py")
CODE = {
    "model": ("policies", "reasoning_gym_tasks.py", "task_sources.py", "testbeds"),
    "tasks": ("reasoning_gym_tasks.py", "task_sources.py"),
    "start": ("start.py", "policies", "engines", "evaluate", "reward", "rollout"),
    "rollout": ("policies", "engines", "rollout"),
    "filter": ("filter",),
    "reward": ("reward",),
    "train": ("policies", "train"),
    "evaluate": ("policies", "engines", "evaluate", "reward", "rollout"),
}
"""Rooms and files of the package, besides `CORE`, that decide what a step writes. `dvc.yaml` lists the same as deps."""

_PREVIOUS = {"progress_in": "progress", "history_in": "history", "evaluation_in": "evaluation", "policy_in": "policy"}


def round_name(round_index: int) -> str:
    """Two digits, as in `rounds/07`."""
    return f"{round_index:02d}"


def artifact_path(name: str, round_index: int) -> Path:
    """`rounds/RR/<name>`, relative to the working folder."""
    return Path("rounds") / round_name(round_index) / name


def report_path(step: str, round_index: int) -> Path:
    """The run record of one step, relative to the working folder."""
    return REPORTS / round_name(round_index) / f"{step}.json"


def place(step: str, parameter: str, round_index: int) -> Path:
    """Where `step` of this round finds or puts the artifact it calls `parameter`."""
    if parameter == "model":
        return MODEL
    if parameter in ("tasks", "train_tasks", "eval_tasks"):
        return EVAL_TASKS if parameter == "eval_tasks" or step == "evaluate" else TRAIN_TASKS
    if parameter in _PREVIOUS:
        return artifact_path(_PREVIOUS[parameter], round_index - 1)
    if step == "rollout" and parameter == "policy":
        return artifact_path("policy", round_index - 1)
    return artifact_path(parameter, round_index)


def relative(path: Path, workdir: Path) -> str:
    """`path` as people and records see it: below the working folder, or the bare name of what lies elsewhere."""
    path, workdir = path.absolute(), workdir.absolute()
    return path.relative_to(workdir).as_posix() if path.is_relative_to(workdir) else path.name


@cache
def code_hash(step: str) -> str:
    """Sha256 over the source files that decide what `step` writes, as they were when this process asked first."""
    return code_on_disk(step)


def code_on_disk(step: str, package: Path = Path(__file__).parent) -> str:
    """Sha256 over these source files as they are now: of this rlpipe, or of another one's `package` folder."""
    digest = hashlib.sha256()
    for name in sorted({*CORE, *CODE[step]}):
        place = package / name
        for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
            digest.update(f"{file.relative_to(package).as_posix()}\0".encode() + file.read_bytes())
    return digest.hexdigest()
