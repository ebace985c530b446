"""The trainer's own norms, rotation and attention: transformers' values bit for bit, and gradients as exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpipe.policies import causal_lm, layers, packing
from rlpipe.policies.layers import _Norm, _Rotation
from rlpipe.train.backends.base import autocast
from tests.factories import tiny_model

FAMILIES = ("llama", "mistral", "qwen2")
PROMPT = [5, 9, 4, 7]
CONTINUATIONS = ([6, 8, 3], [6, 8, 10, 11, 12], [13])


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param, initializer_range=0.1)


def batch(shared: bool = True) -> packing.Batch:
    rows = [np.array(PROMPT + more) for more in CONTINUATIONS]
    sequences = [packing.ScoredSequence(ids, np.arange(len(ids)) >= len(PROMPT), np.ones(len(ids))) for ids in rows]
    return packing.collate(packing.pack(sequences, 64, shared))


def evaluated(folder: Path, dtype: str, short: bool, shared: bool = True) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    module: Any = causal_lm.load_module(folder)
    if short:
        layers.shorten(module)
    with autocast(module, dtype):
        found = causal_lm.evaluate(module, batch(shared)).logprobs
    found.mean().backward()
    return found.detach(), {name: value.grad for name, value in module.named_parameters()}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative, over all weights."""
    gap = sum(float((found[name] - expected[name]).double().square().sum()) for name in expected)
    return float((gap / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5)


@pytest.mark.parametrize("shared", [True, False], ids=["tree", "padded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_those_of_the_library_bit_for_bit(folder, dtype, shared):
    assert torch.equal(evaluated(folder, dtype, True, shared)[0], evaluated(folder, dtype, False, shared)[0])


def test_gradients_are_those_of_the_library(folder):
    assert distance(evaluated(folder, "float32", True)[1], evaluated(folder, "float32", False)[1]) < 1e-5


def test_gradients_in_bfloat16_are_as_exact_as_the_librarys_on_padded_rows(folder):
    exact = evaluated(folder, "float32", False, shared=False)[1]
    librarys = distance(evaluated(folder, "bfloat16", False, shared=False)[1], exact)
    assert 0 < distance(evaluated(folder, "bfloat16", True)[1], exact) < 1.25 * librarys


def test_layers_of_another_family_are_left_alone(tmp_path):
    module: Any = causal_lm.load_module(tiny_model(tmp_path / "model", "gpt2"))
    layers.shorten(module)
    assert not any("forward" in vars(part) for part in module.get_decoder().modules())


def test_a_norm_in_another_precision_takes_the_librarys_way(folder):
    module: Any = causal_lm.load_module(folder)
    norm = module.get_decoder().layers[0].input_layernorm
    hidden = torch.randn(3, norm.weight.shape[0], dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    expected = norm(hidden)
    layers.shorten(module)
    assert torch.equal(norm(hidden), expected)


def test_gradients_of_norm_and_rotation_are_those_of_differences():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in ((2, 3, 4), (4,)))
    assert torch.autograd.gradcheck(lambda *given: _Norm.apply(*given, 1e-6, torch.float64), (hidden, weight))
    heads = torch.randn(3, 2, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    angles = torch.tensor([0.0, 0.3, 2.0], dtype=torch.float64)[:, None, None].expand(3, 1, 4)
    assert torch.autograd.gradcheck(lambda given: _Rotation.apply(given, angles.cos(), angles.sin()), (heads,))
