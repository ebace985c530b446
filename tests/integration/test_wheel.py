"""The wheel carries what a folder without params of its own needs."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT


@pytest.mark.slow
def test_params_pipeline_and_configs_ship_in_the_wheel(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("rlpipe-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert names >= {"rlpipe/shipped/params.yaml", "rlpipe/shipped/dvc.yaml", "rlpipe/shipped/configs/tiny.yaml", "rlpipe/shipped/configs/micro.yaml"}
    with zipfile.ZipFile(wheel) as content:
        content.extractall(tmp_path / "site")
    code = "from rlpipe import workspace; print(workspace.shipped('dvc.yaml'), workspace.find_params(workspace.Path('nowhere'), None))"
    environment = {"PYTHONPATH": str(tmp_path / "site")}
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert out.split() == [str(tmp_path / "site/rlpipe/shipped" / name) for name in ("dvc.yaml", "params.yaml")]
