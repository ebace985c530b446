"""Component `reward` through its own function, on real artifacts."""

from pathlib import Path
from typing import Any

import pytest

from ...conftest import Store, as_floats, call, check_refused, check_repeatable, fingerprints
from ..component import reward


def test_groups_are_scored(rewarded: dict[str, Any]) -> None:
    assert set(fingerprints(rewarded)) == {"scored", "history"}
    assert rewarded["metrics"].metadata["num_groups_with_signal"] >= 4
    assert Path(rewarded["report"].path).read_text().startswith("<!DOCTYPE html>")


def test_again_gives_the_same_and_tracks_nothing_twice(rewarded: dict[str, Any], for_reward: dict[str, Any], tmp_path: Path, store: Store) -> None:
    """Case B13."""
    check_repeatable(reward, rewarded, tmp_path, store, **for_reward)


def test_numbers_that_became_floats_change_nothing(rewarded: dict[str, Any], for_reward: dict[str, Any], tmp_path: Path) -> None:
    """Case B04."""
    _, made = call(reward, tmp_path, **{**for_reward, "config": as_floats(for_reward["config"]), "round_index": 1.0})
    assert fingerprints(made) == fingerprints(rewarded)


@pytest.mark.parametrize("name", ["kept", "history_in"])
def test_a_damaged_input_is_refused(name: str, for_reward: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B01."""
    check_refused(reward, name, tmp_path, capsys, **for_reward)
