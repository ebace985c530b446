from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rlpipe.errors import ConfigError
from rlpipe.evaluate.gate import Bootstrap, Guard, Pair, Paired, binomial_tail, bootstrapped
from rlpipe.evaluate.results import TaskResult
from rlpipe.evaluate.section import Config

RIGHT, WRONG, UNSCORED = (True, 4), (False, 0), (None, 0)


def row(name: str, greedy: bool | None, sampled: int, of: int = 4) -> TaskResult:
    return TaskResult(name, greedy, "", 1, of, sampled)


def pairs(*groups: tuple[int, tuple[bool | None, int], tuple[bool | None, int]], kind: str = "a") -> list[Pair]:
    """`count` tasks with (greedy, sampled attempts right) of the challenger and of the champion."""
    found = [(new, old) for count, new, old in groups for _ in range(count)]
    return [Pair(row(f"{kind}{i}", *new), row(f"{kind}{i}", *old), {"kind": kind}) for i, (new, old) in enumerate(found)]


def test_the_sign_test_by_hand() -> None:
    assert binomial_tail(5, 5) == 1 / 32
    assert binomial_tail(4, 5) == 6 / 32
    assert binomial_tail(0, 0) == 1


@pytest.mark.parametrize(("wins", "losses", "decision"), [(5, 0, "promote"), (4, 0, "hold"), (9, 1, "promote"), (8, 2, "hold"), (0, 5, "hold"), (0, 0, "hold")])
def test_the_gate_counts_tasks_that_only_one_answers(wins: int, losses: int, decision: str) -> None:
    assert Paired()(pairs((wins, RIGHT, WRONG), (losses, WRONG, RIGHT), (20, RIGHT, RIGHT))).decision == decision


def test_too_few_tasks_decide_nothing() -> None:
    found = Paired(min_tasks=20)(pairs((19, RIGHT, WRONG), (5, UNSCORED, WRONG)))
    assert found == ("not_enough", "not enough tasks: 19 scored for both, at least 20 needed")
    assert Bootstrap(min_tasks=20)([Pair(row("a", True, 0, of=0), row("a", True, 0, of=0), {})] * 40).decision == "not_enough"


def test_a_gain_beyond_chance_but_under_the_least_gain_holds() -> None:
    found = pairs((6, RIGHT, WRONG), (94, RIGHT, RIGHT))
    assert Paired(min_gain=0.06)(found).decision == "promote"
    assert Paired(min_gain=0.07)(found) == ("hold", "6 tasks won and 0 lost of 100: p = 0.0156, at most 0.05 promotes; gain 0.06, at least 0.07 asked")


def test_looks_share_the_error() -> None:
    found = pairs((6, RIGHT, WRONG), (94, RIGHT, RIGHT))  # p = 1/64
    assert Paired(looks=3)(found).decision == "promote"  # 0.05 / 3 = 0.0167
    assert Paired(looks=4)(found).decision == "hold"  # 0.05 / 4 = 0.0125


def test_the_bootstrap_by_hand() -> None:
    # of two tasks with gains 1 and -1 the mean is not above 0 in three of four draws
    assert bootstrapped(np.array([1.0, -1.0]), 0.0) == pytest.approx(0.75, abs=0.02)
    assert bootstrapped(np.array([0.5] * 3), 0.0) == 1 / 10_001
    assert bootstrapped(np.array([0.5] * 3), 0.5) == 1


@settings(deadline=None, max_examples=20)
@given(st.lists(st.sampled_from([-1.0, -0.25, 0.0, 0.5, 1.0]), min_size=1, max_size=12), st.randoms())
def test_the_bootstrap_does_not_hang_on_the_order_of_the_tasks(gains: list[float], random: object) -> None:
    shuffled = list(gains)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert bootstrapped(np.array(gains), 0.0) == bootstrapped(np.array(shuffled), 0.0)


def test_the_bootstrap_gate_compares_sampled_attempts() -> None:
    better, worse = (False, 3), (False, 1)
    assert Bootstrap()(pairs((40, better, worse))) == ("promote", "pass_at_1 gained 0.5 over 40 tasks: p = 0.0001, at most 0.05 promotes")
    assert Bootstrap()(pairs((40, worse, better))).decision == "hold"
    assert Paired()(pairs((40, better, worse))).decision == "hold"


def test_a_guarded_metric_that_fell_holds_whatever_was_gained() -> None:
    found = pairs((30, (True, 1), (False, 3)), (70, (True, 2), (True, 2)))  # greedy +0.3, pass@1 -0.15
    assert Paired()(found).decision == "promote"
    assert Paired(must_not_fall=(Guard(metric="pass_at_1"),))(found).reason.endswith("but fell: pass_at_1 by 0.15, p = 0.0001")
    assert Paired(must_not_fall=(Guard(metric="pass_at_1", by=0.3),))(found).decision == "promote"
    assert "pass_at_8 could be measured on 0 tasks only" in Paired(must_not_fall=(Guard(metric="pass_at_8"),))(found).reason


