"""Sequences laid out for one forward: as a prefix tree, or one padded row each.

A token's hidden state depends on the tokens before it and on nothing else, so sequences that begin alike share the
positions of what they have in common: siblings their prompt, groups their examples. The tree's positions lie one after
the other in depth-first order, with no padding; log-probs and gradients are those of one padded row per sequence.
Only arrays here, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlpipe.errors import CheckError

Packing = Literal["prefix", "none"]
"""Whether sequences share positions or every one gets its own row."""

TILE_SIZES = (32, 64, 128)
TILE_COST = 2048
"""What a tile costs beside its query-key pairs, in pairs; measured for 9 heads of 64 on a CPU."""


@dataclass(frozen=True, slots=True)
class ScoredSequence:
    """Token ids and which of them need a log-prob.

    Attributes:
        token_ids: `[T]` int.
        scored: `[T]` bool; the first token cannot be scored, nothing predicts it.
        temperatures: `[T]` float, read where scored; 0 (greedy) counts as 1.
    """

    token_ids: np.ndarray
    scored: np.ndarray
    temperatures: np.ndarray

    @property
    def inputs(self) -> np.ndarray:
        """What has to be computed: everything before the last scored token."""
        wanted = np.flatnonzero(self.scored)
        return self.token_ids[: wanted[-1]] if len(wanted) else self.token_ids[:0]


@dataclass(frozen=True, slots=True)
class Row:
    """Sequences that stay together, such as siblings.

    Attributes:
        members: index of each sequence among those that were packed.
        sequences: in the order of their token ids.
        num_tokens: positions computed for them.
        shared: whether positions are shared, within the row and with others.
    """

    members: tuple[int, ...]
    sequences: tuple[ScoredSequence, ...]
    num_tokens: int
    shared: bool


@dataclass(frozen=True, slots=True)
class Tiles:
    """Attention of R stretches of Q positions each, of one shape so that they run as one batch.

    Attributes:
        queries: `[R, Q]` int64, positions.
        keys: `[R, K]` int64, positions that any of the stretch's queries sees, filled up with 0.
        visible: `[R, Q, K]` bool.
    """

    queries: np.ndarray
    keys: np.ndarray
    visible: np.ndarray


@dataclass(frozen=True, slots=True)
class Batch:
    """What `evaluate` takes. L = positions of a row, N = positions whose logits are needed, K = scored tokens.

    Attributes:
        input_ids: `[B, L]` int64; B is 1 for a tree.
        position_ids: `[B, L]` int64, the place of each token in its sequence.
        tiles: who attends to whom; empty where every row is plainly causal.
        predicting: `[N]` int64 into the flattened `B * L`.
        temperatures: `[N]` float64.
        readout: `[K]` int64 into N.
        targets: `[K]` int64, the token ids to be scored.
        members: place of each sequence among those of all rows; the K axis runs over them in this order.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    tiles: tuple[Tiles, ...]
    predicting: np.ndarray
    temperatures: np.ndarray
    readout: np.ndarray
    targets: np.ndarray
    members: tuple[int, ...]


def pack(sequences: Sequence[ScoredSequence], max_row_tokens: int, shared: bool = True) -> list[Row]:
    """Rows that hold each sequence once; a sequence with nothing to score is in no row.

    A row takes sequences in the order of their token ids, while what they have in common makes it no longer than
    `max_row_tokens`; a single longer sequence is a row of its own. With `shared` false every sequence is.

    Raises:
        CheckError: a sequence's first token is to be scored.
    """
    scored = [index for index, sequence in enumerate(sequences) if sequence.scored.any()]
    for index in scored:
        if sequences[index].scored[0]:
            raise CheckError("the first token of a trajectory cannot be trained: nothing predicts it", got=f"trajectory {index} of its group")
    rows: list[Row] = []
    for index in in_order(sequences, scored) if shared else scored:
        own = Row((index,), (sequences[index],), len(sequences[index].inputs), shared)
        if shared and rows and num_common(rows[-1].sequences[-1].inputs, own.sequences[0].inputs) > 0:
            total = rows[-1].num_tokens + num_added(rows[-1], own)
            if total <= max_row_tokens:
                before = rows.pop()
                own = Row((*before.members, index), (*before.sequences, sequences[index]), total, shared)
        rows.append(own)
    return rows


def collate(rows: Sequence[Row]) -> Batch:
    """One tree of all rows, in which what they have in common is one as well; rows that do not share are padded on the
    right to one length. Lengths decide what is padding, never a token id."""
    sequences = [sequence for row in rows for sequence in row.sequences]
    places = range(len(sequences))
    return _tree(sequences, in_order(sequences, places)) if rows[0].shared else _padded(sequences, places)


def num_added(row: Row, following: Row, num_rows: int = 1) -> int:
    """Positions that `following` adds to `num_rows` rows of which `row` is the last: by order where positions are shared
    (out of order it may be less), by length where rows are padded to the longest."""
    if row.shared:
        return following.num_tokens - num_common(row.sequences[-1].inputs, following.sequences[0].inputs)
    return (num_rows + 1) * following.num_tokens - num_rows * row.num_tokens


def in_order(sequences: Sequence[ScoredSequence], indices: Sequence[int]) -> list[int]:
    """The indices by their sequences' token ids, so that each shares the most with the one before."""
    return sorted(indices, key=lambda index: (sequences[index].inputs.astype(">u4").tobytes(), index))


