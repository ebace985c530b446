"""Component `start` through its own function, on real artifacts."""

import json
from pathlib import Path
from typing import Any

import pytest

from ...conftest import RUN_ID, Made, Store, as_floats, call, check_repeatable, fingerprints
from ..component import start


@pytest.fixture
def arguments(sections: dict[str, Any]) -> dict[str, Any]:
    configs = {"config": sections["start"], "model_config": sections["model"], "tasks_config": sections["tasks"], "tracking": sections["tracking"]}
    return {**configs, "params_key": "0" * 64, "run_id": RUN_ID}


def test_model_tasks_and_round_00_are_made(begun: Made) -> None:
    assert set(fingerprints(begun)) == {"model", "policy", "progress", "history", "evaluation"}
    assert len(Path(begun["train_tasks"].path).read_text().splitlines()) == 16
    assert len(Path(begun["eval_tasks"].path).read_text().splitlines()) == 8
    records = json.loads(Path(begun["metrics"].path).read_text())["records"]
    assert [record["step"] for record in records] == ["model", "start"]
    assert begun["metrics"].metadata["num_eval_tasks"] == 8


def test_the_key_of_the_run_names_its_mlflow_run(begun: Made, store: Store) -> None:
    assert len(begun.run_key) == 64
    run = store.runs()[f"rlpipe-{begun.run_key[:8]}"]
    assert run.data.tags["rlpipe.run_id"] == RUN_ID
    assert run.data.tags["rlpipe.run_key"] == begun.run_key
    assert "round 00" in store.runs()


def test_again_gives_the_same_and_tracks_nothing_twice(begun: Made, arguments: dict[str, Any], tmp_path: Path, store: Store) -> None:
    """Case B13."""
    check_repeatable(start, begun, tmp_path, store, **arguments)


def test_numbers_that_became_floats_change_nothing(begun: Made, arguments: dict[str, Any], tmp_path: Path) -> None:
    """Case B04."""
    changed = {name: as_floats(arguments[name]) for name in ("config", "model_config", "tasks_config", "tracking")}
    key, made = call(start, tmp_path, **{**arguments, **changed})
    assert key == begun.run_key
    assert fingerprints(made) == fingerprints(begun)
    for name in ("train_tasks", "eval_tasks"):
        assert Path(made[name].path).read_bytes() == Path(begun[name].path).read_bytes()
