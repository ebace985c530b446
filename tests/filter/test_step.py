from __future__ import annotations

import pytest
from pydantic import ValidationError

from rlpipe import artifact, dataset
from rlpipe.filter import step
from rlpipe.step import Report
from tests.reward.rows import finished, group, trajectory

FILTERS = [{"type": "truncated"}, {"type": "empty"}, {"type": "duplicate"}]


def filtered(folder, rows, *, outcome=None, **fields) -> Report:
    trajectories = finished(folder / "trajectories", rows, outcome)
    config = step.Config.model_validate({"filters": FILTERS, **fields})
    report = step.run(config, trajectories=trajectories, kept=folder / "kept", round_index=1)
    artifact.write_manifest(folder / "kept", outcome=report.outcome)
    return report


ROWS = [
    *group("9", "", "9", "8", name="a"),
    *group("", " ", name="b", task="t1"),
    trajectory("9", group="c", task="t2", finish_reason="length", status="truncated"),
    trajectory("9", group="c", task="t2", index=1, sampled=(3,)),
]


def test_drops_are_counted_by_the_first_reason_and_the_rest_is_unchanged(tmp_path):
    report = filtered(tmp_path, ROWS)
    assert report.numbers == {"num_trajectories": 8, "num_kept": 2, "num_dropped": 6, "num_groups": 3, "num_groups_kept": 1}
    assert report.reasons == {"duplicate": 2, "empty": 3, "truncated": 1}
    assert report.outcome is None
    assert [(row.trajectory_id, row.completion, row.token_ids.tolist()) for row in dataset.read(tmp_path / "kept")] == [
        ("a/0", "9", [1, 2, 7, 8]),
        ("a/3", "8", [1, 2, 7, 8]),
    ]


def test_keep_all_counts_and_drops_nothing(tmp_path):
    report = filtered(tmp_path, ROWS, keep="all")
    assert report.reasons == {"duplicate": 2, "empty": 3, "truncated": 1}
    assert report.numbers["num_dropped"] == 0
    assert artifact.fingerprint(tmp_path / "kept") == artifact.fingerprint(tmp_path / "trajectories")


def test_nothing_left_is_the_outcome_no_signal(tmp_path):
    assert filtered(tmp_path, list(group("", ""))).outcome == "no_signal"
    assert list(dataset.read(tmp_path / "kept")) == []


@pytest.mark.parametrize("outcome", ["stopped", "no_signal"])
def test_an_empty_input_passes_its_outcome_on(tmp_path, outcome):
    report = filtered(tmp_path, [], outcome=outcome)
    assert report.outcome == outcome
    assert report.numbers["num_trajectories"] == 0


def test_unknown_filters_are_refused_with_those_there_are():
    with pytest.raises(ValidationError, match="'truncated', 'empty', 'too_long', 'duplicate', 'repetition'"):
        step.Config.model_validate({"filters": [{"type": "trunctated"}]})
