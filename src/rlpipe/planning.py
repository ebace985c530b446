"""What a run would do, and why: `rlpipe plan`. Reads what stands and writes nothing into the working folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rlpipe import artifact, keys, layout, task_sources
from rlpipe.keys import Call
from rlpipe.session import Session

UP_TO_DATE, WOULD_RUN = "up-to-date", "would run"
Split = Literal["train", "eval"]
TASK_FILES: dict[Split, Path] = {"train": layout.TRAIN_TASKS, "eval": layout.EVAL_TASKS}


@dataclass(frozen=True)
class Planned:
    """What a run would do with one step of one round; `why` is empty where it is up to date."""

    step: str
    round: int
    why: tuple[str, ...]

    @property
    def state(self) -> str:
        return WOULD_RUN if self.why else UP_TO_DATE


def plan(session: Session) -> list[Planned]:
    """Every step in the order of a run. One after a step that would run counts as if that wrote something new.

    Raises:
        ConfigError: a task source is wrong or missing.
    """
    found = []
    pending: dict[Path, str] = {}
    """Outputs that are not known yet, and the step that would write them."""
    for step, round_index in _steps(len(session.rounds)):
        if step == "tasks":
            changes = {session.workdir / TASK_FILES[split]: why for split in TASK_FILES for why in _of_tasks(session, split)}
            reasons, outputs = list(changes.values()), list(changes)
        else:
            call = session.planned(step, round_index)
            reasons, outputs = list(_of_step(call, pending)), list(call.outputs.values())
        found.append(Planned(step, round_index, tuple(reasons)))
        if reasons:
            pending |= dict.fromkeys(outputs, step if round_index == 0 else f"{step} of round {round_index}")
    return found


def _steps(num_rounds: int) -> Iterator[tuple[str, int]]:
    yield from (("model", 0), ("tasks", 0), ("start", 0))
    yield from ((step, index) for index in range(1, num_rounds + 1) for step in layout.ROUND_STEPS)


def _of_step(call: Call, pending: dict[Path, str]) -> Iterator[str]:
    waiting = {name: pending[path] for name, path in call.inputs.items() if path in pending}
    yield from keys.differences(call, keys.of(call, without=waiting), without=waiting)
    yield from (f"after {step}" for step in dict.fromkeys(waiting.values()))


def _of_tasks(session: Session, split: Split) -> Iterator[str]:
    """Tasks have no record: they are made again each time, and only other bytes count."""
    place = session.workdir / TASK_FILES[split]
    if not place.is_file():
        yield f"output {TASK_FILES[split].as_posix()} missing"
        return
    with tempfile.TemporaryDirectory() as folder:
        task_sources.write(session.configs["tasks"], split, Path(folder) / place.name, [session.workdir])
        made = artifact.sha256(Path(folder) / place.name)
    if made != artifact.sha256(place):
        yield f"output {TASK_FILES[split].as_posix()} changed ({artifact.sha256(place)[: keys.SHORT]} -> {made[: keys.SHORT]})"


def rows(planned: list[Planned]) -> list[dict[str, Any]]:
    """The plan as plain JSON."""
    return [{**asdict(one), "state": one.state, "why": list(one.why)} for one in planned]


def table(planned: list[Planned]) -> str:
    """The plan as text, one line a step."""
    cells = [("round", "step", "state", "why"), *((str(one.round), one.step, one.state, "; ".join(one.why)) for one in planned)]
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    lines = [f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}".rstrip() for row in cells]
    return "\n".join([*lines, "", f"{sum(bool(one.why) for one in planned)} of {len(planned)} would run"])
