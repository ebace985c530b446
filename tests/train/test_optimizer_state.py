"""Adam's moments in few bits: how they are rounded, that training goes on exactly from them, and that it learns as with float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file

from rlpipe.errors import ConfigError
from rlpipe.policies import causal_lm
from rlpipe.train.backends import AdamW, Torch
from rlpipe.train.backends.base import Snapshot
from rlpipe.train.backends.moments import BLOCK, MOMENTS, SMALL, codebook, in_width, num_bytes, zeros
from rlpipe.train.backends.narrow_adamw import CHUNK, NarrowAdamW
from rlpipe.train.section import Config
from tests.factories import tiny_model, tiny_policy
from tests.train.factories import config, random_groups
from tests.train.test_fit import WEIGHTS, contents, train

STATE = Path("trainer/optimizer.safetensors")
WIDTHS = ["float32", "bfloat16", "int8"]
NARROW = WIDTHS[1:]


@pytest.fixture(scope="module")
def policy_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("start") / "policy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def narrow(state: str, **changes: Any) -> Config:
    return config(**{"groups_per_step": 3, "learning_rate": 1e-3, "optimizer": {"type": "adamw", "state": state}, **changes})


def opened(folder: Path, width: str, seed: int = 0) -> Any:
    return Torch(dtype="float32").open(causal_lm.load_module(folder), AdamW((0.9, 0.999), 1e-8, 0.0, 1.0, width, seed))


def learn(backend: Any, num_steps: int, rate: float = 1e-3) -> list[float]:
    """Losses of next-token prediction on one fixed text."""
    tokens = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]])
    losses = []
    for _ in range(num_steps):
        loss = backend.module(tokens, labels=tokens, use_cache=False).loss
        backend.backward(loss, last=True)
        backend.step(rate)
        losses.append(float(loss.detach()))
    return losses


def test_narrow_moments_learn_as_float32_does(folder: Path) -> None:
    """The loss falls from 4.8 below 0.1 in 20 steps; at no step is it more than 0.001 (bfloat16) or 0.005 (int8) off."""
    curves = {width: np.array(learn(opened(folder, width), 20)) for width in WIDTHS}
    assert curves["float32"][0] > 4.5 > 0.1 > curves["float32"][-1]
    assert 0 < np.abs(curves["bfloat16"] - curves["float32"]).max() < 0.001
    assert 0 < np.abs(curves["int8"] - curves["float32"]).max() < 0.005


@pytest.mark.parametrize("width", NARROW)
def test_a_second_moment_falls_by_a_thousandth_a_step(width: str) -> None:
    """500 steps without gradient leave 0.999 ** 500 = 0.606 of it; rounded to the nearest, all of it would stay."""
    value = torch.nn.Parameter(torch.zeros(SMALL))
    optimizer = NarrowAdamW([{"params": [value], "weight_decay": 0.0}], (0.9, 0.999), 1e-8, width, seed=0)
    for step in range(501):
        value.grad = torch.zeros(SMALL) if step else torch.linspace(0.1, 1, SMALL)
        optimizer.step()
    left = optimizer.state[value]["exp_avg_sq"].read(0, SMALL) / (0.001 * torch.linspace(0.1, 1, SMALL) ** 2)
    assert abs(float(left.mean()) - 0.606) < 0.02
    assert left.std() < 0.2


@given(beta2=st.floats(0.5, 0.999), decay=st.floats(0, 0.1), num=st.integers(1, 3 * BLOCK), num_steps=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_in_float32_it_is_torchs_adamw(beta2: float, decay: float, num: int, num_steps: int) -> None:
    start = torch.linspace(-1, 1, num)
    values = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    groups = [[{"params": [value], "weight_decay": decay}] for value in values]
    ours = NarrowAdamW(groups[0], (0.9, beta2), 1e-8, "float32", seed=0)
    torchs = torch.optim.AdamW(groups[1], betas=(0.9, beta2), eps=1e-8)
    for step in range(num_steps):
        for optimizer, value in zip((ours, torchs), values, strict=True):
            value.grad = torch.sin(torch.arange(num) + float(step))
            optimizer.param_groups[0]["lr"] = 1e-2
            optimizer.step()
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("width", NARROW)
def test_chunks_change_nothing_but_the_noise(width: str) -> None:
    """A parameter longer than a chunk, whose last block is not full."""
    value = torch.nn.Parameter(torch.ones(CHUNK + 5 * BLOCK + 3))
    optimizer = NarrowAdamW([{"params": [value], "weight_decay": 0.0}], (0.9, 0.999), 1e-8, width, seed=0)
    optimizer.param_groups[0]["lr"] = 0.5
    value.grad = torch.full_like(value, 0.25)
    optimizer.step()
    torch.testing.assert_close(value, torch.full_like(value, 0.5))


@pytest.mark.parametrize("moment", MOMENTS)
def test_codes_are_a_tree_of_decades(moment: str) -> None:
    codes = codebook(moment == "exp_avg")
    assert len(codes.unique()) == 256
    assert (codes[-1], (codes == 0).sum()) == (1, 1)
    top = (codes > 0.1).sum() - 1  # but for the 1
    assert (top, ((codes > 0.01) & (codes < 0.1)).sum()) == ((64, 32) if moment == "exp_avg" else (128, 64))


@pytest.mark.parametrize("width", NARROW)
@pytest.mark.parametrize("moment", MOMENTS)
def test_rounding_is_to_a_neighbour_and_right_on_average(width: str, moment: str) -> None:
    numbers = torch.linspace(1e-4, 0.9, SMALL) * (torch.tensor([1.0, -1.0]).repeat(SMALL // 2) if moment == "exp_avg" else 1)
    numbers[::BLOCK] = 1.0  # the scale of every block
    held, generator = zeros(numbers, width, moment), torch.Generator().manual_seed(0)
    rounded = []
    for _ in range(400):
        noise = torch.empty(SMALL, dtype=torch.int32).random_(-(2**31), 2**31 - 1, generator=generator)
        held.write(0, numbers, noise)
        rounded.append(held.read(0, SMALL))
    off = torch.stack(rounded) - numbers
    widest = 0.0142 if width == "int8" else 2**-8  # between two codes, or two neighbours in bfloat16
    assert off.abs().max() <= widest
    assert off.mean(0).abs().max() < widest / 5
    again = rounded[-1].clone()
    held.write(0, again, torch.full((SMALL,), -1, dtype=torch.int32))
    assert torch.equal(held.read(0, SMALL), again) == (moment == "exp_avg_sq" or width == "bfloat16" or bool((again[::BLOCK] == 1).all()))


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    numbers = torch.full((SMALL,), 1e-12)
    numbers[0], numbers[1], numbers[5] = 1.0, 0.0, 0.0
    held = zeros(numbers, "int8", "exp_avg_sq")
    held.write(0, numbers, torch.zeros(SMALL, dtype=torch.int32))
    assert held.read(0, BLOCK).eq(0).nonzero().flatten().tolist() == [1, 5]


@pytest.mark.parametrize("width", WIDTHS)
def test_bytes_of_the_state_are_those_stated(folder: Path, width: str) -> None:
    """Four bytes for each trained weight in bfloat16, a little over two in int8; parameters under 4096 numbers stay in float32."""
    backend = opened(folder, width)
    learn(backend, 1)
    tensors, num_steps = backend.optimizer_state()
    held = sum(value.numel() * value.element_size() for value in tensors.values())
    assert (held, num_steps) == (sum(num_bytes(value.numel(), width) for value in backend.parameters.values()), 1)
    large = [value for value in backend.parameters.values() if value.numel() >= SMALL]
    share = sum(num_bytes(value.numel(), width) for value in large) / sum(value.numel() for value in large)
    assert share == {"float32": 8, "bfloat16": 4, "int8": pytest.approx(2 + 8 / BLOCK, rel=1e-3)}[width]


@pytest.mark.parametrize("width", NARROW)
def test_a_round_goes_on_exactly_in_the_width_it_was_saved(tmp_path: Path, policy_in: Path, width: str) -> None:
    groups = random_groups(3)
    whole = train(tmp_path, narrow(width, epochs=2, run={"seed": 5}), groups, policy_in, "whole")[1]
    half = train(tmp_path, narrow(width, run={"seed": 5}), groups, policy_in, "half")[1]
    resumed = train(tmp_path, narrow(width, run={"seed": 5}), groups, half, "resumed")[1]
    again = train(tmp_path, narrow(width, run={"seed": 5}), groups, half, "again")[1]
    assert contents(resumed) == contents(again)
    assert {name: contents(resumed)[name] for name in (WEIGHTS.as_posix(), STATE.as_posix())} == {
        name: contents(whole)[name] for name in (WEIGHTS.as_posix(), STATE.as_posix())
    }
    kind = {"bfloat16": torch.bfloat16, "int8": torch.uint8}[width]
    tensors = load_file(half / STATE)
    kinds = {name: value.dtype for name, value in tensors.items() if name.startswith(("exp_avg/", "exp_avg_sq/"))}
    assert {name for name, found in kinds.items() if found == kind} == {name for name in kinds if tensors[name].numel() >= SMALL}


def test_the_runs_seed_decides_the_noise(tmp_path: Path, policy_in: Path) -> None:
    one, other = (train(tmp_path, narrow("bfloat16", run={"seed": seed}), random_groups(3), policy_in, f"{seed}")[1] for seed in (0, 1))
    assert contents(one)[STATE.as_posix()] != contents(other)[STATE.as_posix()]


@pytest.mark.parametrize("before", WIDTHS)
@pytest.mark.parametrize("after", WIDTHS)
def test_a_state_goes_on_in_another_width(folder: Path, before: str, after: str) -> None:
    first, second = opened(folder, before), opened(folder, after)
    learn(first, 3)
    tensors, num_steps = first.optimizer_state()
    second.load_optimizer_state(tensors, num_steps)
    found, steps = second.optimizer_state()
    assert (steps, found.keys()) == (3, in_width(tensors, after).keys())
    wide, back = in_width(tensors, "float32"), in_width(found, "float32")
    for name, value in wide.items():
        assert (value - back[name]).abs().max() <= 0.01 * value.abs().max()
        if before == after or after == "float32":
            assert torch.equal(value, back[name])


@pytest.mark.parametrize("width", WIDTHS)
def test_what_was_put_aside_is_taken_back_whole(folder: Path, width: str) -> None:
    backend = opened(folder, width)
    early: Snapshot = backend.snapshot()
    first = learn(backend, 2)
    late = backend.snapshot()
    onward = learn(backend, 3)
    backend.restore(late)
    assert learn(backend, 3) == onward
    backend.restore(early)
    assert learn(backend, 2) == first
    assert early.num_steps == 0
    assert not early.moments


def test_a_state_of_other_parameters_is_refused(folder: Path) -> None:
    backend = opened(folder, "int8")
    learn(backend, 1)
    tensors, num_steps = backend.optimizer_state()
    name = "exp_avg_scales/model.layers.0.mlp.up_proj.weight"
    for wrong in ({**tensors, name: tensors[name][1:]}, {key: value for key, value in tensors.items() if key != name}):
        with pytest.raises(ConfigError, match=f"{name} is (of another shape|missing)"):
            backend.load_optimizer_state(wrong, num_steps)


def test_deepspeed_refuses_narrow_moments_at_configuration() -> None:
    with pytest.raises(ValidationError, match=r"backend.type deepspeed cannot do what train.optimizer.state: int8 needs; .*; do: .*backend.type: torch"):
        narrow("int8", backend={"type": "deepspeed"})


@pytest.mark.slow
def test_two_ranks_round_alike(tmp_path: Path, policy_in: Path) -> None:
    """Gradients of two ranks are those of one up to rounding, so that a few codes of a hundred thousand fall to the other side."""
    groups, local = random_groups(5), {"type": "local", "num_processes": 2}
    one = train(tmp_path, narrow("int8", groups_per_step=2), groups, policy_in, "one")[1]
    two = train(tmp_path, narrow("int8", groups_per_step=2, launcher=local), groups, policy_in, "two")[1]
    first, second = load_file(one / WEIGHTS), load_file(two / WEIGHTS)
    off = torch.cat([(first[name] - second[name]).abs().flatten() for name in first])
    assert (off > 1e-6).float().mean() < 1e-3
    assert off.max() < 1e-3
