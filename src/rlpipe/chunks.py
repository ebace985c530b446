"""Finished parts of an unfinished dataset: what a killed step had done is read, not done again."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from rlpipe import artifact, dataset
from rlpipe.columns import from_batch, to_batch
from rlpipe.errors import ArtifactError
from rlpipe.trajectory import Trajectory

log = logging.getLogger("rlpipe")

CHUNKS = "chunks"

T = TypeVar("T")


def path_of(folder: Path, k: int) -> Path:
    """Where chunk `k` of an unfinished dataset lies."""
    return folder / CHUNKS / f"chunk-{k:05d}.parquet"


def write(path: Path, rows: Iterable[Trajectory]) -> None:
    """Write trajectories to a file that is either whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = artifact.partial_path(path)
    pq.write_table(pa.Table.from_batches([to_batch(list(rows))]), partial, compression="zstd")
    artifact.sync(partial)
    os.replace(partial, path)


def is_whole(path: Path) -> bool:
    """Whether the chunk is there; one that the disk has damaged is named, removed, and made again."""
    if not path.is_file():
        return False
    try:
        for _ in dataset.read_shard(path):
            pass
    except (ArtifactError, OSError) as error:
        log.warning("chunk=%s state=damaged do=made_again reason=%s", path.name, error)
        path.unlink()
        return False
    return True


def read(path: Path) -> list[Trajectory]:
    """The trajectories of a chunk in their order."""
    return [row for batch in dataset.read_shard(path) for row in from_batch(batch)]


def resumed(
    folder: Path, parts: Iterable[T], make: Callable[[T], Sequence[Trajectory]], worth_keeping: Callable[[Trajectory], bool] = lambda _: True
) -> Iterator[Sequence[Trajectory]]:
    """The rows of each part in turn: those an interrupted call left in `folder`, or else made now and left there.

    A part with a row that is not worth keeping is made again next time: what failed may work then.
    """
    for k, part in enumerate(parts):
        path = path_of(folder, k)
        if is_whole(path):
            yield read(path)
            continue
        rows = make(part)
        if all(map(worth_keeping, rows)):
            write(path, rows)
        yield rows


def remove(folder: Path) -> None:
    """Remove the chunks of a dataset that is finished."""
    shutil.rmtree(folder / CHUNKS, ignore_errors=True)
