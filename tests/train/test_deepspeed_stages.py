"""Every ZeRO stage and every way to offload, in one process, against the torch backend at the seam both share."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rlpipe.policies import causal_lm, layers
from rlpipe.policies.evaluation import checkpoint_activations
from rlpipe.policies.packing import Batch, collate, pack
from rlpipe.train.backends import AdamW, Backend, DeepSpeed
from rlpipe.train.backends.deepspeed_backend import BUCKET
from rlpipe.train.batching import sequence_of
from rlpipe.train.trainable import load_trainable
from tests.factories import tiny_model
from tests.train.factories import config, random_groups

ADAMW = AdamW(betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, max_grad_norm=0.5)
ALL: dict[str, Any] = {"type": "all"}
LAST: dict[str, Any] = {"type": "last_layers", "num": 1}
TORCH = {"type": "torch"}
pytestmark = pytest.mark.deepspeed


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("start") / "model")


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    return [collate(pack([sequence_of(row) for row in group], 1000)) for group in random_groups(4)]


@contextmanager
def opened(folder: Path, trainable: dict[str, Any] = ALL, *, dtype: str = "float32", checkpointing: bool = False, **backend: Any) -> Iterator[Backend]:
    settings = config(backend={"dtype": dtype, **backend}, trainable=trainable)
    module = load_trainable(folder, settings.trainable, seed=0)
    layers.shorten(module)
    if checkpointing:
        checkpoint_activations(module)
    holder = settings.backend.open(module, ADAMW)
    try:
        yield holder
    finally:
        holder.close()


def curve(backend: Backend, batches: list[Batch], num_steps: int) -> list[float]:
    """The loss of each optimizer step, of two micro-batches each."""
    losses = []
    for number in range(num_steps):
        total = 0.0
        for batch, last in ((batches[2 * number % 4], False), (batches[2 * number % 4 + 1], True)):
            loss = -backend.evaluate(batch, {"logprobs"}).logprobs.mean() / 2
            backend.backward(loss, last=last)
            total += float(loss.detach())
        losses.append(total)
        assert backend.step(1e-3) > 0
    return losses


def saved(backend: Backend, folder: Path, source: Path) -> tuple[Path, tuple[dict[str, torch.Tensor], int]]:
    """The weights as a folder, and the optimizer's state."""
    with backend.whole_weights():
        causal_lm.save_module(folder, backend.module, source)
    tensors, num_steps = backend.optimizer_state()
    return folder, ({name: value.clone() for name, value in tensors.items()}, num_steps)


