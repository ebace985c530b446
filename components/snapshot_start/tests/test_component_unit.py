"""Component `snapshot_start` through its own function: real git, real DVC."""

from pathlib import Path
from typing import Any

from ...conftest import call, shell
from ..component import snapshot_start


def test_round_00_is_on_the_runs_branch_and_again_is_the_same_commit(for_snapshot_start: dict[str, Any], repository: dict[str, Any], tmp_path: Path) -> None:
    """Case B13 too."""
    commit, _ = call(snapshot_start, tmp_path / "first", **{**for_snapshot_start, "run_id": "another"})
    assert shell(tmp_path, "git", "ls-remote", repository["repository"], "refs/heads/runs/another").split("\t")[0] == commit
    shell(tmp_path, "git", "clone", "-q", "--branch", "runs/another", repository["repository"], "laptop")
    lock = (tmp_path / "laptop/dvc.lock").read_text()
    assert [stage for stage in ("model:", "tasks:", "start:", "rollout@0:") if f"  {stage}" in lock] == ["model:", "tasks:", "start:"]
    assert call(snapshot_start, tmp_path / "second", **{**for_snapshot_start, "run_id": "another"})[0] == commit
