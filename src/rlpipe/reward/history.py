"""What is known about each task over the rounds: `history.parquet`, sorted by task id, for selectors to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe.errors import ArtifactError

if TYPE_CHECKING:
    from rlpipe.trajectory import Group

FILE = "history.parquet"


@dataclass(frozen=True, slots=True)
class TaskHistory:
    """One task's past.

    Attributes:
        visits: groups of it that reached the reward step.
        attempts: its trajectories that got a total.
        reward_sum: sum of those totals, before group filters.
        last_round: the latest round with a visit.
    """

    task_id: str
    visits: int = 0
    attempts: int = 0
    reward_sum: float = 0.0
    last_round: int = 0


def empty(folder: Path) -> None:
    """Write the history of no task."""
    write(folder, {})


def read(folder: Path) -> dict[str, TaskHistory]:
    """The history by task id, in its order.

    Raises:
        ArtifactError: the file is missing, damaged, or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / FILE
    try:
        table = pq.read_table(path, partitioning=None)
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise ArtifactError(f"{path} cannot be read", got=str(error).splitlines()[0], do="run the step that writes it again") from error
    if table.schema != _schema():
        raise ArtifactError(f"{path} is not a history", got=", ".join(table.column_names), accepted=", ".join(_schema().names))
    return {row["task_id"]: TaskHistory(**row) for row in table.to_pylist()}


def write(folder: Path, history: Mapping[str, TaskHistory]) -> None:
    """Write the history, sorted by task id: the same history gives the same bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    rows = [history[task_id] for task_id in sorted(history)]
    columns = {field.name: [getattr(row, field.name) for row in rows] for field in fields(TaskHistory)}
    pq.write_table(pa.table(columns, schema=_schema()), folder / FILE, compression="zstd")


def update(history: Mapping[str, TaskHistory], groups: Iterable[Group], round_index: int) -> dict[str, TaskHistory]:
    """The history with scored groups added, in their order; the argument stays as it is."""
    changed = dict(history)
    for group in groups:
        before = changed.get(group.task_id) or TaskHistory(group.task_id)
        totals = [row.reward for row in group if row.reward is not None]
        changed[group.task_id] = TaskHistory(group.task_id, before.visits + 1, before.attempts + len(totals), before.reward_sum + sum(totals), round_index)
    return changed


def _schema():  # type: ignore[no-untyped-def]
    import pyarrow as pa

    kinds = (pa.string(), pa.int64(), pa.int64(), pa.float64(), pa.int64())
    return pa.schema(list(zip((field.name for field in fields(TaskHistory)), kinds, strict=True)))
