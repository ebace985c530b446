"""What differs between two runs, from records a reader can check by eye."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpipe import cli, records
from rlpipe.comparing import Difference, compare


def ran(folder: Path, *, loss: float = 0.5, policy: str = "aa", rate: float = 1e-5, torch: str = "2.13", seconds: float = 1.0) -> Path:
    """A folder with the records of a start and of two steps."""
    environment = {"python": "3.11", "packages": {"torch": torch}, "cpu": {"model": "x", "features": ["avx2", "fma"]}}

    def record(step: str, index: int, outputs: dict[str, str], **numbers: Any) -> None:
        shared = {"reasons": {}, "inputs": {}, "outcome": None, "seconds": seconds, "environment": environment}
        params = {"learning_rate": rate} if step == "train" else {}
        records.write(folder, {"step": step, "round": index, "numbers": numbers, "outputs": outputs, "params": params, **shared})

    record("start", 0, {"policy": "00"}, greedy_accuracy=0.25)
    record("rollout", 1, {"trajectories": "tt", "progress": "pp"}, num_groups=4)
    record("train", 1, {"policy": policy}, loss=loss, seconds_per_optimizer_step=seconds)
    return folder


def test_the_same_run_differs_in_nothing_but_its_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran(tmp_path / "a", seconds=1), ran(tmp_path / "b", seconds=9)
    assert cli.main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == ["environment the same", "params the same", "artifacts all 4 the same", "numbers the same"]


def test_what_was_changed_and_what_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = ran(tmp_path / "a"), ran(tmp_path / "b", loss=0.25, policy="bb", rate=2e-5, torch="2.12")
    found = compare(first, second)
    assert found.environment == [Difference("packages.torch", "2.13", "2.12")]
    assert found.params == [Difference("train.learning_rate", 1e-5, 2e-5)]
    assert found.artifacts == [Difference("train of round 1: policy", "aa", "bb")]
    assert found.numbers == [Difference("train of round 1: loss", 0.5, 0.25)]
    assert cli.main(["diff", str(first), str(second)]) == 0
    out = capsys.readouterr().out
    assert "1 of 4 differ, first train of round 1: policy" in out
    assert "train of round 1: loss  0.5 -> 0.25  (-0.25)" in out
    assert cli.main(["diff", "--json", str(first), str(second)]) == 0
    assert json.loads(capsys.readouterr().out)["params"] == [{"name": "train.learning_rate", "first": 1e-5, "second": 2e-5}]


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", str(tmp_path), str(tmp_path)]) == 6
    assert "no records of a run" in capsys.readouterr().err
