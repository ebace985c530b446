"""The data item: what its spans say, and how it goes into columns and comes back."""

import copy
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.columns import from_batch, to_batch
from rlpipe.trajectory import SCHEMA, RewardValue, Span, Trajectory, groups_of

NAN = float("nan")


def attempt(**changes):
    row = Trajectory(
        trajectory_id="01/t/0/0",
        group_id="01/t/0",
        task_id="t",
        index=0,
        round=1,
        token_ids=np.array([5, 6, 7, 8, 9], dtype=np.int32),
        logprobs=np.array([NAN, NAN, -0.5, NAN, -1.5], dtype=np.float32),
        spans=(
            Span("prompt", 0, 2),
            Span("policy", 2, 3, policy_version=4, trained=True),
            Span("environment", 3, 4, 1),
            Span("policy", 4, 5, 1, policy_version=5),
        ),
    )
    return replace(row, **changes)


def back(*rows):
    return list(from_batch(to_batch(rows)))


def assert_same(left, right):
    for name in SCHEMA.names:
        one, other = getattr(left, name), getattr(right, name)
        if name in ("token_ids", "logprobs"):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        elif name == "arrays":
            assert one.keys() == other.keys()
            for key in one:
                assert one[key].dtype == other[key].dtype
                np.testing.assert_array_equal(one[key], other[key])
        elif name == "reward" and one is not None and math.isnan(one):
            assert math.isnan(other)
        else:
            assert one == other, name


def test_what_spans_say():
    row = attempt()
    assert row.mask.tolist() == [False, False, True, False, False]
    assert row.versions.tolist() == [-1, -1, 4, -1, 5]
    assert (row.num_prompt_tokens, row.num_sampled_tokens) == (2, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"token_ids": np.empty(0, np.int32), "logprobs": np.empty(0, np.float32), "spans": ()},
        {"status_reason": None, "parent_id": "01/t/0/9", "shared_prefix": 3, "finish_reason": "length", "status": "truncated"},
        {"reward": 0.0},
        {"reward": NAN},
        {"rewards": (RewardValue("a", None, "timeout", "slow"), RewardValue("b", 0.0)), "reward": None},
        {"segment_rewards": ({"name": "step", "token": 2, "value": 0.5},)},
        {"prompt": "größer: 3 > 2?\n", "completion": ""},
        {"arrays": {"h": np.arange(6, dtype=np.float64).reshape(2, 3), "empty": np.empty((0, 4), np.int8), "scalar": np.array(2.5, np.float16)}},
    ],
)
def test_round_trip(changes):
    row = attempt(**changes)
    assert_same(back(attempt(), row, attempt())[1], row)


def test_a_view_passes_through_columns_undecoded_and_equal():
    rows = [attempt(index=i, rewards=(RewardValue("a", float(i)),), arrays={"h": np.full(2, i)}) for i in range(5)]
    views = back(*rows)
    again = list(from_batch(to_batch([views[4], views[0], *back(attempt(index=7))])))
    assert [row.index for row in again] == [4, 0, 7]
    assert_same(again[0], rows[4])


def test_a_changed_view_keeps_everything_else():
    view = back(attempt(), attempt(index=1, reward=0.5))[1]
    scored = view.with_rewards([RewardValue("a", 1.0)], 1.0)
    assert (view.reward, scored.reward, scored.index) == (0.5, 1.0, 1)
    mixed = back(view, scored)
    assert [row.reward for row in mixed] == [0.5, 1.0]


def test_views_are_copied_and_pickled_like_any_value():
    view = back(attempt(arrays={"h": np.ones(2)}))[0]
    for row in (pickle.loads(pickle.dumps(view)), copy.copy(view), copy.deepcopy(view)):
        assert_same(row, attempt(arrays={"h": np.ones(2)}))


def test_a_view_has_no_other_attributes_and_cannot_be_changed():
    view = back(attempt())[0]
    with pytest.raises(AttributeError):
        view.rewrd  # noqa: B018
    with pytest.raises(AttributeError):
        view.reward = 1.0


def test_token_arrays_are_slices_of_the_batch():
    batch = to_batch([attempt(), attempt(index=1)])
    first, second = from_batch(batch)
    memory = batch.column("token_ids").values.to_numpy()
    assert np.shares_memory(first.token_ids, memory)
    assert np.shares_memory(second.token_ids, memory)


def test_a_sliced_batch_starts_where_it_says():
    batch = to_batch([attempt(index=i, token_ids=np.full(5, i, np.int32)) for i in range(4)]).slice(2, 2)
    rows = list(from_batch(batch))
    assert [row.index for row in rows] == [2, 3]
    assert rows[0].token_ids.tolist() == [2] * 5
    assert rows[1].spans == attempt().spans


def test_nothing():
    assert to_batch([]).num_rows == 0
    assert back() == []


def test_float_tokens_are_refused():
    with pytest.raises(TypeError):
        to_batch([attempt(token_ids=np.array([1.5]))])


@given(st.permutations([(group, index) for group in "abc" for index in range(3)]))
@settings(max_examples=30, deadline=None)
def test_groups_do_not_depend_on_the_order_of_rows(order):
    groups = groups_of([attempt(group_id=group, index=index) for group, index in order])
    assert sorted(group.group_id for group in groups) == ["a", "b", "c"]
    assert all([row.index for row in group] == [0, 1, 2] for group in groups)
