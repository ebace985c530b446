"""Gathers the shards of a rollout through `execute`, so that what follows finds what one process would have left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpipe import records
from rlpipe.execute import Call, Track, execute
from rlpipe.rollout import gather as room
from rlpipe.step import Signature
from rlpipe.steps import Step

OUTPUTS = ("trajectories", "progress")
MEASURED = ("seconds", "seconds_overhead", "peak_memory_mb", "children_ended")


def gather(
    shards: Sequence[tuple[Path, Path, Mapping[str, Any]]], trajectories: Path, progress: Path, workdir: Path, round_index: int, *, track: Track | None = None
) -> dict[str, Any]:
    """Join a round's shards, in any order, each as (trajectories, progress, run record); returns the rollout's run record.

    Manifests, numbers, reasons, facts and outcome are those of the same rollout in one process. Its seconds are the slowest
    shard's and those of joining; `shards` keeps what each shard took.

    Raises:
        ArtifactError: see `rlpipe.rollout.gather.ordered`; or a file of a shard is damaged.
        CheckError: the joined trajectories break a rule.
    """
    found = room.ordered([shard[0] for shard in shards], [shard[1] for shard in shards], round_index)
    step = Step("rollout", room.run, Signature(list, (), OUTPUTS, {"round_index": int}), "join the shards of a rollout")
    call = Call(step, found, dict(zip(OUTPUTS, (trajectories, progress), strict=True)), round_index, workdir)
    record = execute(call, key=room.key(found), track=track)
    if "shards" not in record:
        record |= _with_shards(record, [shard[2] for shard in shards])
        records.write(workdir, record)
    return record


def _with_shards(record: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the work took over all pods: they ran beside each other, then were joined."""
    slowest = max(shards, key=lambda shard: float(shard["seconds"]))
    return {
        "seconds": record["seconds"] + slowest["seconds"],
        "seconds_overhead": record["seconds"] + slowest["seconds_overhead"],
        "peak_memory_mb": max(record["peak_memory_mb"], *(shard["peak_memory_mb"] for shard in shards)),
        "shards": [{name: shard[name] for name in MEASURED} for shard in shards],
    }
