"""Trajectories as Arrow columns and back: nested columns are built from flat arrays, never from Python dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby, pairwise, repeat
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from rlpipe.trajectory import REWARD, SCHEMA, SEGMENT_REWARD, SPAN, RewardValue, Span, Trajectory


def to_batch(trajectories: Sequence[Trajectory]) -> pa.RecordBatch:
    """Columns of `SCHEMA` for these trajectories; views that were only passed on are copied as columns, never decoded."""
    try:
        return _taken([(row._columns, row._place) for row in trajectories])
    except AttributeError:  # a trajectory that its constructor made has no columns behind it
        columns = [_ENCODERS.get(name, _flat)(name, trajectories) for name in SCHEMA.names]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _taken(places: Sequence[tuple[Any, int]]) -> pa.RecordBatch:
    pieces = [source.take([place for _, place in run]) for source, run in groupby(places, key=itemgetter(0))]
    return pa.concat_batches(pieces) if pieces else pa.RecordBatch.from_pylist([], SCHEMA)


def from_batch(batch: pa.RecordBatch) -> Iterator[Trajectory]:
    """Views over the rows of a batch with `SCHEMA`; token arrays are slices of the batch's memory."""
    columns = BatchColumns(batch)
    tokens, logprobs = _slices(batch.column("token_ids")), _slices(batch.column("logprobs"))
    return map(Trajectory.view, repeat(columns), range(batch.num_rows), tokens, logprobs)


class BatchColumns:
    """The columns of a batch; a column is decoded once, when the first of its rows is asked for it."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch
        self._decoded: dict[str, Any] = {}

    def value(self, name: str, place: int) -> Any:
        """Attribute `name` of the trajectory at row `place`."""
        if name not in self._decoded:
            self._decoded[name] = _DECODERS.get(name, pa.Array.to_pylist)(self._batch.column(name))
        return self._decoded[name][place]

    def take(self, places: Sequence[int]) -> pa.RecordBatch:
        """The rows at these places, in their order."""
        return self._batch.take(pa.array(places, pa.int32()))


def _flat(name: str, rows: Sequence[Trajectory]) -> pa.Array:
    return pa.array(list(map(attrgetter(name), rows)), SCHEMA.field(name).type)


def _ragged(name: str, rows: Sequence[Trajectory]) -> pa.ListArray:
    kind = SCHEMA.field(name).type
    arrays = list(map(attrgetter(name), rows))
    values = np.concatenate(arrays, dtype=kind.value_type.to_pandas_dtype(), casting="same_kind") if arrays else np.empty(0)
    return pa.ListArray.from_arrays(_offsets(arrays), pa.array(values, kind.value_type), type=kind)


def _spans(name: str, rows: Sequence[Trajectory]) -> pa.ListArray:
    return _structs([row.spans for row in rows], SPAN)


def _rewards(name: str, rows: Sequence[Trajectory]) -> pa.ListArray:
    return _structs([row.rewards for row in rows], REWARD)


def _structs(lists: Sequence[Sequence[Any]], kind: pa.StructType) -> pa.ListArray:
    records = list(chain.from_iterable(lists))
    fields = [pa.array(list(map(attrgetter(field.name), records)), field.type) for field in kind]
    return pa.ListArray.from_arrays(_offsets(lists), pa.StructArray.from_arrays(fields, fields=list(kind)))


def _segment_rewards(name: str, rows: Sequence[Trajectory]) -> pa.ListArray:
    lists = [row.segment_rewards for row in rows]
    return pa.ListArray.from_arrays(_offsets(lists), pa.array(list(chain.from_iterable(lists)), SEGMENT_REWARD))


def _arrays(name: str, rows: Sequence[Trajectory]) -> pa.MapArray:
    values = [[(key, _packed(array)) for key, array in sorted(row.arrays.items())] or None for row in rows]
    return pa.array(values, SCHEMA.field(name).type)


def _packed(array: np.ndarray) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}


def _offsets(lists: Sequence[Any]) -> pa.Array:
    offsets = np.zeros(len(lists) + 1, dtype=np.int32)
    np.cumsum(np.fromiter(map(len, lists), dtype=np.int32, count=len(lists)), out=offsets[1:])
    return pa.array(offsets)


_ENCODERS: dict[str, Callable[[str, Sequence[Trajectory]], pa.Array]] = {
    "token_ids": _ragged,
    "logprobs": _ragged,
    "spans": _spans,
    "rewards": _rewards,
    "segment_rewards": _segment_rewards,
    "arrays": _arrays,
}


def _slices(column: pa.ListArray) -> list[np.ndarray]:
    values = column.flatten().to_numpy(zero_copy_only=True)
    bounds = _bounds(column)
    return [values[start:end] for start, end in pairwise(bounds)]


def _bounds(column: pa.ListArray) -> list[int]:
    offsets = column.offsets.to_numpy()
    return (offsets - offsets[0]).tolist()


def _records(column: pa.ListArray, record: Callable[..., Any]) -> list[tuple[Any, ...]]:
    """Tuples of records; equal ones are one object, since the attempts of a group share their prompt's span."""
    made: dict[tuple[Any, ...], Any] = {}
    flat = []
    for values in zip(*(field.to_pylist() for field in column.flatten().flatten()), strict=True):
        if values not in made:
            made[values] = record(*values)
        flat.append(made[values])
    bounds = _bounds(column)
    return [tuple(flat[start:end]) for start, end in pairwise(bounds)]


def _decoded_segment_rewards(column: pa.ListArray) -> list[tuple[dict[str, Any], ...]]:
    return [tuple(rewards) for rewards in column.to_pylist()]


class _StoredArrays:
    """Arrays of the rows of a map column; decoded a row at a time because they can be the largest thing in a shard."""

    def __init__(self, column: pa.MapArray) -> None:
        self._column = column

    def __getitem__(self, place: int) -> dict[str, np.ndarray]:
        entries = self._column[place]
        if not entries.is_valid:
            return {}
        packed = entries.values
        return {key: _unpacked(packed[i]["value"]) for i, key in enumerate(packed.field("key").to_pylist())}


def _unpacked(packed: pa.StructScalar) -> np.ndarray:
    values = np.frombuffer(packed["data"].as_buffer(), dtype=np.dtype(packed["dtype"].as_py()))
    return values.reshape(packed["shape"].as_py())


_DECODERS: dict[str, Callable[[pa.Array], Any]] = {
    "spans": lambda column: _records(column, Span),
    "rewards": lambda column: _records(column, RewardValue),
    "segment_rewards": _decoded_segment_rewards,
    "arrays": _StoredArrays,
}
