"""Whole runs of `configs/micro.yaml` in this process, shared by the tests that only look at them."""

from pathlib import Path

import pytest

from rlpipe import cli

ROOT = Path(__file__).parents[2]
MICRO = ROOT / "configs/micro.yaml"
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
