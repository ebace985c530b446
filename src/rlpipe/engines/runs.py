"""Passes over runs of tokens: what is prefilled, decoded or scored in one forward. N = tokens of a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from rlpipe.engines.cached_attention import Fresh, Layout, Part, Pass, Written
from rlpipe.engines.kv_store import Store


@dataclass(eq=False, slots=True)
class Run:
    """Tokens behind those of another run, kept in a store's slot.

    Attributes:
        start: position of its first token.
        above: the run it goes on from, None for one that begins a sequence.
    """

    store: Store
    start: int
    above: Run | None = None
    slot: int = -1

    @property
    def end(self) -> int:
        """Position of the token after its last."""
        return self.start + self.store.lengths[self.slot]

    def ancestors(self) -> Iterator[Run]:
        """The runs above, the nearest first."""
        run = self.above
        while run is not None:
            yield run
            run = run.above


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of a run that are computed in one pass: `ids` `[n]` from its token `start` on."""

    run: Run
    start: int
    ids: np.ndarray


def pieces(runs: Sequence[tuple[Run, np.ndarray]], num_tokens: int) -> Iterator[list[Piece]]:
    """The runs' tokens in their order, as many at a time as one pass takes; a run comes after those above it."""
    found: list[Piece] = []
    room = num_tokens
    for run, ids in runs:
        start = 0
        while start < len(ids):
            piece = Piece(run, start, ids[start : start + room])
            found.append(piece)
            start, room = start + len(piece.ids), room - len(piece.ids)
            if room == 0:
                yield found
                found, room = [], num_tokens
    if found:
        yield found


def prefill(found: Sequence[Piece], device: torch.device) -> Pass:
    """The pass of new pieces: each sees itself, what came before in its run, and the runs above."""
    firsts = np.concatenate([[0], np.cumsum([len(piece.ids) for piece in found])])
    written = [Written(int(a), int(b), piece.run.store, piece.run.slot, piece.start) for (a, b), piece in zip(pairwise(firsts), found, strict=True)]
    positions = np.concatenate([piece.run.start + piece.start + np.arange(len(piece.ids)) for piece in found])
    looking: dict[tuple[int, bool], list[tuple[int, Run]]] = {}
    for i, piece in enumerate(found):
        for run in [piece.run] * (piece.start > 0) + list(piece.run.ancestors()):
            looking.setdefault((id(run.store), run is piece.run), []).append((i, run))
    parts = [_part([(written[i], run) for i, run in pairs], own, len(positions), device) for (_, own), pairs in looking.items()]
    ids = np.concatenate([piece.ids for piece in found]).astype(np.int64)
    fresh = fresh_runs([len(piece.ids) for piece in found], device)
    return Pass(torch.from_numpy(ids).to(device), torch.from_numpy(positions).to(device), parts, written, fresh, longest=int(positions.max()) + 1)


def _part(pairs: Sequence[tuple[Written, Run]], own: bool, num_tokens: int, device: torch.device) -> Part:
    """How pieces see runs of one store: whole, or, each its own, what came before it."""
    first, last = min(run.slot for _, run in pairs), max(run.slot for _, run in pairs) + 1
    lengths = np.zeros(last - first, dtype=np.int64)
    starts = np.zeros(last - first, dtype=np.int64)
    for place, run in pairs:
        lengths[run.slot - first] = place.start if own else run.store.lengths[run.slot]
        starts[run.slot - first] = run.start
    queries = np.concatenate([np.arange(place.first, place.last) for place, _ in pairs])
    run_of = np.concatenate([np.full(place.last - place.first, run.slot - first) for place, run in pairs])
    return _laid_out(pairs[0][1].store, first, lengths, starts, run_of, queries, num_tokens, device)


def _laid_out(
    store: Store, first: int, lengths: np.ndarray, starts: np.ndarray, run_of: np.ndarray, queries: np.ndarray, num_tokens: int, device: torch.device
) -> Part:
    everyone = len(queries) == num_tokens and bool((queries == np.arange(num_tokens)).all())
    layout = Layout.of(run_of, len(lengths), device, None if everyone else queries)
    return Part(store, first, first + len(lengths), lengths, starts, layout, None if everyone else torch.from_numpy(queries).to(device))


def fresh_runs(lengths: Sequence[int], device: torch.device) -> list[Fresh]:
    """Runs of new tokens one after the other in a pass; those between two powers of two in length are computed together."""
    firsts = np.concatenate([[0], np.cumsum(lengths)])
    classes: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        classes.setdefault((length - 1).bit_length(), []).append(i)
    return [_fresh([(int(firsts[i]), int(firsts[i + 1])) for i in members], int(firsts[-1]), device) for _, members in sorted(classes.items())]


def _fresh(spans: Sequence[tuple[int, int]], num_tokens: int, device: torch.device) -> Fresh:
    queries = np.concatenate([np.arange(first, last) for first, last in spans])
    run_of = np.repeat(np.arange(len(spans)), [last - first for first, last in spans])
    everyone = len(queries) == num_tokens
    return Fresh(Layout.of(run_of, len(spans), device, None if everyone else queries), None if everyone else torch.from_numpy(queries).to(device))


class Decoding:
    """Passes of one new token for each of a store's first runs; what they see above is laid out again only after `runs` changed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._runs: list[Run] = []
        self._above: list[Part] = []
        self._slots: tuple[int, ...] = ()

    def step(self, runs: Sequence[Run], ids: Sequence[int]) -> Pass:
        """The pass of one more token for each run, in slots 0 to B - 1; their lengths count it already."""
        store = runs[0].store
        lengths = np.array(store.lengths[: len(runs)], dtype=np.int64)
        starts = np.array([run.start for run in runs], dtype=np.int64)
        positions = starts + lengths - 1
        own = Part(store, 0, len(runs), lengths, starts, Layout(1, None, None), None)
        at = int(lengths[0]) - 1 if (lengths == lengths[0]).all() else torch.from_numpy(lengths - 1).to(self.device)
        above = [part.again() for part in self._laid_out_above(runs)]
        tokens = torch.tensor(ids, dtype=torch.int64, device=self.device)
        longest = int(positions.max()) + 1
        return Pass(tokens, torch.from_numpy(positions).to(self.device), [own, *above], appended=store, append_at=at, longest=longest)

    def _laid_out_above(self, runs: Sequence[Run]) -> list[Part]:
        slots = tuple(run.slot for own in runs for run in own.ancestors())
        if list(runs) == self._runs and slots == self._slots:
            return self._above
        looking: dict[int, list[tuple[int, Run]]] = {}
        for i, own in enumerate(runs):
            for run in own.ancestors():
                looking.setdefault(id(run.store), []).append((i, run))
        self._runs, self._slots = list(runs), slots
        self._above = [self._seen(pairs, len(runs)) for pairs in looking.values()]
        return self._above

    def _seen(self, pairs: Sequence[tuple[int, Run]], num_tokens: int) -> Part:
        store = pairs[0][1].store
        starts = np.zeros(len(store), dtype=np.int64)
        for _, run in pairs:
            starts[run.slot] = run.start
        queries, run_of = np.array([i for i, _ in pairs]), np.array([run.slot for _, run in pairs])
        return _laid_out(store, 0, np.array(store.lengths, dtype=np.int64), starts, run_of, queries, num_tokens, self.device)
