"""Component `train` through its own function, on real artifacts."""

from pathlib import Path
from typing import Any

import pytest

from ...conftest import Store, as_floats, call, check_refused, check_repeatable, fingerprints
from ..component import train


def test_the_policy_is_trained(trained: dict[str, Any], begun: dict[str, Any]) -> None:
    assert trained["metrics"].metadata["optimizer_steps"] >= 3
    assert trained["policy"].metadata["outcome"] == "trained" or trained["policy"].metadata["outcome"] == ""
    assert fingerprints(trained)["policy"] != fingerprints(begun)["policy"]


def test_again_gives_the_same_and_tracks_nothing_twice(trained: dict[str, Any], for_train: dict[str, Any], tmp_path: Path, store: Store) -> None:
    """Case B13."""
    check_repeatable(train, trained, tmp_path, store, **for_train)


def test_numbers_that_became_floats_change_nothing(trained: dict[str, Any], for_train: dict[str, Any], tmp_path: Path) -> None:
    """Case B04."""
    _, made = call(train, tmp_path, **{**for_train, "config": as_floats(for_train["config"]), "round_index": 1.0})
    assert fingerprints(made) == fingerprints(trained)


@pytest.mark.parametrize("name", ["scored", "policy_in", "evaluation_in"])
def test_a_damaged_input_is_refused(name: str, for_train: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B01."""
    check_refused(train, name, tmp_path, capsys, **for_train)
