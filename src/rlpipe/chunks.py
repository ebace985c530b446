"""Finished parts of an unfinished output: what a killed step had done is read, not done again. They lie in its folder `artifact.RESUME`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from rlpipe import artifact, dataset
from rlpipe.columns import from_batch, to_batch
from rlpipe.trajectory import Trajectory

log = logging.getLogger("rlpipe")

T = TypeVar("T")


def path_of(folder: Path, k: int, kind: str = "") -> Path:
    """Where chunk `k` of an unfinished output lies; `kind` tells apart chunks of several kinds."""
    return folder / artifact.RESUME / kind / f"chunk-{k:05d}.parquet"


def write(path: Path, rows: Iterable[Trajectory]) -> None:
    """Write trajectories to a file that is either whole or absent, its sha256 beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = artifact.partial_path(path)
    pq.write_table(pa.Table.from_batches([to_batch(list(rows))]), partial, compression="zstd")
    artifact.sync(partial)
    artifact.write_text(_digest(path), artifact.sha256(partial))
    os.replace(partial, path)


def is_whole(path: Path) -> bool:
    """Whether the chunk is there; one that the disk has damaged is named, removed, and made again."""
    if not path.is_file():
        return False
    digest = _digest(path)
    if not digest.is_file() or digest.read_text(encoding="utf-8") != artifact.sha256(path):
        log.warning("chunk=%s state=damaged do=made_again", path.name)
        path.unlink()
        return False
    return True


def _digest(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def read(path: Path) -> list[Trajectory]:
    """The trajectories of a chunk in their order."""
    return [row for batch in dataset.read_shard(path) for row in from_batch(batch)]


def resumed(
    folder: Path,
    parts: Iterable[T],
    make: Callable[[T], Sequence[Trajectory]],
    worth_keeping: Callable[[Trajectory], bool] = lambda _: True,
    kind: str = "",
) -> Iterator[Sequence[Trajectory]]:
    """The rows of each part in turn: those an interrupted call left in `folder`, or else made now and left there.

    A part with a row that is not worth keeping is made again next time: what failed may work then.
    """
    for k, part in enumerate(parts):
        path = path_of(folder, k, kind)
        if is_whole(path):
            yield read(path)
            continue
        rows = make(part)
        if all(map(worth_keeping, rows)):
            write(path, rows)
        yield rows
