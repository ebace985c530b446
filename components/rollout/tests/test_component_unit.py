"""Component `rollout` through its own function, on real artifacts."""

import json
from pathlib import Path
from typing import Any

import pytest

from ...conftest import RUN_ID, Store, as_floats, call, check_refused, check_repeatable, fingerprints
from ..component import rollout


def test_the_first_round_needs_no_artifact_besides_round_00(rolled: dict[str, Any], store: Store) -> None:
    """Case B10."""
    assert set(fingerprints(rolled)) == {"trajectories", "progress"}
    assert rolled["trajectories"].metadata == {"step": "rollout", "round": 1, "sha256": fingerprints(rolled)["trajectories"], "outcome": ""}
    assert rolled["metrics"].metadata["num_groups"] == 6
    assert rolled["metrics"].metadata["num_trajectories"] == 24
    (record,) = json.loads(Path(rolled["metrics"].path).read_text())["records"]
    assert (record["step"], record["round"]) == ("rollout", 1)
    assert Path(rolled["report"].path).read_text().startswith("<!DOCTYPE html>")
    assert store.runs()["round 01"].data.metrics["rollout/num_groups"] == 6
    assert RUN_ID in {run.data.tags.get("rlpipe.run_id") for run in store.runs().values()}


def test_again_gives_the_same_and_tracks_nothing_twice(rolled: dict[str, Any], for_rollout: dict[str, Any], tmp_path: Path, store: Store) -> None:
    """Case B13."""
    check_repeatable(rollout, rolled, tmp_path, store, **for_rollout)


def test_numbers_that_became_floats_change_nothing(rolled: dict[str, Any], for_rollout: dict[str, Any], tmp_path: Path) -> None:
    """Case B04: Kubeflow hands every number over as a float."""
    changed = {"config": as_floats(for_rollout["config"]), "tracking": as_floats(for_rollout["tracking"]), "round_index": 1.0, "shard_index": -1.0}
    assert changed["config"]["num_tasks"] == 6.0
    _, made = call(rollout, tmp_path, **{**for_rollout, **changed})
    assert fingerprints(made) == fingerprints(rolled)


@pytest.mark.parametrize("name", ["policy", "progress_in", "history_in", "evaluation_in"])
def test_a_damaged_input_is_refused(name: str, for_rollout: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B01."""
    check_refused(rollout, name, tmp_path, capsys, **for_rollout)
