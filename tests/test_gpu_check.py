"""`tools/gpu_check.py` measures what is there and names what is not."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "gpu_check.py"
NUMBERS = {"tokens_per_second": 10.0, "gap_max": 0.01, "gap_p95": 0.001, "host_gib": 1.0}


@pytest.fixture(scope="module")
def check() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def work(check: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    assert check.make_model(folder, argparse.Namespace(model="char-lm")) == {"model": "char-lm"}
    return folder


def test_an_engine_and_a_backend_are_measured(check: Any, work: Path) -> None:
    options = argparse.Namespace(new_tokens=4)
    engine, backend = check.torch_engine(work, options), check.backend_part(work, options, "torch")
    assert 0 < engine["tokens"] <= 8 * 8 * 4
    assert engine["tokens"] == backend["tokens"]
    for found in (engine, backend):
        assert 0 <= found["gap_p95"] <= found["gap_max"] < 0.1
        assert found["host_gib"] > 0


def test_missing_packages_are_named_without_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-S", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("gpu-check: not installed: torch, transformers, numpy")
    assert "Traceback" not in done.stderr


def test_a_part_that_fails_says_its_last_word(check: Any, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--part-of-nothing"])
    found = check.run_part("torch backend", str(work), argparse.Namespace(parts=["torch backend"], seconds=100.0), check.time.monotonic())
    assert found["why"].startswith("failed: ")
    assert found["why"].endswith("unrecognized arguments: --part-of-nothing")


def test_a_part_without_a_model_or_time_is_not_begun(check: Any, work: Path, tmp_path: Path) -> None:
    options = argparse.Namespace(parts=["torch engine"], seconds=0.0)
    assert check.run_part("torch engine", str(tmp_path), options, check.time.monotonic()) == {"why": "no model"}
    assert check.run_part("torch engine", str(work), options, check.time.monotonic()) == {"why": "no time left"}
    assert check.run_part("torch backend", str(work), options, check.time.monotonic()) == {"why": "not asked for"}


@pytest.mark.parametrize(("gap", "code"), [(0.01, 0), (0.6, 1), (float("nan"), 1)])
def test_a_wide_gap_fails(check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], gap: float, code: int) -> None:
    found = {"model": {"model": "char-lm"}, **{name: {"why": "not installed"} for name in check.PARTS}, "torch engine": {**NUMBERS, "gap_max": gap}}
    with pytest.raises(SystemExit) as ended:
        check.report(argparse.Namespace(max_gap=0.5, out=tmp_path / "out"), found, 1.0)
    assert ended.value.code == code
    assert "| vllm engine | not installed |" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "gpu_check.json").read_text())["too_wide"] == (["torch engine"] if code else [])


def test_nothing_measured_fails(check: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check.report(argparse.Namespace(max_gap=0.5, out=None), {"model": {"why": "failed: x"}, **{name: {"why": "no model"} for name in check.PARTS}}, 1.0)
    assert ended.value.code == 1
    assert "no model" in capsys.readouterr().out
