"""Reading log-probs from the head a chunk at a time: the numbers of log-softmax, without its memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlpipe.policies import head
from rlpipe.policies.head import Reading, _Read


def reading(rows: list[int], token_ids: list[int], temperatures: torch.Tensor | None = None, narrow: torch.dtype | None = None) -> Reading:
    return Reading(torch.tensor(rows), torch.tensor(token_ids), temperatures, True, narrow)


def layer(num: int, size: int, width: int = 8, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    """Hidden states, weight and bias that ask for gradients."""
    torch.manual_seed(seed)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in ((num, width), (size, width), (size,))]


def plain(hidden, weight, bias, wanted: Reading) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.T + bias
    logprobs = torch.log_softmax(logits if wanted.temperatures is None else logits / wanted.temperatures, -1)
    return logprobs[wanted.rows, wanted.token_ids], -(logprobs.exp() * logprobs).sum(-1)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), num=st.integers(1, 9), size=st.integers(2, 30), per_chunk=st.integers(1, 9), warm=st.booleans())
def test_values_and_gradients_are_log_softmaxes_however_logits_are_cut(seed, num, size, per_chunk, warm):
    inputs = layer(num, size, seed=seed)
    rows = sorted({*range(num), 0})
    pairs = sorted({(row, (seed + step * row) % size) for row in rows for step in (0, 1, 3)})
    wanted = reading([row for row, _ in pairs], [token for _, token in pairs], torch.rand(num, 1, dtype=torch.float64) + 0.5 if warm else None)
    gradient = torch.randn(len(pairs), dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "CHUNK_BYTES", 4 * size * per_chunk)
        logprobs, entropy = _Read.apply(*inputs, wanted)
        found = torch.autograd.grad(logprobs, inputs, gradient)
    expected, expected_entropy = plain(*inputs, wanted)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    for got, right in zip(found, torch.autograd.grad(expected, inputs, gradient), strict=True):
        torch.testing.assert_close(got, right)


class Largest(TorchDispatchMode):
    """The most numbers any float32 tensor held."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        floats = [each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor) and each.dtype == torch.float32]
        self.numbers = max([self.numbers, *floats])
        return result


@pytest.mark.parametrize("narrow", [None, torch.bfloat16])
def test_no_float32_tensor_holds_all_logits(monkeypatch, narrow):
    num, size = 64, 1000
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * size * 4)
    monkeypatch.setattr(head, "KEPT_BYTES", 2 * size * 8)
    hidden, weight, _ = layer(num, size, dtype=torch.float32)
    with Largest() as largest:
        logprobs, _ = _Read.apply(hidden, weight, None, reading(list(range(num)), list(range(num)), narrow=narrow))
        logprobs.sum().backward()
    assert largest.numbers == max(4 * size, weight.numel())


@pytest.mark.parametrize(("kept_bytes", "allowed"), [(1 << 20, 0.005), (0, 0.05)])
def test_under_autocast_values_are_exact_and_gradients_nearly(monkeypatch, kept_bytes, allowed):
    monkeypatch.setattr(head, "KEPT_BYTES", kept_bytes)
    hidden, weight, bias = layer(16, 300, width=32, dtype=torch.float32)
    rows, token_ids = list(range(16)), [7 * row for row in range(16)]
    logprobs, _ = _Read.apply(hidden, weight, bias, reading(rows, token_ids, narrow=torch.bfloat16))
    expected, _ = plain(hidden, weight, bias, reading(rows, token_ids))
    torch.testing.assert_close(logprobs, expected)
    for got, right in zip(*(torch.autograd.grad(each.sum(), (hidden, weight)) for each in (logprobs, expected)), strict=True):
        assert float((got - right).norm() / right.norm()) < allowed


def test_the_gradient_of_a_nearly_certain_token_survives_bfloat16():
    hidden, weight = torch.tensor([[1.0]], requires_grad=True), torch.tensor([[9.0], [0.0]], requires_grad=True)
    logprobs, _ = _Read.apply(hidden, weight, None, reading([0], [0], narrow=torch.bfloat16))
    (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
    assert gradient[0].item() == pytest.approx(1.234e-4, rel=0.01)  # 1 - p, where p rounds to 1 in bfloat16


def test_without_gradient_nothing_is_kept():
    hidden, weight, _ = layer(3, 5, dtype=torch.float32)
    with torch.no_grad():
        logprobs, _ = _Read.apply(hidden, weight, None, reading([0, 2], [1, 4], narrow=torch.bfloat16))
    assert not logprobs.requires_grad
