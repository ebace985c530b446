"""`configs/tiny.yaml` learns, on every engine and backend."""

import json
import shutil
from pathlib import Path

import pytest

from rlpipe import dataset
from tests.integration.conftest import run_tiny


@pytest.fixture
def with_model(tiny: Path, tmp_path: Path) -> Path:
    """A folder where the tiny model is made already."""
    shutil.copytree(tiny / "models", tmp_path / "models")
    (tmp_path / "reports/00").mkdir(parents=True)
    shutil.copy(tiny / "reports/00/model.json", tmp_path / "reports/00/model.json")
    return tmp_path


@pytest.mark.slow
def test_sampled_reward_rises(tiny: Path) -> None:
    rows = json.loads((tiny / "reports/run.json").read_text())["rounds"]
    assert [row["outcome"] for row in rows] == ["trained"] * 3
    assert rows[-1]["sampled_reward"] - rows[0]["sampled_reward"] >= 0.2
    assert max(row["logprob_gap_max"] for row in rows) <= 1e-4


@pytest.mark.slow
@pytest.mark.deepspeed
def test_deepspeed_trains_as_torch_does(tiny: Path, with_model: Path) -> None:
    (row,) = run_tiny(with_model, "--rounds", "1", "--set", "backend={type: deepspeed, dtype: float32}")
    first = json.loads((tiny / "reports/run.json").read_text())["rounds"][0]
    assert row["optimizer_steps"] == first["optimizer_steps"]
    assert row["sampled_reward"] == first["sampled_reward"]
    assert row["logprob_gap_max"] <= 1e-4
    assert row["greedy_accuracy"] == pytest.approx(first["greedy_accuracy"], abs=0.03)


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_generates_what_the_trainer_computes(tiny: Path, with_model: Path) -> None:
    (row,) = run_tiny(with_model, "--rounds", "1", "--set", "engine={type: vllm, dtype: float32}")
    first = json.loads((tiny / "reports/run.json").read_text())["rounds"][0]
    assert row["logprob_gap_max"] <= 1e-3
    assert row["groups"] == first["groups"]
    assert row["sampled_reward"] == pytest.approx(first["sampled_reward"], abs=0.05)
    assert {row.finish_reason for row in dataset.read(with_model / "rounds/01/trajectories")} <= {"stop", "length"}
