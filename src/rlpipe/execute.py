"""The one wrapper round every step, whichever surface calls it.

Checks what comes in, runs the step into unfinished folders, checks what came out, writes the manifests, puts the
outputs in place, and keeps the run record. A kill at any moment leaves either finished artifacts or none.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from rlpipe import artifact, keys, processes, records
from rlpipe.keys import Call, Key
from rlpipe.step import Report

log = logging.getLogger("rlpipe")

Suite = Literal["tasks", "trajectories", "kept", "scored"]
CHECKED: dict[str, Suite] = {
    "tasks": "tasks",
    "train_tasks": "tasks",
    "eval_tasks": "tasks",
    "trajectories": "trajectories",
    "kept": "kept",
    "scored": "scored",
}
"""Artifacts that Great Expectations guards, and the suite of each."""

Track = Callable[[Call, dict[str, Any]], None]


def execute(call: Call, *, fresh: bool = False, began: float | None = None, track: Track | None = None, key: Key | None = None) -> dict[str, Any]:
    """Run a step, or find it finished under the same inputs, params and code; returns its run record.

    Nothing is written but the outputs, what is unfinished beside them, and `reports/` of the call's workdir.

    Args:
        fresh: run it although it is finished, and forget what an interrupted call left.
        began: `time.monotonic()` when the surface started, so that its own start counts as overhead.
        track: sends the record of a call that ran to a tracking server; its time counts as overhead too.
        key: what decides the outputs, where that is not the call's own (parts of an output that are joined).

    Raises:
        ArtifactError: an input is missing, unfinished or damaged, or it or the code was changed while the step ran.
        CheckError: an input or output broke a rule.
    """
    began = time.monotonic() if began is None else began
    own = key is None
    key = keys.of(call) if key is None else key
    if not fresh and (record := keys.finished(call, key)):
        log.info("step=%s round=%d state=up-to-date", call.step.name, call.round_index)
        return _tracked(call, record, track) if track and not record.get("tracked") else record
    _check(call.inputs, role="in")
    partial = _begin(call, key, fresh)
    reset_peak_memory()
    started = time.monotonic()
    with processes.none_left_by(call.step.name) as ended:
        report = call.step.run(call.config, **{**call.paths, **partial}, round_index=call.round_index, **call.scalars)
    worked = time.monotonic() - started
    if own:
        keys.check_unchanged(call, key)
    fingerprints = _finish(call, key, report, partial)
    record = _record(key, report, fingerprints, seconds=time.monotonic() - began, worked=worked) | {"children_ended": ended}
    records.write(call.workdir, record)
    if track:
        record = _tracked(call, record, track)
        seconds = time.monotonic() - began
        record |= {"seconds": seconds, "seconds_overhead": seconds - worked}
        records.write(call.workdir, record)
    log.info("%s", _line(record))
    return record


def _tracked(call: Call, record: dict[str, Any], track: Track) -> dict[str, Any]:
    """Hand the record to tracking, and note that it was: a kill between the two hands it over again, which leaves nothing twice."""
    track(call, record)
    record = {**record, "tracked": True}
    records.write(call.workdir, record)
    return record


def _begin(call: Call, key: Key, fresh: bool) -> dict[str, Path]:
    """Unfinished folders for the outputs; those of an interrupted call with the same key are kept for the step to go on."""
    partial = {name: artifact.partial_path(path) for name, path in call.outputs.items()}
    for path in partial.values():
        mark = _mark(path)
        if fresh or _read_mark(mark) != key:
            for left in (path, _aside(path)):
                shutil.rmtree(left, ignore_errors=True)
            artifact.write_json(mark, key)
        path.mkdir(parents=True, exist_ok=True)
        if _aside(path).is_dir():
            artifact.move(_aside(path), path / artifact.RESUME)
        for unfinished in (path / artifact.MANIFEST, *path.rglob(".*.partial")):
            unfinished.unlink(missing_ok=True)
    return partial


def _read_mark(mark: Path) -> Any:
    """The key an unfinished folder was begun under; None if there is none or a kill cut it short."""
    try:
        return json.loads(mark.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _mark(partial: Path) -> Path:
    return partial.with_name(partial.name + ".key")


def _aside(partial: Path) -> Path:
    """Where what a step keeps to go on from waits until all of its outputs are in place."""
    return partial.with_name(partial.name + artifact.RESUME)


def _finish(call: Call, key: Key, report: Report, partial: dict[str, Path]) -> dict[str, str]:
    """Manifests, checks, and the outputs in place; returns the fingerprint of each."""
    fingerprints = {}
    for name, path in partial.items():
        if (path / artifact.RESUME).is_dir():
            artifact.move(path / artifact.RESUME, _aside(path))
        manifest = artifact.write_manifest(path, artifact=name, outcome=report.outcome, facts=report.facts, **key)
        fingerprints[name] = manifest["fingerprint"]
    _check(partial, role="out")
    for name, path in partial.items():
        artifact.publish(path, call.outputs[name])
    for path in partial.values():
        shutil.rmtree(_aside(path), ignore_errors=True)
        _mark(path).unlink(missing_ok=True)
    return fingerprints


def _check(paths: dict[str, Path], *, role: Literal["in", "out"]) -> None:
    from rlpipe import checks

    for name, path in paths.items():
        if name in CHECKED:
            found = artifact.outcome(path) if path.is_dir() else None
            checks.check(CHECKED[name], path, outcome=found, role=role)


def _record(key: Key, report: Report, fingerprints: dict[str, str], *, seconds: float, worked: float) -> dict[str, Any]:
    return {
        **key,
        "outcome": report.outcome,
        "numbers": finite(report.numbers),
        "reasons": report.reasons,
        "outputs": fingerprints,
        "finished_at": time.time(),
        "seconds": seconds,
        "seconds_overhead": seconds - worked,
        "peak_memory_mb": peak_memory_mb(),
        "environment": records.environment(),
    }


def finite(numbers: Mapping[str, float | int | None]) -> dict[str, float | int | None]:
    """JSON has no word for a number that is not finite: it becomes None, flagged by `<name>_nonfinite`."""
    lost = [name for name, value in numbers.items() if value is not None and not math.isfinite(value)]
    return {**numbers, **dict.fromkeys(lost), **{f"{name}_nonfinite": 1 for name in lost}}


def _line(record: dict[str, Any]) -> str:
    """One `name=value` line for people and for grep."""
    shown = {
        "step": record["step"],
        "round": record["round"],
        **record.get("scalars", {}),
        "outcome": record["outcome"],
        "seconds": record["seconds"],
        **record["numbers"],
        **record["reasons"],
    }
    return " ".join(f"{name}={_short(value)}" for name, value in shown.items() if value is not None)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def reset_peak_memory() -> None:
    """Start a new peak-memory measurement, where the kernel allows it."""
    _try_write(Path("/proc/self/clear_refs"), "5")


def _try_write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="ascii")
    except OSError:
        log.debug("no peak memory per step here: %s cannot be written", path)


def peak_memory_mb() -> float:
    """Peak resident memory in MB since the last reset."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if Path("/proc/self/status").is_file() else []:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
