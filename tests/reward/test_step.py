from __future__ import annotations

import pytest

from rlpipe import artifact, dataset
from rlpipe.errors import ArtifactError, ScorerError
from rlpipe.reward import history, sandbox, scoring, step
from rlpipe.reward.group_filters.zero_signal import ZeroSignal
from rlpipe.reward.history import TaskHistory
from rlpipe.step import Report
from rlpipe.trajectory import Group
from tests.reward.rows import bad, finished, finished_history, group, section, task_file, trajectory

EXACT = {"type": "exact_match"}


@pytest.fixture(autouse=True, scope="module")
def no_children_left():
    yield
    sandbox.shared().close()


def score(folder, config, groups, *, outcome=None, round_index=1) -> Report:
    kept = finished(folder / "kept", [row for one in groups for row in one], outcome)
    tasks = task_file(folder / "tasks.jsonl", {"t0": "9", "t1": "10", "t2": "11"})
    places = {"kept": kept, "tasks": tasks, "history_in": finished_history(folder / "history_in"), "scored": folder / "scored", "history": folder / "history"}
    report = step.run(config, **places, round_index=round_index)
    artifact.write_manifest(folder / "scored", outcome=report.outcome)
    return report


GROUPS = [group("9", "8", "9", name="a", task="t0"), group("10", "10", name="b", task="t1"), group("1", "2", name="c", task="t2")]


def test_groups_without_signal_are_dropped_after_they_were_counted(tmp_path):
    report = score(tmp_path, section(EXACT), GROUPS)
    assert report.outcome is None
    assert report.numbers == {
        "sampled_reward": 4 / 7,
        "num_trajectories": 7,
        "num_scored": 7,
        "num_unscorable": 0,
        "num_skipped": 0,
        "num_limited": 0,
        "reward_exact_match": 4 / 7,
        "num_groups": 3,
        "num_groups_with_signal": 1,
        "num_groups_kept": 1,
        "num_written": 3,
    }
    assert report.reasons == {"zero_signal": 2}
    written = list(dataset.read_groups(tmp_path / "scored"))
    assert [[row.reward for row in one] for one in written] == [[1.0, 0.0, 1.0]]
    assert history.read(tmp_path / "history") == {
        "t0": TaskHistory("t0", visits=1, attempts=3, reward_sum=2.0, last_round=1),
        "t1": TaskHistory("t1", visits=1, attempts=2, reward_sum=2.0, last_round=1),
        "t2": TaskHistory("t2", visits=1, attempts=2, reward_sum=0.0, last_round=1),
    }


@pytest.mark.parametrize("config", [section(EXACT, keep="all"), section(EXACT, group_filters=[])])
def test_group_filters_can_be_off(tmp_path, config):
    report = score(tmp_path, config, GROUPS)
    assert report.numbers["num_written"] == 7
    assert report.reasons == ({"zero_signal": 2} if config.keep == "all" else {})


def test_no_group_with_signal_is_the_outcome_no_signal(tmp_path):
    report = score(tmp_path, section(EXACT), GROUPS[1:])
    assert report.outcome == "no_signal"
    assert report.numbers["sampled_reward"] == 0.5
    assert list(dataset.read(tmp_path / "scored")) == []


@pytest.mark.parametrize(("outcome", "expected"), [(None, "no_signal"), ("no_signal", "no_signal"), ("stopped", "stopped")])
def test_an_empty_input_starts_no_process_and_passes_its_outcome_on(tmp_path, outcome, expected):
    sandbox.shared().close()
    report = score(tmp_path, section(EXACT), [], outcome=outcome)
    assert report.outcome == expected
    assert report.numbers["sampled_reward"] is None
    assert report.numbers["num_groups"] == 0
    assert history.read(tmp_path / "history") == {}
    assert sandbox.shared()._template is None