def logprobs(backend: Backend, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        return backend.evaluate(batch, {"logprobs"}).logprobs


@pytest.fixture(scope="module")
def torchs(tmp_path_factory: pytest.TempPathFactory, start: Path, batches: list[Batch]) -> dict[str, Any]:
    """What torch gives: 23 losses by kind of trainable part, and weights and state after 20 of them."""
    found = {}
    for trainable in (ALL, LAST):
        with opened(start, trainable, **TORCH) as backend:
            losses = curve(backend, batches, 20)
            after = saved(backend, tmp_path_factory.mktemp("torch") / "model", start)
            found[trainable["type"]] = (losses + curve(backend, batches, 3), *after)
    return found


@pytest.mark.parametrize(
    ("stage", "offload", "trainable"),
    [(0, "none", ALL), (1, "none", LAST), (1, "optimizer", ALL), (2, "none", ALL), (2, "optimizer", LAST), (3, "none", LAST), (3, "all", ALL)],
    ids=str,
)
def test_a_stage_gives_torchs_losses_and_state_moves_both_ways(
    tmp_path: Path, start: Path, batches: list[Batch], torchs: dict[str, Any], stage: int, offload: str, trainable: dict[str, Any]
) -> None:
    """Cases F01 and F02: 20 optimizer steps, saved whole, loaded by plain torch with equal log-probs, and gone on from; then the other way round."""
    expected, weights, state = torchs[trainable["type"]]
    zero = {"type": "deepspeed", "zero_stage": stage, "offload": offload}
    with opened(start, trainable, **zero) as backend:
        assert curve(backend, batches, 20) == pytest.approx(expected[:20], abs=1e-4)
        probe = logprobs(backend, batches[3])
        folder, kept = saved(backend, tmp_path / "model", start)
    assert kept[1] == 20
    assert {name: value.shape for name, value in kept[0].items()} == {name: value.shape for name, value in state[0].items()}
    with opened(folder, trainable, **TORCH) as backend:
        torch.testing.assert_close(logprobs(backend, batches[3]), probe, rtol=0, atol=1e-6)
        backend.load_optimizer_state(*kept)
        assert curve(backend, batches, 3) == pytest.approx(expected[20:], abs=1e-4)
    with opened(weights, trainable, **zero) as backend:
        backend.load_optimizer_state(*state)
        assert curve(backend, batches, 3) == pytest.approx(expected[20:], abs=1e-4)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stage_trains_an_adapter_and_computes_activations_again(start: Path, batches: list[Batch], dtype: str, stage: int) -> None:
    pytest.importorskip("peft")
    adapter = {"type": "lora", "rank": 2}
    with opened(start, adapter, dtype=dtype, **TORCH) as backend:
        expected = curve(backend, batches, 6)
    with opened(start, adapter, dtype=dtype, checkpointing=True, type="deepspeed", zero_stage=stage) as backend:
        assert curve(backend, batches, 6) == pytest.approx(expected, abs=1e-4 if dtype == "float32" else 1e-2)
        assert all("lora" in name for name in backend.parameters)  # type: ignore[attr-defined]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_moves_nothing(start: Path, batches: list[Batch], stage: int) -> None:
    with opened(start, type="deepspeed", zero_stage=stage) as backend:
        before = logprobs(backend, batches[0])
        backend.backward((backend.evaluate(batches[0], {"logprobs"}).logprobs.sum() * 0).sqrt(), last=True)
        assert not np.isfinite(backend.step(1e-3))
        assert torch.equal(logprobs(backend, batches[0]), before)


def test_zero_3_takes_its_own_linear_back(start: Path, batches: list[Batch]) -> None:
    before = torch.nn.functional.linear
    with opened(start, type="deepspeed", zero_stage=3):
        pass
    assert torch.nn.functional.linear is before


@pytest.mark.parametrize(("stage", "offload", "lowest"), [(0, "optimizer", "1 or more"), (2, "all", "3")])
def test_an_offload_that_the_stage_cannot_do_is_refused(stage: int, offload: str, lowest: str) -> None:
    with pytest.raises(ValidationError, match=f"offload: {offload} needs zero_stage {lowest}; got {stage}"):
        DeepSpeed(zero_stage=stage, offload=offload)


def test_offload_reaches_deepspeed(start: Path) -> None:
    with opened(start, type="deepspeed", zero_stage=3, offload="all") as backend:
        zero = backend.engine._config.zero_config  # type: ignore[attr-defined]
        assert (zero.offload_optimizer.device, zero.offload_param.device, zero.reduce_bucket_size) == ("cpu", "cpu", BUCKET)
        assert (backend.optimizer.offload_optimizer, backend.optimizer.offload_param) == (True, True)  # type: ignore[attr-defined]
        assert type(backend._inner) is torch.optim.AdamW  # type: ignore[attr-defined]


@pytest.mark.recipes
@pytest.mark.skipif(shutil.which("g++") is None, reason="DeepSpeed compiles its optimizer with g++")
def test_a_compiled_optimizer_gives_torchs_losses(start: Path, batches: list[Batch]) -> None:
    with opened(start, **TORCH) as backend:
        expected = curve(backend, batches, 6)
    with opened(start, type="deepspeed", zero_stage=2, offload="optimizer", compile_ops=True) as backend:
        assert curve(backend, batches, 6) == pytest.approx(expected, abs=1e-4)
        assert type(backend._inner).__name__ == "DeepSpeedCPUAdam"  # type: ignore[attr-defined]
