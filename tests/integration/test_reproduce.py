"""A run repeated in a folder of its own: the same bytes here, and named differences where the CPU's instructions are others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe import cli, layout
from rlpipe.reproducing import judged


def test_a_run_comes_out_identical(micro: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", str(micro), "--out", str(tmp_path / "again")]) == 0
    out = capsys.readouterr().out
    assert "verdict      identical" in out
    assert "artifacts    all 12 the same" in out
    assert not (tmp_path / "again" / "mlflow.db").exists()
    assert cli.main(["reproduce", str(micro), "--out", str(tmp_path / "again")]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_another_instruction_set_is_named(micro: Path, tmp_path: Path) -> None:
    """Sums in another order: other bytes, and the first artifact that has them."""
    environ = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    command = [sys.executable, "-m", "rlpipe.cli", "reproduce", str(micro), "--out", str(tmp_path / "again")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 17), done.stderr[-2000:]
    assert "verdict      identical" not in done.stdout
    assert "cpu.ATEN_CPU_CAPABILITY  (not set) -> default" in done.stdout
    assert "differ, first " in done.stdout


def test_accuracies_further_apart_than_chance_are_different(micro: Path, tmp_path: Path) -> None:
    """200 tasks at 0.50 and 0.55 differ by one standard error; at 0.50 and 0.65 by three."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        shutil.copytree(micro / layout.REPORTS, folder / layout.REPORTS)
    train = folders[1] / layout.report_path("train", 1)
    record = json.loads(train.read_text())
    train.write_text(json.dumps({**record, "outputs": {"policy": "0" * 64}}))
    for other, verdict in ((0.55, "equal within chance"), (0.65, "different")):
        for folder, value in zip(folders, (0.5, other), strict=True):
            content = json.loads((folder / layout.RUN_REPORT).read_text())
            content["rounds"][0] |= {"greedy_accuracy": value, "num_eval_tasks": 200}
            (folder / layout.RUN_REPORT).write_text(json.dumps(content))
        assert judged(*folders).verdict == verdict
