"""What the probe compares, and that a gap is never let through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.engines import Completion, Request
from rlpipe.engines.base import unserved
from rlpipe.engines.probe import LENGTH, NUM_SEQUENCES, TEMPERATURE, Expectation, check, expectation, fixed_sequences
from rlpipe.errors import EngineError
from rlpipe.policies import causal_lm
from tests.factories import tiny_policy


class Stated:
    """An engine that answers the probe with what it is given, each log-prob moved by `gap`."""

    max_length = 1000

    def __init__(self, expected: Expectation, gap: float = 0.0, given: float = 0.0) -> None:
        self.expected, self.gap, self.given = expected, gap, given
        self.queue: list[Request] = []

    def submit(self, requests: Iterable[Request]) -> None:
        self.queue += requests

    def stream(self) -> Iterator[Completion]:
        for request in reversed(self.queue):
            row = int(request.request_id.rpartition("/")[2])
            logprobs = np.float32([self.expected.following[row, 3] + self.gap])
            yield Completion(request.request_id, 0, np.array([3], dtype=np.int32), logprobs, "length")

    def logprobs(self, sequences: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        return [np.append(np.nan, self.expected.logprobs[row] + self.given) for row in range(len(sequences))]


class Failing(Stated):
    def stream(self) -> Iterator[Completion]:
        for request in self.queue:
            yield from unserved(request, "error", "out of order")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@given(st.integers(2, 300_000), st.integers(2, 64))
def test_the_sequences_lie_in_the_vocabulary_and_depend_on_nothing_else(vocabulary: int, length: int) -> None:
    found = fixed_sequences(vocabulary, length)
    assert found.shape == (NUM_SEQUENCES, length)
    assert found.min() == 0
    assert found.max() < vocabulary
    np.testing.assert_array_equal(found, fixed_sequences(vocabulary, length))


def test_the_sequences_visit_the_whole_vocabulary() -> None:
    assert fixed_sequences(10, 5)[0].tolist() == [0, 6, 2, 8, 4]
    assert set(fixed_sequences(48, LENGTH).ravel().tolist()) == set(range(48))


def test_what_is_expected_is_a_plain_forward_at_both_temperatures(policy: Path) -> None:
    import torch

    expected = expectation(policy, "float32")
    module = causal_lm.load_module(policy / "modules" / "policy")
    for row in (0, 7):
        with torch.inference_mode():
            logits = module(input_ids=torch.from_numpy(expected.token_ids[row].astype(np.int64))[None]).logits[0]
        logprobs = torch.log_softmax(logits, -1)
        np.testing.assert_allclose(expected.logprobs[row, 4], logprobs[4, expected.token_ids[row, 5]], atol=1e-5)
        np.testing.assert_allclose(expected.following[row], torch.log_softmax(logits[-1] / TEMPERATURE, -1), atol=1e-5)


def test_the_sequences_leave_room_for_one_more_token(policy: Path) -> None:
    assert expectation(policy, "float32", 8).token_ids.shape == (NUM_SEQUENCES, 7)
    assert expectation(policy, "bfloat16").token_ids.shape == (NUM_SEQUENCES, LENGTH)


@pytest.mark.parametrize(("dtype", "tolerance", "gap", "given_gap"), [("float32", None, 5e-5, 0), ("bfloat16", None, 0.3, 0.3), ("float32", 2.0, 1.0, 1.5)])
def test_a_small_gap_is_accepted_and_told(policy: Path, dtype: str, tolerance: float | None, gap: float, given_gap: float) -> None:
    expected = expectation(policy, "float32")
    assert check(Stated(expected, gap, given_gap), expected, dtype, tolerance) == pytest.approx(max(gap, given_gap), rel=0.01)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "gap", "given_gap", "which"),
    [
        ("float32", 2e-4, 0.0, "drawn"),
        ("float32", 0.0, -2e-4, "given"),
        ("bfloat16", 0.0, 0.6, "given"),
        ("bfloat16", np.nan, 0.0, "drawn"),
        ("float32", 0.0, np.nan, "given"),
    ],
)
def test_a_gap_is_refused_with_its_size(policy: Path, dtype: str, gap: float, given_gap: float, which: str) -> None:
    expected = expectation(policy, "float32")
    with pytest.raises(EngineError, match=rf"log-probs of {which} tokens are not those of the policy folder.*got a gap of .* on average"):
        check(Stated(expected, gap, given_gap), expected, dtype)  # type: ignore[arg-type]
    if which == "given":
        assert check(Stated(expected, gap, given_gap), expected, dtype, scores=False) == 0  # type: ignore[arg-type]


def test_an_engine_without_an_answer_is_refused(policy: Path) -> None:
    expected = expectation(policy, "float32")
    with pytest.raises(EngineError, match="answers no request; got out of order"):
        check(Failing(expected), expected, "float32")  # type: ignore[arg-type]