def num_common(one: np.ndarray, other: np.ndarray) -> int:
    """How many leading tokens agree."""
    length = min(len(one), len(other))
    differing = np.flatnonzero(one[:length] != other[:length])
    return int(differing[0]) if len(differing) else length


def _tree(sequences: Sequence[ScoredSequence], members: Sequence[int]) -> Batch:
    """A node a position; sequences come in order, so what each adds follows depth-first what is there."""
    pieces, ends, paths = [], np.zeros(sum(len(sequences[i].inputs) for i in members), dtype=np.int64), []
    path, inputs, size = np.empty(0, np.int64), np.empty(0, np.int64), 0
    for index in members:
        before, inputs = inputs, np.asarray(sequences[index].inputs, dtype=np.int64)
        common = num_common(before, inputs)
        ends[path[common:]] = size
        added = np.arange(size, size + len(inputs) - common)
        path, size = np.concatenate([path[:common], added]), size + len(added)
        pieces.append((inputs[common:], np.arange(common, len(inputs))))
        paths.append(path)
    ends[path] = size
    depths = np.concatenate([depth for _, depth in pieces])
    tiles = _tiles(depths, ends[:size], paths) if (np.diff(depths) != 1).any() else ()
    return _batch(np.concatenate([ids for ids, _ in pieces])[None], depths[None], tiles, sequences, members, paths)


def _padded(sequences: Sequence[ScoredSequence], members: Sequence[int]) -> Batch:
    lengths = [len(sequences[i].inputs) for i in members]
    input_ids, position_ids = np.zeros((2, len(members), max(lengths)), dtype=np.int64)
    for row, index in enumerate(members):
        input_ids[row, : lengths[row]] = sequences[index].inputs
        position_ids[row] = np.arange(max(lengths))
    paths = [np.arange(length) + row * max(lengths) for row, length in enumerate(lengths)]
    return _batch(input_ids, position_ids, (), sequences, members, paths)


def _batch(
    input_ids: np.ndarray,
    position_ids: np.ndarray,
    tiles: tuple[Tiles, ...],
    sequences: Sequence[ScoredSequence],
    members: Sequence[int],
    paths: Sequence[np.ndarray],
) -> Batch:
    """Where targets are read: one row of logits for each position and temperature that predicts any."""
    wanted = [np.flatnonzero(sequences[i].scored) for i in members]
    nodes = np.concatenate([path[where - 1] for path, where in zip(paths, wanted, strict=True)])
    warmth = np.concatenate([sequences[i].temperatures[where] for i, where in zip(members, wanted, strict=True)]).astype(np.float64)
    kinds, kind = np.unique(np.where(warmth == 0, 1.0, warmth), return_inverse=True)
    rows, readout = np.unique(nodes * len(kinds) + kind, return_inverse=True)
    targets = np.concatenate([sequences[i].token_ids[where] for i, where in zip(members, wanted, strict=True)]).astype(np.int64)
    return Batch(input_ids, position_ids, tiles, rows // len(kinds), kinds[rows % len(kinds)], readout, targets, tuple(members))


def _tiles(depths: np.ndarray, ends: np.ndarray, paths: Sequence[np.ndarray]) -> tuple[Tiles, ...]:
    """The tiling with the fewest query-key pairs, tiles' own cost included; decided by lengths alone."""
    by_size = [_shapes(depths, size) for size in TILE_SIZES]
    shapes = min(by_size, key=lambda shapes: sum(queries * keys + TILE_COST for queries, keys in shapes.values()))
    before = {start: _ancestors(start, depths, paths) for start in shapes}
    starts_of: dict[tuple[int, int], list[int]] = {}
    for start, shape in shapes.items():
        starts_of.setdefault(shape, []).append(start)
    return tuple(_of_shape(shape, starts, [before[start] for start in starts], ends) for shape, starts in starts_of.items())


def _shapes(depths: np.ndarray, size: int) -> dict[int, tuple[int, int]]:
    """Queries and keys of each tile by its first position; keys are a multiple of 32, so that many tiles run as one batch."""
    starts = range(0, len(depths), size)
    return {start: (count := min(size, len(depths) - start), -(-(int(depths[start]) + count) // 32) * 32) for start in starts}


def _ancestors(position: int, depths: np.ndarray, paths: Sequence[np.ndarray]) -> np.ndarray:
    """What a tile that begins here sees beside itself: positions lie depth-first, so an earlier ancestor of a later
    position is an ancestor of the first one too."""
    through = next(path for path in paths if len(path) > depths[position] and path[depths[position]] == position)
    return through[: depths[position]]


def _of_shape(shape: tuple[int, int], starts: Sequence[int], before: Sequence[np.ndarray], ends: np.ndarray) -> Tiles:
    num_queries, num_keys = shape
    queries = np.asarray(starts)[:, None] + np.arange(num_queries)
    keys = np.full((len(starts), num_keys), len(ends), dtype=np.int64)
    for row, ancestors in enumerate(before):
        keys[row, : len(ancestors) + num_queries] = np.concatenate([ancestors, queries[row]])
    until = np.append(ends, 0)[keys]
    visible = (keys[:, None, :] <= queries[:, :, None]) & (queries[:, :, None] < until[:, None, :])
    return Tiles(queries, np.where(keys == len(ends), 0, keys), visible)
