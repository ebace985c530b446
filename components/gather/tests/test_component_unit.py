"""Component `gather` through its own function, on real artifacts."""

from pathlib import Path
from typing import Any

import pytest

from ...conftest import Store, call, check_repeatable, fingerprints
from ...rollout import rollout
from ..component import gather

KEY = "5" * 64
"""A run of its own."""


@pytest.fixture
def arguments(for_rollout: dict[str, Any], common: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Two shards, handed over in the other order."""
    changed = {"config": {**for_rollout["config"], "shards": 2}, "run_key": KEY}
    shards = [call(rollout, tmp_path / str(index), **{**for_rollout, **changed, "shard_index": index})[1] for index in (1, 0)]
    names = {"shards": "trajectories", "progress_shards": "progress", "metrics_shards": "metrics"}
    return {given: [shard[name] for shard in shards] for given, name in names.items()} | common | {"run_key": KEY}


def tracked(store: Store, metric: str) -> list[float]:
    """Every value of a metric that was sent to the round's run."""
    client = store.client()
    experiment = client.get_experiment_by_name("rlpipe").experiment_id
    (run,) = client.search_runs([experiment], f"tags.`rlpipe.run_key` = '{KEY}' and tags.`rlpipe.round` = '1'")
    return [point.value for point in client.get_metric_history(run.info.run_id, metric)]


def test_shards_become_what_one_pod_makes(arguments: dict[str, Any], rolled: dict[str, Any], tmp_path: Path, store: Store) -> None:
    """Case B13 too."""
    _, made = call(gather, tmp_path / "joined", **arguments)
    assert fingerprints(made) == fingerprints(rolled)
    assert made["metrics"].metadata["num_trajectories"] == 24
    assert Path(made["report"].path).read_text().startswith("<!DOCTYPE html>")
    assert tracked(store, "rollout/num_groups") == [6.0]
    check_repeatable(gather, made, tmp_path / "again", store, **arguments)


def test_a_missing_shard_is_refused(arguments: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B01."""
    first = {name: arguments[name][:1] for name in ("shards", "progress_shards", "metrics_shards")}
    with pytest.raises(SystemExit) as ended:
        call(gather, tmp_path / "joined", **{**arguments, **first})
    assert ended.value.code == 6
    assert "missing: shard 0" in capsys.readouterr().err