def test_unscored_members_are_counted_and_left_out_of_the_comparison(tmp_path):
    groups = [group("fine", "nan", "fine", name="a"), group("fine", "print", name="b", task="t1")]
    report = score(tmp_path, section(bad("Scripted"), max_unscorable=0.2), groups)
    assert report.reasons == {"zero_signal": 1, "custom.non_finite": 1}
    assert report.numbers["num_unscorable"] == 1
    assert report.numbers["sampled_reward"] == 3.25 / 4
    assert history.read(tmp_path / "history")["t0"] == TaskHistory("t0", visits=1, attempts=2, reward_sum=2.0, last_round=1)


def test_a58_too_many_failures_stop_the_step_before_the_next_batch(tmp_path):
    groups = [group("x", "x", name=f"g{i}") for i in range(5)]
    with pytest.raises(ScorerError, match=r"4 of 10 trajectories could not be scored; got custom.TypeError 4"):
        score(tmp_path, section(bad("Raises"), batch_rows=2), groups)
    assert not (tmp_path / "history").exists()


def test_the_size_of_a_batch_changes_no_byte(tmp_path):
    fingerprints = set()
    for num_rows in (1, 3, 4096):
        score(tmp_path / str(num_rows), section(EXACT, batch_rows=num_rows), GROUPS)
        fingerprints.add(artifact.fingerprint(tmp_path / str(num_rows) / "scored"))
    assert len(fingerprints) == 1


def test_an_unfinished_input_is_refused(tmp_path):
    (tmp_path / "kept").mkdir()
    with pytest.raises(ArtifactError, match="it is unfinished"):
        step.run(
            section(EXACT),
            kept=tmp_path / "kept",
            tasks=task_file(tmp_path / "t.jsonl", {"t0": "9"}),
            history_in=finished_history(tmp_path / "h"),
            scored=tmp_path / "scored",
            history=tmp_path / "history",
            round_index=1,
        )


@pytest.mark.parametrize(
    ("totals", "tolerance", "kept"),
    [((1.0, 1.0), 0.0, False), ((1.0, None), 0.0, False), ((None, None), 0.0, False), ((0.0, 0.1), 0.0, True), ((0.0, 0.1), 0.1, False)],
)
def test_zero_signal_looks_at_the_spread_of_scored_totals(totals, tolerance, kept):
    members = tuple(trajectory(index=i, reward=total) for i, total in enumerate(totals))
    assert ZeroSignal(tolerance=tolerance)(Group("g0", members)).keep is kept


class Judged:
    """Counts the rows that were given to the scorer, and dies at the second batch while `dies` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[int] = []
        self.dies = True
        judge = scoring.Scorer.judge

        def counted(scorer, rows, tasks):
            if self.dies and len(self.batches) == 1:
                raise KeyboardInterrupt
            self.batches.append(len(rows))
            return judge(scorer, rows, tasks)

        monkeypatch.setattr(scoring.Scorer, "judge", counted)


def test_a_killed_step_scores_no_batch_twice(tmp_path, monkeypatch):
    config = section(EXACT, batch_rows=2)
    whole = score(tmp_path / "whole", config, GROUPS)
    judged = Judged(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        score(tmp_path / "killed", config, GROUPS)
    judged.dies = False
    assert score(tmp_path / "killed", config, GROUPS) == whole
    assert judged.batches == [3, 2, 2]
    for name in ("scored", "history"):
        assert artifact.folder_fingerprint(tmp_path / "killed" / name) == artifact.folder_fingerprint(tmp_path / "whole" / name)


def test_what_could_not_be_scored_is_tried_again(tmp_path, monkeypatch):
    groups = [group("nan", "fine", name="a"), group("fine", "fine", name="b", task="t1")]
    config = section(bad("Scripted"), max_unscorable=0.5, batch_rows=2)
    judged = Judged(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        score(tmp_path, config, groups)
    judged.dies = False
    score(tmp_path, config, groups)
    assert judged.batches == [2, 2, 2]
