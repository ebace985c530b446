"""Worked numbers of the advantage estimators, and the laws they keep."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.errors import ConfigError, TrainingError
from rlpipe.train.advantages import DrGrpo, Grpo, Reinforce, Rloo, needs_siblings
from rlpipe.train.signal import check_siblings
from tests.train.factories import group

NAN = float("nan")
ESTIMATORS = [Grpo(), Grpo(ddof=0, eps=0), DrGrpo(), Rloo(), Reinforce()]


def of(estimator, rewards, group_ids=None):
    return estimator(np.asarray(rewards, dtype=float), group_ids or ["g"] * len(rewards)).tolist()


def test_a01_one_usable_reward_has_no_siblings_to_beat():
    for estimator in (Grpo(ddof=1), Grpo(ddof=0), DrGrpo(), Rloo()):
        np.testing.assert_array_equal(of(estimator, [NAN, NAN, NAN, 0.7]), [NAN, NAN, NAN, 0.0])


def test_a02_what_could_not_be_scored_is_not_in_the_mean():
    np.testing.assert_allclose(of(DrGrpo(), [1, 1, 0, NAN]), [1 / 3, 1 / 3, -2 / 3, NAN])


def test_a05_uneven_groups_are_centred_each_by_its_own_mean():
    advantages = of(DrGrpo(), [1, 2, 3, 4, 10, 12, 5, 6, 7], [0, 0, 0, 0, 1, 1, 2, 2, 2])
    assert advantages == [-1.5, -0.5, 0.5, 1.5, -1, 1, -1, 0, 1]
    middle = of(DrGrpo(), [1, 2, 3, 4, 5, 5, 5, 7, 8, 9, 9], [0] * 4 + [1] * 3 + [2] * 4)[4:7]
    assert middle == [0, 0, 0]


def test_a09_exactly_one_normalisation():
    estimator = Grpo(ddof=0, eps=0)
    assert of(estimator, [1, 0, 1, 1], list("aabb")) == [1, -1, 0, 0]
    assert of(estimator, [1, 0, 1, 1, 9, 3], list("aabbcc"))[:4] == [1, -1, 0, 0]


def test_a10_the_divisor_of_the_standard_deviation_is_stated():
    np.testing.assert_allclose(of(Grpo(ddof=0, eps=0), [0, 2]), [-1, 1])
    np.testing.assert_allclose(of(Grpo(ddof=1, eps=0), [0, 2]), [-0.7071, 0.7071], atol=1e-4)
    eight = [1, 1, 1, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(of(Grpo(ddof=0, eps=0), eight)[::7], [1.2910, -0.7746], atol=1e-4)
    np.testing.assert_allclose(of(Grpo(ddof=1, eps=0), eight)[::7], [1.2076, -0.7246], atol=1e-4)
    np.testing.assert_allclose(of(Rloo(), eight)[::7], [0.7143, -0.4286], atol=1e-4)


def test_a11_grouping_goes_by_id_not_by_position():
    rewards, ids = [1, 1, 0, 1], ["p1", "p2", "p1", "p2"]
    assert of(DrGrpo(), rewards, ids) == [0.5, 0, -0.5, 0]
    for seed in range(10):
        order = random.Random(seed).sample(range(4), 4)
        shuffled = of(DrGrpo(), [rewards[i] for i in order], [ids[i] for i in order])
        assert shuffled == [[0.5, 0, -0.5, 0][i] for i in order]


def test_reinforce_takes_the_reward_less_its_baseline():
    assert of(Reinforce(), [1, 0, 3], list("abc")) == [1, 0, 3]
    assert of(Reinforce(baseline=0.5), [1, 0, 3], list("abc")) == [0.5, -0.5, 2.5]
    np.testing.assert_allclose(of(Reinforce(baseline="batch_mean"), [1, 0, 5, NAN], list("abcd")), [-1, -2, 3, NAN])


def test_equal_rewards_give_exact_zeros():
    assert of(Grpo(eps=0), [0.1, 0.1, 0.1]) == [0, 0, 0]


@pytest.mark.parametrize("estimator", [*ESTIMATORS, Reinforce(baseline="batch_mean")])
def test_a04_an_infinite_reward_is_an_error(estimator):
    with pytest.raises(TrainingError, match="not finite"), np.errstate(invalid="ignore"):
        of(estimator, [1, float("inf"), 0])


def test_a_group_baseline_on_single_attempts_is_refused():
    assert needs_siblings(Grpo())
    assert not needs_siblings(Reinforce())
    single = [group("a", ([1], 1.0)), group("b", ([1], 0.0))]
    with pytest.raises(ConfigError, match="groups of one"):
        check_siblings(single, Grpo())
    check_siblings(single, Reinforce())
    check_siblings([], Grpo())


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from("abcd"), st.one_of(st.none(), st.integers(-5, 5))), min_size=1, max_size=20),
    seed=st.integers(0, 1000),
    estimator=st.sampled_from(ESTIMATORS),
)
def test_advantages_follow_their_rows_and_no_group_touches_another(rows, seed, estimator):
    ids = [name for name, _ in rows]
    rewards = [NAN if value is None else value for _, value in rows]
    advantages = of(estimator, rewards, ids)
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    np.testing.assert_allclose(of(estimator, [rewards[i] for i in order], [ids[i] for i in order]), [advantages[i] for i in order], atol=1e-12)
    only_a = [i for i, name in enumerate(ids) if name == "a"]
    np.testing.assert_allclose(of(estimator, [rewards[i] for i in only_a], ["a"] * len(only_a)), [advantages[i] for i in only_a], atol=1e-12)
    assert [np.isnan(value) for value in advantages] == [np.isnan(value) for value in rewards]


def test_a04_one_unscored_reward_of_several_leaves_the_other_group_alone():
    """A row with one of its two rewards unscored has no total; the other group's advantages are those of the clean run."""
    clean = of(Grpo(), [1, 0.5, 1, 0, 0, 1, 1, 0.5], list("aaaabbbb"))
    poisoned = of(Grpo(), [NAN, 0.5, 1, 0, 0, 1, 1, 0.5], list("aaaabbbb"))
    assert poisoned[4:] == clean[4:]
    assert np.isfinite(poisoned[1:]).all()
