"""Component `filter` through its own function, on real artifacts."""

from pathlib import Path
from typing import Any

import pytest

from ...conftest import Store, as_floats, call, check_refused, check_repeatable, fingerprints
from ..component import filter


def test_what_is_kept_is_counted(filtered: dict[str, Any], store: Store) -> None:
    assert set(fingerprints(filtered)) == {"kept"}
    assert 0 < filtered["metrics"].metadata["num_kept"] <= 24
    assert store.runs()["round 01"].data.metrics["filter/num_kept"] == filtered["metrics"].metadata["num_kept"]


def test_again_gives_the_same_and_tracks_nothing_twice(filtered: dict[str, Any], for_filter: dict[str, Any], tmp_path: Path, store: Store) -> None:
    """Case B13."""
    check_repeatable(filter, filtered, tmp_path, store, **for_filter)


def test_numbers_that_became_floats_change_nothing(filtered: dict[str, Any], for_filter: dict[str, Any], tmp_path: Path) -> None:
    """Case B04."""
    _, made = call(filter, tmp_path, **{**for_filter, "config": as_floats(for_filter["config"]), "round_index": 1.0})
    assert fingerprints(made) == fingerprints(filtered)


@pytest.mark.parametrize("by_reference", [False, True])
def test_a_section_of_200_000_characters_works(by_reference: bool, for_filter: dict[str, Any], tmp_path: Path) -> None:
    """Case B04."""
    from rlpipe.kubeflow import wire

    config = {**for_filter["config"], "filters": [{"type": "empty"}] * 10_000}
    short, files = wire.shortened({"filter": config}, f"file://{tmp_path}/store")
    wire.put(files)
    _, made = call(filter, tmp_path / "pod", **{**for_filter, "config": short["filter"] if by_reference else config})
    assert made["metrics"].metadata["num_kept"] > 0


def test_a_damaged_input_is_refused(for_filter: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B01."""
    check_refused(filter, "trajectories", tmp_path, capsys, **for_filter)


@pytest.mark.parametrize(("name", "section"), [("config", "filter"), ("tracking", "tracking")])
def test_what_a_section_cannot_hold_is_refused(name: str, section: str, for_filter: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        call(filter, tmp_path, **{**for_filter, name: {"filtres": []}})
    assert ended.value.code == 2
    assert f"unknown key {section}.filtres" in capsys.readouterr().err
