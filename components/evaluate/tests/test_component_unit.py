"""Component `evaluate` through its own function, on real artifacts."""

import json
from pathlib import Path
from typing import Any

import pytest

from ...conftest import Store, as_floats, call, check_refused, check_repeatable, fingerprints
from ..component import evaluate


def test_the_policy_is_measured_and_registered(measured: dict[str, Any], trained: dict[str, Any], store: Store) -> None:
    content = json.loads((Path(measured["evaluation"].path) / "evaluation.json").read_text())
    assert content["policy_fingerprint"] == fingerprints(trained)["policy"]
    assert measured["metrics"].metadata["num_eval_tasks"] == 8
    assert "| " in Path(measured["summary"].path).read_text()
    versions = store.client().search_model_versions("name = 'rlpipe-policy'")
    assert {version.tags["sha256"] for version in versions} >= {fingerprints(trained)["policy"]}


def test_it_returns_the_decision(for_evaluate: dict[str, Any], measured: dict[str, Any], tmp_path: Path) -> None:
    decision = json.loads((Path(measured["evaluation"].path) / "evaluation.json").read_text())["decision"]
    assert call(evaluate, Path(measured["metrics"].path).parent, **for_evaluate)[0] is (decision == "promote")


def test_again_gives_the_same_and_tracks_nothing_twice(measured: dict[str, Any], for_evaluate: dict[str, Any], tmp_path: Path, store: Store) -> None:
    """Case B13: no second run, no second registered version."""
    assert store.counts() == (3, 2)
    check_repeatable(evaluate, measured, tmp_path, store, **for_evaluate)


def test_numbers_that_became_floats_change_nothing(measured: dict[str, Any], for_evaluate: dict[str, Any], tmp_path: Path) -> None:
    """Case B04."""
    _, made = call(evaluate, tmp_path, **{**for_evaluate, "config": as_floats(for_evaluate["config"]), "round_index": 1.0})
    assert fingerprints(made) == fingerprints(measured)


@pytest.mark.parametrize("name", ["policy", "evaluation_in"])
def test_a_damaged_input_is_refused(name: str, for_evaluate: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B01."""
    check_refused(evaluate, name, tmp_path, capsys, **for_evaluate)
