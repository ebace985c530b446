"""Whole runs of the shipped configs, shared by the tests that only look at them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe import cli

ROOT = Path(__file__).parents[2]
MICRO = ROOT / "configs/micro.yaml"
TINY = ROOT / "configs/tiny.yaml"
ARTIFACTS = ("trajectories", "progress", "kept", "scored", "history", "policy", "evaluation")


def run(workdir: Path, *options: str, config: Path = MICRO) -> int:
    """`rlpipe run` of a shipped config in this process."""
    return cli.main(["run", "--params", str(config), "--workdir", str(workdir), *options])


@pytest.fixture(scope="session")
def micro(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished micro run; not to be changed."""
    workdir = tmp_path_factory.mktemp("micro")
    assert run(workdir) == 0
    return workdir


def run_tiny(workdir: Path, *options: str) -> list[dict]:
    """`rlpipe run` of `configs/tiny.yaml` in a process of its own; the rows of its table."""
    command = [sys.executable, "-m", "rlpipe.cli", "run", "--params", str(TINY), "--workdir", str(workdir), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((workdir / "reports/run.json").read_text())["rounds"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished tiny run; not to be changed."""
    workdir = tmp_path_factory.mktemp("tiny")
    run_tiny(workdir)
    return workdir
