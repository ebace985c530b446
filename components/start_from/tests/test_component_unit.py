"""Component `start_from` through its own function, on real artifacts."""

from pathlib import Path
from typing import Any

import pytest

from ...conftest import Made, Store, call, check_refused, check_repeatable, fingerprints
from ..component import start_from


@pytest.fixture
def arguments(trained: dict[str, Any], sections: dict[str, Any]) -> dict[str, Any]:
    tasks = {**sections["tasks"], "eval": {**sections["tasks"]["eval"], "seed": 7}}
    common = {"config": sections["start"], "tasks_config": tasks, "tracking": sections["tracking"], "params_key": "1" * 64, "run_id": "retraining"}
    return {"champion": trained["policy"], **common}


def weights(policy: Any) -> bytes:
    return (Path(policy.path) / "modules/policy/model.safetensors").read_bytes()


def test_the_champion_is_measured_on_new_tasks(arguments: dict[str, Any], trained: dict[str, Any], begun: Made, tmp_path: Path, store: Store) -> None:
    """Case B13 too."""
    key, made = call(start_from, tmp_path / "first", **arguments)
    assert key != begun.run_key
    assert weights(made["policy"]) == weights(trained["policy"])
    assert Path(made["train_tasks"].path).read_bytes() == Path(begun["train_tasks"].path).read_bytes()
    assert Path(made["eval_tasks"].path).read_bytes() != Path(begun["eval_tasks"].path).read_bytes()
    assert set(fingerprints(made)) == {"policy", "progress", "history", "evaluation"}
    check_repeatable(start_from, made, tmp_path / "second", store, **arguments)


def test_a_damaged_champion_is_refused(arguments: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B01."""
    check_refused(start_from, "champion", tmp_path, capsys, **arguments)