def test_a_slice_that_fell_holds_and_a_small_one_is_not_looked_at() -> None:
    gained, fell = pairs((60, RIGHT, WRONG), kind="short"), pairs((8, WRONG, RIGHT), (12, RIGHT, RIGHT), kind="long")
    assert Paired()(gained + fell).decision == "promote"
    assert Paired(slices=("kind",))(gained + fell).reason.endswith('but fell: kind="long" by 0.4, p = 0.00391')
    assert Paired(slices=("kind",), min_slice_tasks=21)(gained + fell).decision == "promote"


def test_the_error_of_looking_at_slices_is_shared_among_them() -> None:
    gained, fell = pairs((60, RIGHT, WRONG), kind="short"), pairs((5, WRONG, RIGHT), (15, RIGHT, RIGHT), kind="long")  # p = 1/32
    assert Paired(slices=("kind",), min_slice_tasks=20)(fell + gained).decision == "promote"  # two slices: 0.025 each
    other = [pair._replace(metadata={}) for pair in gained]
    assert Paired(slices=("kind",))(fell + other).decision == "hold"  # one slice: 0.05


def test_a_slice_is_one_value_of_the_metadata_whatever_its_type() -> None:
    found = [pair._replace(metadata={"level": level}) for level in (1, "1", {"a": 1, "b": 2}, {"b": 2, "a": 1}) for pair in pairs((20, RIGHT, RIGHT))]
    looked = Paired(slices=("level",)).looked_at(found)
    assert [(one.name, one.num_tasks) for one in looked] == [('level="1"', 20), ("level=1", 20), ('level={"a": 1, "b": 2}', 40)]


def test_what_would_guard_nothing_or_twice_is_refused() -> None:
    for twice in ({"slices": ["kind", "kind"]}, {"must_not_fall": [{"metric": "pass_at_1"}, {"metric": "pass_at_1", "by": 0.1}]}):
        with pytest.raises(ValidationError, match="twice"):
            Paired.model_validate(twice)
    with pytest.raises(ConfigError, match="got topik; accepted: level, topic"):
        Paired(slices=("topic", "topik")).check_slices([{"topic": "a"}, {"level": 1}])
    with pytest.raises(ValidationError, match="min_tasks"):
        Bootstrap(min_tasks=1)


def test_a_guard_that_few_tasks_measure_holds_and_says_so() -> None:
    few = [Pair(row("a", True, 0, of=0), row("a", False, 0, of=0), {})] * 40 + pairs((3, (True, 2), (True, 3)))
    assert Paired(must_not_fall=(Guard(metric="pass_at_1"),))(few).reason.endswith("but fell: pass_at_1 could be measured on 3 tasks only")


def test_the_bootstrap_resolves_a_small_error() -> None:
    won = pairs((200, (False, 3), (False, 1)))
    assert Bootstrap(looks=600)(won).decision == "promote"  # 0.05 / 600 = 8.3e-5, below 1 / 10,001


def simulated(num: int, challenger: float, champion: float, seed: int = 0) -> list[list[Pair]]:
    """`num` evaluations of 200 tasks, each answered by both with the given probabilities, independently."""
    draw = np.random.default_rng(seed)

    def rows(share: float) -> Sequence[TaskResult]:
        return [
            row(f"t{i}", bool(greedy), int(sampled))
            for i, (greedy, sampled) in enumerate(zip(draw.random(200) < share, draw.binomial(4, share, 200), strict=True))
        ]

    return [[Pair(new, old, {"half": i % 2}) for i, (new, old) in enumerate(zip(rows(challenger), rows(champion), strict=True))] for _ in range(num)]


def promoted(gate: Paired | Bootstrap, evaluations: Sequence[Sequence[Pair]]) -> float:
    return sum(gate(found).decision == "promote" for found in evaluations) / len(evaluations)


@pytest.mark.parametrize("gate", [Paired(), Paired(slices=("half",), must_not_fall=(Guard(metric="pass_at_1"),))])
def test_1000_pairs_of_equal_policies_are_promoted_in_at_most_5_percent(gate: Paired) -> None:
    assert promoted(gate, simulated(1000, 0.5, 0.5)) <= 0.05


def test_pairs_of_equal_policies_under_the_bootstrap() -> None:
    assert promoted(Bootstrap(), simulated(300, 0.5, 0.5, seed=1)) <= 0.05 + 3 * (0.05 * 0.95 / 300) ** 0.5


def test_ten_points_more_are_seen_in_about_the_stated_share() -> None:
    assert promoted(Paired(), simulated(300, 0.6, 0.5)) == pytest.approx(0.6, abs=0.1)


@pytest.mark.parametrize("gate", [{"type": "bootstrap", "metric": "pass_at_8"}, {"type": "paired", "must_not_fall": [{"metric": "pass_at_2"}]}])
def test_a_metric_that_is_not_measured_is_refused_beforehand(gate: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="is not measured; accepted: greedy_accuracy, pass_at_1, pass_at_4"):
        Config.model_validate({"gate": gate})
