"""What a page shows of a trajectory dataset: flat facts of all rows, and a few rows in full. n rows.

One pass gathers some tens of bytes a row; a second reads only the shards that hold the rows chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlpipe import dataset
from rlpipe.columns import from_batch
from rlpipe.trajectory import SCHEMA, STATUSES, Trajectory

DATASETS = ("scored", "kept", "trajectories")
NUM_SHOWN = 10
READ = [name for name in SCHEMA.names if name != "arrays"]


@dataclass(frozen=True)
class Facts:
    """Of every row, `[n]` each: sampled tokens, total reward (NaN: none), number of its group, and place of its status in `STATUSES`."""

    lengths: np.ndarray
    rewards: np.ndarray
    groups: np.ndarray
    statuses: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def is_scored(self) -> bool:
        """Whether any row has a reward."""
        return bool(np.isfinite(self.rewards).any())


def find(inputs: Mapping[str, Path], outputs: Mapping[str, Path]) -> tuple[str, Path] | None:
    """The dataset to show and its name: one that the step wrote, else one it read; None if it has none."""
    return next(((name, paths[name]) for paths in (outputs, inputs) for name in DATASETS if name in paths), None)


def facts(path: Path) -> Facts:
    """The facts of a finished dataset.

    Raises:
        ArtifactError: it is unfinished or damaged.
    """
    codes: dict[str, int] = {}
    parts = [_facts(batch, codes) for batch in dataset.read_batches(path, ["group_id", "status", "reward", "spans"])]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [np.empty(0)] * 4
    return Facts(*columns)


def _facts(batch: pa.RecordBatch, codes: dict[str, int]) -> tuple[np.ndarray, ...]:
    groups = np.array([codes.setdefault(name, len(codes)) for name in batch.column("group_id").to_pylist()], dtype=np.int64)
    statuses = pc.fill_null(pc.index_in(batch.column("status"), value_set=pa.array(STATUSES)), -1).to_numpy()
    rewards = pc.cast(pc.fill_null(batch.column("reward"), float("nan")), pa.float64()).to_numpy()
    return _sampled(batch.column("spans")), rewards, groups, statuses


def _sampled(spans: pa.ListArray) -> np.ndarray:
    """Tokens the policy sampled, `[n]` int64."""
    flat, row = spans.flatten(), pc.list_parent_indices(spans).to_numpy()
    counts = pc.subtract(flat.field("end"), flat.field("start")).to_numpy()
    ours = pc.equal(flat.field("source"), "policy").to_numpy(zero_copy_only=False)
    return np.bincount(row, weights=counts * ours, minlength=len(spans)).astype(np.int64)


def choose(found: Facts, num: int = NUM_SHOWN) -> list[int]:
    """Rows to show, in rising order of reward (of length where nothing is scored): one of each status, the rest spread evenly."""
    order = np.lexsort((np.arange(len(found)), found.lengths, found.rewards) if found.is_scored else (np.arange(len(found)), found.lengths))
    ranks = {int(members[len(members) // 2]) for status in np.unique(found.statuses) if len(members := np.flatnonzero(found.statuses[order] == status))}
    others = np.setdiff1d(np.arange(len(order)), list(ranks))
    wanted = min(num - len(ranks), len(others))
    spread = others[np.linspace(0, len(others) - 1, wanted).round().astype(int)] if wanted > 0 else []
    return [int(order[rank]) for rank in sorted({*ranks, *(int(rank) for rank in spread)})]


def rows(path: Path, places: list[int]) -> list[Trajectory]:
    """The trajectories at these places of a dataset that was read before, in the order given."""
    found = dict(_rows(path, sorted(places)))
    return [found[place] for place in places]


def _rows(path: Path, places: list[int]) -> Iterator[tuple[int, Trajectory]]:
    first = 0
    for shard, num_rows in dataset.shard_rows(path).items():
        if any(first <= place < first + num_rows for place in places):
            yield from _of_shard(path / shard, places, first)
        first += num_rows


def _of_shard(shard: Path, places: list[int], first: int) -> Iterator[tuple[int, Trajectory]]:
    for batch in dataset.read_shard(shard, READ):
        here = [place for place in places if first <= place < first + batch.num_rows]
        yield from zip(here, from_batch(batch.take(pa.array([place - first for place in here], pa.int64()))), strict=True)
        first += batch.num_rows


def mean_logprob(row: Trajectory) -> float | None:
    """Mean sampling log-prob of the tokens the policy sampled; None of none."""
    sampled = np.concatenate([row.logprobs[span.start : span.end] for span in row.spans if span.source == "policy"] or [np.empty(0)])
    known = sampled[np.isfinite(sampled)].astype(np.float64)
    return float(known.mean()) if len(known) else None
