"""Component `snapshot` through its own function: real git, real DVC."""

from pathlib import Path
from typing import Any

import pytest

from ...conftest import RUN_ID, call, shell
from ..component import snapshot

Outputs = dict[str, Any]


@pytest.fixture
def arguments(rolled: Outputs, filtered: Outputs, rewarded: Outputs, trained: Outputs, measured: Outputs, resolved: Any, repository: Outputs) -> Outputs:
    made = {"rollout": rolled, "filter": filtered, "reward": rewarded, "train": trained, "evaluate": measured}
    metrics = {f"{step}_metrics": outputs["metrics"] for step, outputs in made.items()}
    artifacts = {name: handed for outputs in made.values() for name, handed in outputs.items() if name not in ("metrics", "report", "summary")}
    return {**artifacts, **metrics, "params": resolved, "config": repository, "run_id": RUN_ID}


def test_the_round_follows_the_one_before_and_again_is_the_same_commit(
    arguments: Outputs, first_commit: str, repository: Outputs, trained: Outputs, tmp_path: Path
) -> None:
    """Case B13 too."""
    commit, _ = call(snapshot, tmp_path / "first", **arguments, round_index=1.0, expect=first_commit)
    shell(tmp_path, "git", "clone", "-q", "--branch", f"runs/{RUN_ID}", repository["repository"], "laptop")
    laptop = tmp_path / "laptop"
    assert shell(laptop, "git", "log", "-2", "--format=%H") == f"{commit}\n{first_commit}"
    assert (laptop / "params.yaml").read_text() == Path(arguments["params"].path).read_text()
    shell(laptop, "dvc", "pull", "-q", "rounds/01/policy")
    weights = "modules/policy/model.safetensors"
    assert (laptop / "rounds/01/policy" / weights).read_bytes() == (Path(trained["policy"].path) / weights).read_bytes()
    assert call(snapshot, tmp_path / "second", **arguments, round_index=1, expect=first_commit)[0] == commit
