"""Masks, rows and the order of optimizer steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlpipe.errors import CheckError
from rlpipe.policies.packing import ScoredSequence, collate, pack
from rlpipe.train.batching import micro_batches, sequence_of
from rlpipe.train.schedules.passes import num_dropped, optimizer_steps
from rlpipe.train.schedules.warmup import learning_rate
from rlpipe.train.signal import find_signal
from rlpipe.trajectory import Span
from tests.train.factories import attempt, config, group


def test_masks_come_from_spans_never_from_ids():
    row = attempt([8, 0], prompt=[0, 7])
    assert sequence_of(row).scored.tolist() == [False, False, True, True]
    longer = sequence_of(attempt([8, 9, 0], prompt=[0, 7]))
    batch = collate(pack([sequence_of(row), longer], 100, shared=False))
    assert batch.input_ids.tolist() == [[0, 7, 8, 0], [0, 7, 8, 9]]
    assert batch.targets.tolist() == [8, 0, 8, 9, 0]
    assert batch.predicting.tolist() == [1, 2, 5, 6, 7]
    assert collate(pack([sequence_of(row), longer], 100)).input_ids.tolist() == [[0, 7, 8, 9]]


def test_a_token_the_harness_added_is_not_trained_and_needs_no_logprob():
    row = attempt([5, 6, 99], prompt=[1, 2])
    spans = (Span("prompt", 0, 2), Span("policy", 2, 4, trained=True), Span("context", 4, 5))
    row = replace(row, spans=spans, logprobs=np.array([np.nan, np.nan, -1, -1, np.nan], dtype=np.float32))
    assert sequence_of(row).scored.tolist() == [False, False, True, True, False]
    (micro,) = micro_batches(
        find_signal(
            [group("g", ([7], 0.0), ([8], 1.0)), type(group("x", ([1], 1.0)))("h", (row, replace(attempt([7], 0.0, index=1, prompt=[1, 2]))))], config(), list
        ).groups,
        8,
        100,
        "prefix",
    )
    assert 99 not in micro.batch.targets.tolist()
    assert np.isfinite(micro.tokens.sampling_logprobs).all()


def seen(batch):
    """The positions that each position attends to, out of the tiles."""
    found = {}
    for tiles in batch.tiles:
        for queries, keys, visible in zip(tiles.queries, tiles.keys, tiles.visible, strict=True):
            found |= {int(query): set(keys[row].tolist()) for query, row in zip(queries, visible, strict=True)}
    return found


def test_a_row_shares_every_common_beginning():
    sequences = [
        ScoredSequence(np.array(ids), np.array([False, False] + [True] * (len(ids) - 2)), np.ones(len(ids)))
        for ids in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7])
    ]
    batch = collate(pack(sequences, 100))
    assert batch.input_ids.tolist() == [[1, 2, 3, 6]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 2]]
    assert seen(batch) == {0: {0}, 1: {0, 1}, 2: {0, 1, 2}, 3: {0, 1, 3}}
    assert batch.targets.tolist() == [3, 4, 3, 5, 6, 7]
    assert batch.predicting[batch.readout].tolist() == [1, 2, 1, 2, 1, 3]


def test_rows_end_where_they_would_grow_too_long():
    sequences = [ScoredSequence(np.array([1, 2, *range(10 * i, 10 * i + 5)]), np.array([False, False] + [True] * 5), np.ones(7)) for i in range(1, 4)]
    assert [row.members for row in pack(sequences, 10)] == [(0, 1), (2,)]
    assert [row.members for row in pack(sequences, 3)] == [(0,), (1,), (2,)]
    assert [row.members for row in pack(sequences, 100, shared=False)] == [(0,), (1,), (2,)]


def test_a_trained_first_token_is_refused():
    with pytest.raises(CheckError, match="first token"):
        pack([ScoredSequence(np.array([1]), np.array([True]), np.ones(1))], 10)


def test_the_last_smaller_step_is_kept_unless_dropped_and_counted():
    names = list("abcde")
    kept = list(optimizer_steps(names, 4, 1, False, (0, 1)))
    assert [len(step) for step in kept] == [4, 1]
    assert sorted(i for step in kept for i in step) == [0, 1, 2, 3, 4]
    assert [len(step) for step in optimizer_steps(names, 4, 1, True, (0, 1))] == [4]
    assert (num_dropped(5, 4, True), num_dropped(5, 4, False)) == (1, 0)


def test_the_order_of_groups_depends_on_seed_and_names_alone():
    names = list("abcdefgh")

    def order(given, *parts):
        return [[given[i] for i in step] for step in optimizer_steps(given, 3, 2, False, parts)]

    assert order(names, 0, 1) == order(names[::-1], 0, 1)
    assert order(names, 0, 1) != order(names, 0, 2)
    assert order(names, 0, 1)[:3] != order(names, 0, 1)[3:]


def test_warm_up():
    assert [learning_rate(1.0, version, 4) for version in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert learning_rate(1.0, 0, 0) == 1.0
