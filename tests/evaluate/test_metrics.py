from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.evaluate.metrics import mean, mean_pass_at_k, pass_at_k


@pytest.mark.parametrize(
    ("attempts", "correct", "k", "expected"), [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 1, 4, 1.0), (10, 3, 5, 0.916667), (4, 0, 4, 0.0), (2, 2, 1, 1.0)]
)
def test_a35_a36_pass_at_k_by_hand(attempts: int, correct: int, k: int, expected: float) -> None:
    assert pass_at_k(attempts, correct, k) == pytest.approx(expected, abs=1e-6)


def test_a35_fewer_attempts_than_k_say_nothing() -> None:
    assert pass_at_k(2, 0, 5) is None
    assert mean_pass_at_k([(2, 0), (2, 1)], 5) is None


def test_a36_the_mean_is_over_tasks_not_over_attempts() -> None:
    assert mean_pass_at_k([(4, 4), (8, 0), (1, 0)], 2) == pytest.approx(0.5)


@given(attempts=st.integers(1, 30), k=st.integers(1, 30), correct=st.integers(0, 30))
def test_pass_at_k_is_a_probability_that_grows_with_k(attempts: int, k: int, correct: int) -> None:
    correct = min(correct, attempts)
    found = pass_at_k(attempts, correct, k)
    if found is None:
        assert attempts < k
        return
    assert 0 <= found <= 1
    assert (found == 0) == (correct == 0)
    assert found >= (pass_at_k(attempts, correct, k - 1) if k > 1 else 0)  # type: ignore[operator]


def test_mean_of_nothing_is_nothing() -> None:
    assert mean([None, None]) is None
    assert mean([1.0, None, 0.0]) == 0.5
