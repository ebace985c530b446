from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlpipe.filter.duplicate import Duplicate
from rlpipe.filter.empty import Empty
from rlpipe.filter.repetition import Repetition
from rlpipe.filter.too_long import TooLong
from rlpipe.filter.truncated import Truncated
from rlpipe.trajectory import Group, Trajectory
from rlpipe.verdict import KEEP, Verdict
from tests.reward.rows import group, trajectory

EOS = 0
CHAT_END = 5


def alone(row: Trajectory) -> Group:
    return Group(row.group_id, (row,))


@pytest.mark.parametrize(
    ("last_token", "fields", "kept"),
    [
        (CHAT_END, {"finish_reason": "stop"}, True),
        (EOS, {"finish_reason": "length", "status": "truncated"}, False),
        (EOS, {"finish_reason": "length"}, False),
        (CHAT_END, {"finish_reason": "stop", "status": "truncated"}, False),
    ],
)
def test_a19_truncated_goes_by_status_and_finish_reason_never_by_the_last_token(last_token, fields, kept):
    row = trajectory(sampled=(7, last_token), **fields)
    assert Truncated()(row, alone(row)) == (KEEP if kept else Verdict(False, "truncated"))


@pytest.mark.parametrize(("completion", "sampled", "kept"), [("9", (7,), True), ("", (7,), False), (" \n", (7, 8), False), ("9", (), False)])
def test_empty(completion, sampled, kept):
    row = trajectory(completion, sampled=sampled)
    assert Empty()(row, alone(row)) == (KEEP if kept else Verdict(False, "empty"))


@pytest.mark.parametrize(("num_tokens", "kept"), [(3, True), (4, False)])
def test_too_long(num_tokens, kept):
    row = trajectory(sampled=range(num_tokens))
    assert TooLong(max_tokens=3)(row, alone(row)) == (KEEP if kept else Verdict(False, "too_long"))


def test_duplicate_keeps_the_first():
    three = group("9", "8", "9", "9")
    assert [Duplicate()(row, three).keep for row in three] == [True, True, False, False]


@given(st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=1, max_size=8))
def test_duplicate_keeps_one_of_each(completions):
    one = group(*completions)
    kept = [row.completion for row in one if Duplicate()(row, one).keep]
    assert sorted(kept) == sorted(set(completions))


@pytest.mark.parametrize(
    ("sampled", "share"),
    [((1, 2, 3, 4), 0.0), ((1, 2, 1, 2, 1), 0.5), ((1, 1, 1, 1, 1), 0.75), ((1,), 0.0), ((), 0.0)],
)
def test_repetition_is_the_share_of_ngrams_that_stood_before(sampled, share):
    row = trajectory(sampled=sampled)
    assert Repetition(n=2).share(row) == share
    assert Repetition(n=2, max_share=0.5)(row, alone(row)) == (KEEP if share <= 0.5 else Verdict(False, "repetition"))


def test_repetition_does_not_look_at_the_prompt():
    row = trajectory(sampled=(1, 2))  # the prompt is 1, 2 too
    assert Repetition(n=2).share(row) == 0.0


def test_limits_are_checked():
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        TooLong(max_tokens=0)
    with pytest.raises(ValidationError, match="less than 1"):
        Repetition(max_share=1.0)
