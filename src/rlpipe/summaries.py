"""Flat facts of a dataset's rows (lengths, counts, ids; never token lists): what the checks look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlpipe import dataset, tasks

ROWS_PER_BLOCK = 1 << 18
LOGPROB_SLACK = 1e-5
"""How far above 0 a log-prob may lie: float32 log-softmax of a certain token rounds either way."""

_IDS = ["trajectory_id", "group_id", "task_id", "index", "status"]
_TRAJECTORY_COLUMNS = [*_IDS, "token_ids", "logprobs", "spans"]


def blocks(kind: str, path: Path) -> Iterator[pa.Table]:
    """Summaries of a dataset's rows, at most `ROWS_PER_BLOCK` at a time.

    Raises:
        ArtifactError: the dataset is unfinished or damaged.
        CheckError: a line of a task file is not JSON.
    """
    if kind == "tasks":
        yield _of_tasks(path)
        return
    summary: Callable[[pa.RecordBatch], pa.RecordBatch] = of_scored if kind == "scored" else of_trajectories
    columns = [*_TRAJECTORY_COLUMNS, "reward", "rewards"] if kind == "scored" else _TRAJECTORY_COLUMNS
    waiting: list[pa.RecordBatch] = []
    for batch in dataset.read_batches(path, columns):
        waiting.append(summary(batch))
        if sum(part.num_rows for part in waiting) >= ROWS_PER_BLOCK:
            yield pa.Table.from_batches(waiting)
            waiting = []
    if waiting:
        yield pa.Table.from_batches(waiting)


def of_trajectories(batch: pa.RecordBatch) -> pa.RecordBatch:
    """One row of facts per trajectory; null where a list is null.

    `token_ids.length`; `logprobs.missing`: tokens without a log-prob entry (negative: entries too many); `spans.gaps`: breaks
    in the cover of `[0, T)`; `logprobs.unsound`: entries that are not finite and at most 0 on tokens the policy sampled, or
    not NaN elsewhere; `spans.unsampled`: 1 for a completed trajectory in which the policy sampled nothing.
    """
    lengths = pc.list_value_length(batch.column("token_ids"))
    spans = _Spans(batch.column("spans"), pc.fill_null(lengths, 0).to_numpy())
    unsampled = (spans.num_sampled == 0) & (batch.column("status").to_numpy(zero_copy_only=False) == "completed")
    facts = {name: batch.column(name) for name in _IDS} | {
        "token_ids.length": lengths,
        "logprobs.missing": pc.subtract(lengths, pc.list_value_length(batch.column("logprobs"))),
        "logprobs.unsound": pa.array(_unsound(batch.column("logprobs"), spans)),
        "spans.gaps": pa.array(spans.gaps),
        "spans.unsampled": pa.array(unsampled.astype(np.int64)),
    }
    return pa.RecordBatch.from_pydict(facts)


def of_scored(batch: pa.RecordBatch) -> pa.RecordBatch:
    """`of_trajectories`, and `reward.scored`: whether there is a reward; `reward.unexplained`: 1 where it is not finite, or null without a reason."""
    reward = batch.column("reward")
    scored = pc.is_valid(reward)
    explained = pa.array(_rows_with_reason(batch.column("rewards")))
    good = pc.if_else(scored, pc.fill_null(pc.is_finite(reward), False), explained)
    facts = of_trajectories(batch)
    facts = facts.append_column("reward.scored", scored)
    return facts.append_column("reward.unexplained", pc.cast(pc.invert(good), pa.int64()))


class _Spans:
    """The spans of a batch as flat arrays; `[n]` rows, `[S]` spans."""

    def __init__(self, column: pa.ListArray, lengths: np.ndarray) -> None:
        offsets, flat = _flattened(column)
        self.starts = _ints(flat.field("start"))
        self.ends = _ints(flat.field("end"))
        self.sampled = pc.fill_null(pc.equal(flat.field("source"), "policy"), False).to_numpy(zero_copy_only=False)
        self.row = np.repeat(np.arange(len(column)), np.diff(offsets))
        self.gaps = self._gaps(offsets, lengths)
        self.num_sampled = np.bincount(self.row, weights=(self.ends - self.starts) * self.sampled, minlength=len(column))

    def _gaps(self, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Breaks per row: a span that does not begin where the one before ended, ends before it begins, or leaves tokens over at the end."""
        expected = np.zeros_like(self.starts)
        expected[1:] = self.ends[:-1]
        filled = offsets[1:] > offsets[:-1]
        expected[offsets[:-1][filled]] = 0
        broken = (self.starts != expected) | (self.ends < self.starts)
        last = np.zeros(len(lengths), dtype=np.int64)
        last[filled] = self.ends[offsets[1:][filled] - 1]
        return np.bincount(self.row, weights=broken, minlength=len(lengths)).astype(np.int64) + (last != lengths)


def _unsound(column: pa.ListArray, spans: _Spans) -> np.ndarray:
    """Log-probs per row that should not be what they are."""
    offsets, flat = _flattened(column)
    values = flat.to_numpy(zero_copy_only=False)
    limits = np.diff(offsets)[spans.row]
    starts, ends = (np.clip(edge, 0, limits) + offsets[:-1][spans.row] for edge in (spans.starts, spans.ends))
    edges = np.zeros(len(values) + 1, dtype=np.int32)
    np.add.at(edges, starts[spans.sampled], 1)
    np.add.at(edges, ends[spans.sampled], -1)
    sampled = np.cumsum(edges[:-1]) > 0
    good = np.where(sampled, np.isfinite(values) & (values <= LOGPROB_SLACK), np.isnan(values))
    bad_before = np.concatenate([[0], np.cumsum(~good)])
    return bad_before[offsets[1:]] - bad_before[offsets[:-1]]


def _rows_with_reason(column: pa.ListArray) -> np.ndarray:
    """Whether a row has a reward that says why it could not be scored."""
    offsets, flat = _flattened(column)
    says = pc.and_(pc.is_null(flat.field("value")), pc.fill_null(pc.not_equal(flat.field("status"), ""), False))
    row = np.repeat(np.arange(len(column)), np.diff(offsets))
    return np.bincount(row, weights=says.to_numpy(zero_copy_only=False), minlength=len(column)) > 0


def _flattened(column: pa.ListArray) -> tuple[np.ndarray, Any]:
    """Where each row's entries begin, `[n + 1]` int64, and all entries; a null list has none."""
    counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]), column.flatten()


def _ints(column: pa.Array) -> np.ndarray:
    """int64; -1 where null."""
    return pc.fill_null(column, -1).to_numpy().astype(np.int64)


def _of_tasks(path: Path) -> pa.Table:
    """One row of facts per task; null where a column is missing or of another type."""
    rows = [row if isinstance(row, dict) else {} for _, row in tasks.rows(path)]
    return pa.table(
        {
            "task_id": pa.array([_text(row.get("task_id")) for row in rows], pa.string()),
            "prompt.length": pa.array([_length(row.get("prompt")) for row in rows], pa.int64()),
            "reference.length": pa.array([_length(row.get("reference")) for row in rows], pa.int64()),
        }
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _length(value: Any) -> int | None:
    """Characters of a text that are not white space at its ends, or chat messages."""
    if isinstance(value, str):
        return len(value.strip())
    return len(value) if isinstance(value, list) else None
