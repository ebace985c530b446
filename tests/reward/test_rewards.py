from __future__ import annotations

import concurrent.futures
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlpipe.reward.base import Attempt, OverLimit, up_to
from rlpipe.reward.digit_share import DigitShare
from rlpipe.reward.exact_match import ExactMatch
from rlpipe.reward.length_penalty import LengthPenalty
from rlpipe.reward.magnitude import digits
from rlpipe.reward.math_verify import MathVerify
from rlpipe.reward.regex_format import RegexFormat
from rlpipe.tasks import Task
from tests.reward.rows import section, trajectory


def attempt(completion: str, num_tokens: int = 2) -> Attempt:
    return Attempt.of(trajectory(completion, sampled=range(num_tokens)))


def task(reference: str) -> Task:
    return Task(task_id="t0", prompt="?", reference=reference)


@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        ("", "B", 0.0),
        ("A or B or C", "B", 0.0),
        ("B", "B", 1.0),
        (" b. ", "B", 1.0),
        ("B\nor A", "B", 1.0),
        ("\nB", "B", 0.0),
        (" . ", "...", 0.0),
        (" 44\nmax(", "44", 1.0),
        ("4 4", "44", 0.0),
        ("ｘ  ＝  １", "x = 1", 1.0),
        ("-3", "3", 0.0),
    ],
)
def test_a33_exact_match_compares_whole_normalised_answers(completion, reference, value):
    assert ExactMatch()(attempt(completion), task(reference)) == value


def test_exact_match_can_tell_cases_apart_and_stop_elsewhere():
    assert ExactMatch(ignore_case=False)(attempt("b"), task("B")) == 0.0
    assert ExactMatch(until=(";", "#"))(attempt("B # no; yes"), task("B")) == 1.0


@given(st.text(max_size=20))
def test_exact_match_gives_a_reference_itself_1_unless_nothing_is_left_of_it(text):
    reward = ExactMatch(until=())
    says_something = reward.normalised(text) != ""
    assert reward(attempt(text), Task.model_construct(task_id="t0", prompt="?", reference=text)) == float(says_something)


def test_up_to_takes_the_first_stop_of_several():
    assert up_to("a;b\nc", ("\n", ";")) == "a"
    assert up_to("abc", ("\n",)) == "abc"
    assert up_to("abc", ()) == "abc"


@pytest.mark.parametrize(("completion", "value"), [("<a>\nx</a>", 1.0), ("<a>x</a> ", 0.0), ("", 0.0)])
def test_regex_format_matches_the_whole_completion(completion, value):
    assert RegexFormat(pattern="<a>.*</a>")(attempt(completion), task("x")) == value


def test_a_pattern_that_is_none_is_refused_with_its_place():
    with pytest.raises(ValidationError, match=r"not a regular expression: missing ., unterminated subpattern at position 0"):
        RegexFormat(pattern="(")


@pytest.mark.parametrize(("num_tokens", "value"), [(0, 0.0), (4, 0.0), (6, -0.5), (8, -1.0), (9, -1.0)])
def test_length_penalty_falls_linearly_from_free_to_budget(num_tokens, value):
    assert LengthPenalty(free=4, budget=8)(attempt("x", num_tokens), task("x")) == value


def test_length_penalty_refuses_a_budget_below_what_is_free():
    with pytest.raises(ValidationError, match=r"free \(8\) must be below budget \(8\)"):
        LengthPenalty(free=8, budget=8)


@pytest.mark.parametrize(("completion", "value"), [("", 0.0), ("12", 1.0), ("a1b2", 0.5), ("٣²", 0.0)])
def test_digit_share(completion, value):
    assert DigitShare()(attempt(completion), task("x")) == value


@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        ("\\boxed{\\frac{1}{3}}", "1/3", 1.0),
        ("The answer is $\\frac{2}{6}$.", "\\frac{1}{3}", 1.0),
        ("0.5", "1/2", 1.0),
        ("$2\\sqrt{2}$", "$\\sqrt{8}$", 1.0),
        ("$\\{1, 2\\}$", "$\\{2, 1\\}$", 1.0),
        ("1/4", "1/3", 0.0),
        ("I do not know", "1/3", 0.0),
        ("", "1/3", 0.0),
    ],
)
def test_math_verify_compares_by_value(completion, reference, value):
    assert MathVerify()(attempt(completion), task(reference)) == value


def third(_: int = 0) -> float:
    return MathVerify()(attempt("\\boxed{\\frac{1}{3}}"), task("1/3"))


def test_a28_math_verify_gives_the_same_in_main_thread_thread_and_process():
    found = [third()]
    thread = threading.Thread(target=lambda: found.append(third()))
    thread.start()
    thread.join()
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        found += pool.map(third, [0])
    assert found == [1.0, 1.0, 1.0]


def test_math_verify_says_that_a_reference_is_none_instead_of_scoring_0():
    with pytest.raises(ValueError, match="the reference is not mathematics"):
        MathVerify()(attempt("3"), task("$$"))


@pytest.mark.parametrize(
    "completion", ["9**9**9", "10^{10^{10}}", "10000000!", "$(9^9)^{9^9}$", "\\boxed{0.5^{99999999}}", "7" * 5000, "(" * 500 + "1" + ")" * 500]
)
def test_a31_huge_numbers_are_over_the_limit_before_they_are_evaluated(completion):
    with pytest.raises(OverLimit, match="more than 4000 digits"):
        MathVerify()(attempt(completion), task("3"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0.0),
        ("100", 2.0),
        ("0.001", 3.0),
        ("10^3", 3.0),
        ("10**2**3", 8.0),
        ("10^{2 \\cdot 3}", 6.0),
        ("(10^2)^3", 6.0),
        ("10^{-3}", 3.0),
        ("x^{999999}", 0.0),
        ("100 \\times 1000", 5.0),
        ("\\frac{10^4}{100}", 6.0),
        ("10, 100, 1000", 3.0),
        ("Yes! It is (10 ^ 2) !", 200.0),
        ("3!", 1.4),
        ("²)}]^", 0.0),
    ],
)
def test_digits_bounds_the_size_of_what_is_written(text, expected):
    assert digits(text) == pytest.approx(expected, abs=0.8)


@given(st.text(alphabet="0123456789^*+-/!(){}[].x \\²", max_size=60))
def test_digits_reads_any_text(text):
    assert digits(text) >= 0


@given(st.integers(2, 99), st.integers(0, 60), st.integers(0, 10**6))
def test_digits_is_a_bound(base, exponent, addend):
    assert digits(f"{base}^{{{exponent}}} + {addend}") >= len(str(base**exponent + addend)) - 1.001


def test_reward_names_are_told_apart():
    both = section({"type": "digit_share"}, {"type": "digit_share", "name": "share", "weight": 0})
    assert [reward.label for reward in both.rewards] == ["digit_share", "share"]
    with pytest.raises(ValidationError, match="two rewards are called digit_share"):
        section({"type": "digit_share"}, {"type": "digit_share"})


def test_unknown_rewards_and_keys_are_refused():
    with pytest.raises(ValidationError, match="'exact_match', 'regex_format', 'length_penalty', 'math_verify', 'digit_share', 'custom'"):
        section({"type": "exact"})
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        section({"type": "exact_match", "untill": ["x"]})
