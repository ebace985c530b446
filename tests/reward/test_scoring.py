from __future__ import annotations

import resource
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.errors import CheckError, ScorerError
from rlpipe.reward import sandbox
from rlpipe.reward.scoring import Scorer
from rlpipe.reward.tally import Tally
from rlpipe.tasks import Task
from rlpipe.trajectory import RewardValue, Trajectory
from tests.reward.rows import bad, section, trajectory

TASKS = [Task(task_id="t0", prompt="?", reference="9"), Task(task_id="t1", prompt="?", reference="10")]


@pytest.fixture(autouse=True, scope="module")
def no_children_left():
    yield
    sandbox.shared().close()


def rows(*completions: str) -> list[Trajectory]:
    return [trajectory(text, index=i) for i, text in enumerate(completions)]


def test_the_total_is_the_weighted_sum():
    config = section(
        {"type": "exact_match", "weight": 2}, {"type": "digit_share", "name": "share", "weight": -0.5}, {"type": "length_penalty", "budget": 4, "weight": 0}
    )
    [right, wrong] = Scorer(config).score(rows("9", "abc8"), TASKS)
    assert right.rewards == (RewardValue("exact_match", 1.0), RewardValue("share", 1.0), RewardValue("length_penalty", -0.5))
    assert right.reward == 1.5
    assert wrong.reward == -0.125


def test_each_trajectory_is_held_against_its_own_task():
    [first, second] = Scorer(section({"type": "exact_match"})).score([trajectory("10", task="t0"), trajectory("10", task="t1")], TASKS)
    assert (first.reward, second.reward) == (0.0, 1.0)


def test_one_unscored_reward_leaves_the_total_open_unless_it_weighs_nothing():
    completions = ("fine", "raise_type_error", "nan")
    counted = Scorer(section({"type": "digit_share"}, bad("Scripted", name="bad"), max_unscorable=1)).score(rows(*completions), TASKS)
    assert [row.reward for row in counted] == [1.0, None, None]
    assert [row.rewards[0].value for row in counted] == [0.0, 0.0, 0.0]
    assert counted[2].rewards[1] == RewardValue("bad", None, "error", "non_finite")
    watched = Scorer(section({"type": "digit_share"}, bad("Scripted", weight=0), max_unscorable=0)).score(rows(*completions), TASKS)
    assert [row.reward for row in watched] == [0.0, 0.0, 0.0]


def test_a28_a_scorer_that_raises_is_an_error_and_not_0():
    [row] = Scorer(section(bad("Raises"), max_unscorable=1)).score(rows("9"), TASKS)
    assert row.rewards == (RewardValue("custom", None, "error", "TypeError: unsupported operand"),)
    assert row.reward is None


def test_a31_huge_answers_are_0_by_limit_and_the_parent_does_not_grow():
    scorer = Scorer(section({"type": "math_verify"}, wall_seconds=20))
    scorer.score(rows("9"), TASKS)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    scored = scorer.score(rows("9**9**9", "10^{10^{10}}", "10000000!"), TASKS)
    assert time.monotonic() - started < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KB
    limited = RewardValue("math_verify", 0.0, "limit", "OverLimit: the answer has more than 4000 digits")
    assert [(row.rewards, row.reward) for row in scored] == [((limited,), 0.0)] * 3


def test_a58_too_many_failures_stop_with_types_and_counts():
    with pytest.raises(ScorerError) as caught:
        Scorer(section(bad("Raises"))).score(rows(*["9"] * 12), TASKS)
    assert caught.value.exit_code == 5
    assert str(caught.value) == (
        "12 of 12 trajectories could not be scored; "
        "got custom.TypeError 12; custom: error: TypeError: unsupported operand (x12); "
        "accepted: a share of at most 0.2 (reward.max_unscorable); do: mend the reward, raise its limits, or allow a larger share"
    )


def test_a_share_of_failures_up_to_the_limit_is_counted_and_passes():
    scored = Scorer(section(bad("Scripted"), max_unscorable=0.5)).score(rows("fine", "nan", "raise_type_error", "fine"), TASKS)
    tally = Tally()
    tally.add(scored)
    assert tally.numbers()["num_unscorable"] == 2
    assert tally.numbers()["sampled_reward"] == 1.0
    assert tally.kinds == {"custom.non_finite": 1, "custom.TypeError": 1}


def test_what_failed_outside_the_policy_is_skipped_and_not_counted_as_unscorable():
    lost = [trajectory("9", status=status) for status in ("infra_error", "aborted", "partial")]
    scored = Scorer(section({"type": "exact_match"}, max_unscorable=0)).score([*lost, trajectory("9", status="truncated")], TASKS)
    assert [row.rewards[0] for row in scored] == [
        RewardValue("exact_match", None, "skipped", "infra_error"),
        RewardValue("exact_match", None, "skipped", "aborted"),
        RewardValue("exact_match", None, "skipped", "partial"),
        RewardValue("exact_match", 1.0),
    ]
    assert [row.reward for row in scored] == [None, None, None, 1.0]


def test_a_custom_function_can_ask_for_the_whole_trajectory():
    [row] = Scorer(section({"type": "custom", "path": "tests.reward.bad_scorers:length", "whole": True})).score(rows("9"), TASKS)
    assert row.reward == 4.0


def test_a_custom_class_takes_arguments():
    [row] = Scorer(section(bad("Scripted", args={"value": 0.125}))).score(rows("fine"), TASKS)
    assert row.reward == 0.125


def test_results_do_not_depend_on_the_number_of_workers():
    completions = [str(n) if n % 3 else "$\\frac{18}{2}$" for n in range(60)]
    rewards = ({"type": "exact_match"}, {"type": "math_verify"}, {"type": "digit_share"})
    one, three = (Scorer(section(*rewards, workers=n)).score(rows(*completions), TASKS) for n in (1, 3))
    assert [row.rewards for row in one] == [row.rewards for row in three]


def test_a_trajectory_of_an_unknown_task_is_named():
    with pytest.raises(CheckError, match="a trajectory's task is not in the task file; got t7 of g0/0"):
        Scorer(section({"type": "exact_match"})).score([trajectory(task="t7")], TASKS)


def test_nothing_to_score_is_nothing():
    assert Scorer(section({"type": "exact_match"})).score([], TASKS) == []


@given(st.lists(st.tuples(st.floats(-4, 4).filter(bool), st.floats(-1, 1) | st.none()), min_size=1, max_size=4))
def test_a_total_stands_exactly_when_every_weighted_reward_does(weighted):
    from rlpipe.reward.worker import Outcome

    rewards = [{"type": "digit_share", "name": f"r{i}", "weight": weight} for i, (weight, _) in enumerate(weighted)]
    outcomes = [Outcome(value, "ok" if value is not None else "error", None) for _, value in weighted]
    row = Scorer(section(*rewards))._with_rewards(trajectory(), outcomes)
    if any(value is None for _, value in weighted):
        assert row.reward is None
    else:
        assert row.reward == pytest.approx(sum(weight * value for weight, value in weighted))
