"""DeepSpeed in one process does what the torch backend does; without it everything else still works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlpipe.policies import causal_lm
from tests.factories import tiny_policy
from tests.train.factories import config, random_groups
from tests.train.test_fit import WEIGHTS, train


@pytest.fixture(scope="module")
def policy_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("start") / "policy")


@pytest.mark.deepspeed
def test_deepspeed_trains_like_torch_and_the_state_moves_between_them(tmp_path, policy_in):
    settings = {"groups_per_step": 2, "micro_batch": 1, "learning_rate": 1e-3, "max_grad_norm": 0.1}
    torch_report, one = train(tmp_path, config(**settings), random_groups(4), policy_in, "torch-1")
    report, other = train(tmp_path, config(**settings, backend={"type": "deepspeed", "dtype": "float32"}), random_groups(4), policy_in, "deepspeed-1")
    for name in ("loss", "grad_norm", "entropy", "optimizer_steps", "policy_version"):
        assert report.numbers[name] == pytest.approx(torch_report.numbers[name], rel=1e-4)
    assert causal_lm.read_state(other) == causal_lm.read_state(one) == {"policy_version": 2, "optimizer_steps": 2}
    assert_close(one, other)
    _, two = train(tmp_path, config(**settings), random_groups(4), other, "torch-2")
    _, three = train(tmp_path, config(**settings, backend={"type": "deepspeed", "dtype": "float32"}), random_groups(4), one, "deepspeed-2")
    assert_close(two, three)
    assert causal_lm.read_state(three)["optimizer_steps"] == 4


@pytest.mark.deepspeed
def test_deepspeed_casts_and_freezes_like_torch(tmp_path, policy_in):
    settings = {"groups_per_step": 2, "trainable": {"type": "last_layers", "num": 1}}
    reports = [
        train(tmp_path, config(**settings, backend={"type": kind, "dtype": "bfloat16"}), random_groups(4), policy_in, kind)[0].numbers
        for kind in ("torch", "deepspeed")
    ]
    for name in ("loss", "grad_norm", "entropy"):
        assert reports[0][name] == pytest.approx(reports[1][name], rel=1e-2)


def assert_close(one: Path, other: Path) -> None:
    for name in (WEIGHTS, "trainer/optimizer.safetensors"):
        first, second = load_file(one / name), load_file(other / name)
        assert first.keys() == second.keys()
        for key in first:
            torch.testing.assert_close(first[key], second[key], rtol=1e-3, atol=1e-5)


SCRIPT = """
import sys
from pathlib import Path
from tests.train.factories import config, random_groups
from tests.train.test_fit import train
from rlpipe.errors import EngineError
folder, policy = map(Path, sys.argv[1:])
print(train(folder, config(), random_groups(2), policy, "torch")[0].numbers["policy_version"])
try:
    train(folder, config(backend={"type": "deepspeed", "dtype": "float32"}), random_groups(2), policy, "deepspeed")
except EngineError as error:
    print(error)
"""


def test_a_broken_deepspeed_is_one_line_and_only_where_it_is_asked_for(tmp_path, policy_in):
    stub = tmp_path / "stub" / "deepspeed"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise RuntimeError('no CUDA runtime found')\n")
    paths = os.pathsep.join([str(stub.parent), str(Path(__file__).parents[2]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(policy_in)], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=True
    )
    version, message = done.stdout.strip().splitlines()
    assert version == "1"
    assert message.startswith("backend.type deepspeed cannot be used; got RuntimeError: no CUDA runtime found")
