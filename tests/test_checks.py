"""The rules that datasets must keep, decided by Great Expectations (cases E01, E02, E03, E06, E07, E10)."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpipe import artifact, checks, dataset
from rlpipe.errors import ArtifactError, CheckError
from rlpipe.trajectory import SCHEMA, RewardValue, Span, Trajectory

NAN = float("nan")


def attempt(i=0, **changes):
    """Two prompt tokens, two sampled ones."""
    row = Trajectory(
        trajectory_id=f"01/t{i // 4}/0/{i % 4}",
        group_id=f"01/t{i // 4}/0",
        task_id=f"t{i // 4}",
        index=i % 4,
        round=1,
        token_ids=np.array([5, 6, 7, 8], dtype=np.int32),
        logprobs=np.array([NAN, NAN, -0.5, -1.5], dtype=np.float32),
        spans=(Span("prompt", 0, 2), Span("policy", 2, 4, trained=True)),
    )
    return replace(row, **changes)


def stored(folder, rows, **facts):
    with dataset.Writer(folder) as writer:
        writer.write(rows)
    artifact.write_manifest(folder, **facts)
    return folder


def check(kind, path, outcome=None):
    checks.check(kind, path, outcome=outcome, role="in")


def message(kind, path, outcome=None):
    with pytest.raises(CheckError) as caught:
        check(kind, path, outcome)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_good_trajectories_pass(tmp_path):
    assert check("trajectories", stored(tmp_path / "d", [attempt(i) for i in range(9)])) is None


@pytest.mark.parametrize(
    ("changes", "column", "rule"),
    [
        ({"task_id": None}, "task_id", "present"),
        ({"group_id": None}, "group_id", "present"),
        ({"trajectory_id": None}, "trajectory_id", "unique"),
        ({"trajectory_id": "01/t0/0/1"}, "trajectory_id", "unique"),
        ({"index": 1}, "(group_id, index)", "unique"),
        ({"index": -1}, "index", "0 or more"),
        ({"status": "done"}, "status", "completed"),
        ({"status": None}, "status", "completed"),
        ({"token_ids": np.empty(0, np.int32), "logprobs": np.empty(0, np.float32), "spans": (), "status": "infra_error"}, "token_ids.length", "one token"),
        ({"logprobs": np.array([NAN, NAN, -1], np.float32)}, "logprobs.missing", "as many"),
        ({"logprobs": np.array([NAN, NAN, -1, 0.5], np.float32)}, "logprobs.unsound", "at most 0"),
        ({"logprobs": np.array([NAN, NAN, -1, NAN], np.float32)}, "logprobs.unsound", "finite"),
        ({"logprobs": np.array([NAN, NAN, -1, -np.inf], np.float32)}, "logprobs.unsound", "finite"),
        ({"logprobs": np.array([NAN, -2, -1, -1], np.float32)}, "logprobs.unsound", "NaN elsewhere"),
        ({"spans": (Span("prompt", 0, 2), Span("policy", 3, 4))}, "spans.gaps", "without gap"),
        ({"spans": (Span("prompt", 0, 3), Span("policy", 2, 4))}, "spans.gaps", "without gap"),
        ({"spans": (Span("prompt", 0, 2), Span("policy", 2, 3))}, "spans.gaps", "without gap"),
        ({"spans": (Span("prompt", 0, 2), Span("policy", 2, 9))}, "spans.gaps", "without gap"),
        ({"spans": ()}, "spans.gaps", "without gap"),
        ({"spans": (Span("prompt", 0, 4),), "logprobs": np.full(4, NAN, np.float32)}, "spans.unsampled", "sampled token"),
    ],
)
def test_a_broken_rule_names_column_rule_count_and_id(tmp_path, changes, column, rule):
    rows = [attempt(0, **changes), attempt(1), attempt(2), attempt(3), attempt(4)]
    text = message("trajectories", stored(tmp_path / "d", rows))
    line = next(line for line in text.splitlines() if f"column {column}:" in line)
    assert rule in line
    assert " of 5 rows" in line
    assert " 0 of 5 rows" not in line
    assert (rows[0].trajectory_id or "<NA>") in line


def test_multi_turn_spans_pass_and_a_demonstration_needs_no_log_prob(tmp_path):
    spans = (Span("prompt", 0, 1), Span("policy", 1, 2), Span("environment", 2, 3, turn=1), Span("policy", 3, 4, turn=1))
    turns = attempt(0, spans=spans, logprobs=np.array([NAN, -1, NAN, 0], np.float32))
    shown = attempt(1, spans=(Span("prompt", 0, 2), Span("demonstration", 2, 4, trained=True)), logprobs=np.full(4, NAN, np.float32), status="truncated")
    assert check("trajectories", stored(tmp_path / "d", [turns, shown])) is None


def test_e01_empty_is_its_own_failure(tmp_path):
    for kind in ("trajectories", "kept", "scored"):
        text = message(kind, stored(tmp_path / kind, []))
        assert f"{kind} (in) is empty" in text


@pytest.mark.parametrize("outcome", ["no_signal", "stopped"])
def test_e01_empty_with_an_outcome_passes(tmp_path, outcome):
    assert check("kept", stored(tmp_path / "d", []), outcome) is None


def test_e01_empty_tasks_fail_whatever_the_outcome(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text("")
    assert "tasks (in) is empty" in message("tasks", path, "stopped")


def test_e02_nulls_count_as_failures():
    frame = pd.DataFrame({"trajectory_id": list("abcde"), "finished": [True, True, True, False, None]})
    three_fifths = checks.one_of("finished", [True], "true", mostly=0.6)
    more = checks.one_of("finished", [True], "true", mostly=0.61)
    assert list(checks.broken(frame, [three_fifths, more])) == [more]
    assert checks.broken(frame, [more])[more].names == ["d", "e"]


def test_e03_lists_and_nested_columns_never_reach_great_expectations(tmp_path):
    good = [attempt(i, segment_rewards=({"name": "step", "token": 2, "value": 1.0},), arrays={"h": np.ones((2, 3))}) for i in range(3)]
    folder = tmp_path / "d"
    with dataset.Writer(folder) as writer:
        writer.write(good)
    table = pq.read_table(folder / "part-00000.parquet")
    tokens = pa.array([[5, 6, 7, 8], [], None], SCHEMA.field("token_ids").type)
    at = table.column_names.index("token_ids")
    pq.write_table(table.set_column(at, SCHEMA.field("token_ids"), tokens), folder / "part-00000.parquet")
    artifact.write_manifest(folder)
    line = next(line for line in message("trajectories", folder).splitlines() if "token_ids.length" in line)
    assert "2 of 3 rows" in line
    assert line.endswith("ids: 01/t0/0/1, 01/t0/0/2")


@pytest.mark.slow
def test_e06_eight_processes_in_one_folder(tmp_path):
    stored(tmp_path / "d", [attempt(i) for i in range(4)])
    before = sorted(tmp_path.rglob("*"))
    code = "from pathlib import Path\nfrom rlpipe import checks\nchecks.check('trajectories', Path('d'), outcome=None, role='in')"
    environment = {**os.environ, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([sys.executable, "-B", "-c", code], cwd=tmp_path, env=environment) for _ in range(8)]
    assert [process.wait() for process in running] == [0] * 8
    assert sorted(tmp_path.rglob("*")) == before


def test_e07_ten_thousand_bad_rows_make_a_short_message(tmp_path):
    text = "x" * 10_000
    rows = (attempt(i, status="done", completion=text, trajectory_id=f"row {i} {text}") for i in range(10_000))
    found = message("trajectories", stored(tmp_path / "d", rows))
    assert len(found.encode()) < 100_000
    assert "10000 of 10000 rows" in found
    assert found.count("row ") == 20


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_e10_a_million_rows_in_thirty_seconds_and_a_gigabyte(tmp_path):
    script = Path(__file__).parent / "million_rows.py"
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["rows"] == 1_000_000
    assert measured["seconds"] < 30
    assert measured["extra_mb"] < 1000


def test_rows_are_checked_again_only_when_their_fingerprint_is_new(tmp_path):
    folder = stored(tmp_path / "d", [attempt(0)])
    check("trajectories", folder)
    assert artifact.fingerprint(folder)
    stored(tmp_path / "other", [attempt(0, status="done")])
    assert "status" in message("trajectories", tmp_path / "other")


def test_scored_rewards(tmp_path):
    unscorable = (RewardValue("exact_match", None, "timeout", "took longer than 5 s"),)
    good = [attempt(0, reward=1.0), attempt(1, reward=0.0), attempt(2, reward=None, rewards=unscorable)]
    check("scored", stored(tmp_path / "good", good))
    text = message("scored", stored(tmp_path / "bad", [*good, attempt(3, reward=None), attempt(4, reward=NAN), attempt(5, reward=np.inf)]))
    assert "column reward.unexplained: 3 of 6 rows" in text
    assert "ids: 01/t0/0/3, 01/t1/0/0, 01/t1/0/1" in text


def test_scored_without_most_of_its_rewards(tmp_path):
    unscorable = (RewardValue("exact_match", None, "timeout", "took longer than 5 s"),)
    rows = [attempt(0, reward=1.0), *(attempt(i, rewards=unscorable) for i in range(1, 4))]
    assert "column reward.scored: 3 of 4 rows are not present in 50% of the rows or more" in message("scored", stored(tmp_path / "d", rows))


def test_tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    lines = [{"task_id": "a", "prompt": "1+1=", "reference": "2"}, {"task_id": "b", "prompt": [{"role": "user", "content": "1+2="}], "reference": "3"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    check("tasks", path)
    lines += [{"task_id": "a", "prompt": "", "reference": " "}, {"prompt": "1", "reference": None}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = message("tasks", path)
    assert "column task_id: 3 of 4 rows" in text
    assert "column prompt.length: 1 of 4 rows" in text
    assert "column reference.length: 2 of 4 rows" in text


def test_an_unfinished_dataset_is_not_checked(tmp_path):
    with dataset.Writer(tmp_path / "d") as writer:
        writer.write([attempt(0)])
    with pytest.raises(ArtifactError, match="unfinished"):
        check("trajectories", tmp_path / "d")
