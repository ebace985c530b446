"""Packed rows: siblings laid out as a prefix tree, so that every distinct prefix is computed once.

A token's hidden state depends on the tokens before it and on nothing else, so siblings that begin alike share the
positions of what they have in common: the prompt, and as much of the completions as agrees. Log-probs and gradients are
those of one padded row per sequence. Only arrays here, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlpipe.errors import CheckError

Packing = Literal["prefix", "none"]
"""Whether siblings share positions or every sequence gets its own row."""


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


@dataclass(frozen=True, slots=True)
class Row:
    """One packed row. L = positions computed, N = positions whose logits are needed, K = scored tokens.

    Attributes:
        members: index of each sequence in this row; the K axis runs over them in this order.
        token_ids: `[L]` int64.
        depths: `[L]` int64, position of each token in its sequence.
        attention: `[L, L]` bool, what each position sees; None where it is everything before it.
        predicting: `[N]` int64 into L.
        temperatures: `[N]` float64.
        readout: `[K]` int64 into N.
        targets: `[K]` int64, the token ids to be scored.
    """

    members: tuple[int, ...]
    token_ids: np.ndarray
    depths: np.ndarray
    attention: np.ndarray | None
    predicting: np.ndarray
    temperatures: np.ndarray
    readout: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded on the right to one length; what `Policy.evaluate` takes. B = rows, the other axes as in `Row`.

    Attributes:
        input_ids: `[B, L]` int64.
        position_ids: `[B, L]` int64.
        attention: `[B, L, L]` bool, padding sees only itself; None where every row is plainly causal.
        predicting: `[N]` int64 into the flattened `B * L`.
        temperatures: `[N]` float64.
        readout: `[K]` int64 into N.
        targets: `[K]` int64.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    attention: np.ndarray | None
    predicting: np.ndarray
    temperatures: np.ndarray
    readout: np.ndarray
    targets: np.ndarray


def pack(sequences: Sequence[ScoredSequence], max_row_tokens: int, shared: bool = True) -> list[Row]:
    """Rows that hold each sequence once; a sequence with nothing to score is in no row.

    A row takes the next sequence while it has a first token in common with what is there and stays within
    `max_row_tokens`; a single longer sequence gets a row of its own. With `shared` false every sequence does.

    Raises:
        CheckError: a sequence's first token is to be scored.
    """
    trees: list[_Tree] = []
    for index, sequence in enumerate(sequences):
        wanted = np.flatnonzero(sequence.scored)
        if not len(wanted):
            continue
        if wanted[0] == 0:
            raise CheckError("the first token of a trajectory cannot be trained: nothing predicts it", got=f"trajectory {index} of its group")
        inputs = np.asarray(sequence.token_ids[: wanted[-1]]).tolist()
        if not (shared and trees and trees[-1].takes(inputs, max_row_tokens)):
            trees.append(_Tree())
        trees[-1].insert(index, inputs, wanted, sequence)
    return [tree.row() for tree in trees]


class _Tree:
    """A row while it is filled: nodes are positions, a child is the next token."""

    def __init__(self) -> None:
        self.children: dict[tuple[int, int], int] = {}
        self.tokens: list[int] = []
        self.depths: list[int] = []
        self.paths: list[np.ndarray] = []
        self.members: list[int] = []
        self.readouts: dict[tuple[int, float], int] = {}
        self.readout: list[int] = []
        self.targets: list[np.ndarray] = []

    def takes(self, inputs: list[int], max_row_tokens: int) -> bool:
        node, matched = -1, 0
        for token in inputs:
            child = self.children.get((node, token))
            if child is None:
                break
            node, matched = child, matched + 1
        return matched > 0 and len(self.tokens) + len(inputs) - matched <= max_row_tokens

    def insert(self, index: int, inputs: list[int], wanted: np.ndarray, sequence: ScoredSequence) -> None:
        path, node = [], -1
        for depth, token in enumerate(inputs):
            node = self._child(node, token, depth)
            path.append(node)
        for position in wanted.tolist():
            temperature = float(sequence.temperatures[position]) or 1.0
            key = (path[position - 1], temperature)
            self.readout.append(self.readouts.setdefault(key, len(self.readouts)))
        self.paths.append(np.asarray(path))
        self.targets.append(np.asarray(sequence.token_ids[wanted], dtype=np.int64))
        self.members.append(index)

    def _child(self, node: int, token: int, depth: int) -> int:
        child = self.children.setdefault((node, token), len(self.tokens))
        if child == len(self.tokens):
            self.tokens.append(token)
            self.depths.append(depth)
        return child

    def row(self) -> Row:
        keys = list(self.readouts)
        return Row(
            members=tuple(self.members),
            token_ids=np.asarray(self.tokens, dtype=np.int64),
            depths=np.asarray(self.depths, dtype=np.int64),
            attention=self._attention(),
            predicting=np.asarray([node for node, _ in keys], dtype=np.int64),
            temperatures=np.asarray([temperature for _, temperature in keys], dtype=np.float64),
            readout=np.asarray(self.readout, dtype=np.int64),
            targets=np.concatenate(self.targets),
        )

    def _attention(self) -> np.ndarray | None:
        if len(self.tokens) == self.depths[-1] + 1:
            return None
        attention = np.zeros((len(self.tokens), len(self.tokens)), dtype=bool)
        for path in self.paths:
            attention[np.ix_(path, path)] |= np.tri(len(path), dtype=bool)
        return attention


def collate(rows: Sequence[Row]) -> Batch:
    """Rows side by side; lengths decide what is padding, never a token id."""
    length = max(len(row.token_ids) for row in rows)
    offsets = np.cumsum([0, *(len(row.predicting) for row in rows[:-1])])
    causal = all(row.attention is None for row in rows)
    return Batch(
        input_ids=np.stack([_padded(row.token_ids, length) for row in rows]),
        position_ids=np.stack([_padded(row.depths, length) for row in rows]),
        attention=None if causal else np.stack([_square(row, length) for row in rows]),
        predicting=np.concatenate([row.predicting + i * length for i, row in enumerate(rows)]),
        temperatures=np.concatenate([row.temperatures for row in rows]),
        readout=np.concatenate([row.readout + offset for row, offset in zip(rows, offsets, strict=True)]),
        targets=np.concatenate([row.targets for row in rows]),
    )


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    return np.pad(values, (0, length - len(values)))


def _square(row: Row, length: int) -> np.ndarray:
    attention = np.eye(length, dtype=bool)
    size = len(row.token_ids)
    attention[:size, :size] = np.tri(size, dtype=bool) if row.attention is None else row.attention
    return attention
