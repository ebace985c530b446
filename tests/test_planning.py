"""`rlpipe plan`: what a run would do and why, by the key that the run itself goes by."""

import json
import re
import shutil
from pathlib import Path

import pytest

from rlpipe import cli
from tests.integration.conftest import run

STEPS = ["model", "tasks", "start", "rollout", "filter", "reward", "train", "evaluate"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished micro run; not to be changed."""
    workdir = tmp_path_factory.mktemp("finished")
    assert run(workdir, "--set", "tracking.enabled=false") == 0
    return workdir


@pytest.fixture
def workdir(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be changed."""
    return Path(shutil.copytree(finished, tmp_path / "copy", symlinks=True))


def content(folder: Path) -> dict[str, int]:
    return {path.relative_to(folder).as_posix(): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def plan(workdir: Path, capsys: pytest.CaptureFixture, *options: str) -> dict[tuple[int, str], list[str]]:
    """The reasons of what would run, by round and step."""
    capsys.readouterr()
    assert cli.main(["plan", "--json", "--workdir", str(workdir), *options]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(set(row) == {"step", "round", "state", "why"} for row in rows)
    assert all(row["state"] == ("would run" if row["why"] else "up-to-date") for row in rows)
    return {(row["round"], row["step"]): row["why"] for row in rows if row["why"]}


def test_after_a_run_everything_is_up_to_date_and_nothing_is_written(finished: Path, capsys: pytest.CaptureFixture) -> None:
    before = content(finished)
    capsys.readouterr()
    assert cli.main(["plan", "--workdir", str(finished)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:9]] == [[str(int(i > 2)), step, "up-to-date"] for i, step in enumerate(STEPS)]
    assert lines[-1] == "0 of 8 would run"
    assert content(finished) == before


def test_before_a_run_everything_would_run_and_nothing_is_made(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    found = plan(tmp_path / "new", capsys, "--params", "configs/micro.yaml")
    assert [step for _, step in found] == STEPS
    assert found[0, "model"] == ["not run yet"]
    assert found[0, "tasks"] == ["output tasks/train.jsonl missing", "output tasks/eval.jsonl missing"]
    assert found[0, "start"] == ["not run yet", "after model", "after tasks"]
    assert not (tmp_path / "new").exists()


def test_a_changed_param_is_named_with_both_values_and_what_follows_waits(finished: Path, capsys: pytest.CaptureFixture) -> None:
    found = plan(finished, capsys, "--set", "train.learning_rate=0.001")
    assert found == {
        (1, "train"): ["params changed: train.learning_rate 0.01 -> 0.001"],
        (1, "evaluate"): ["after train of round 1"],
    }


def test_another_round_is_not_run_yet(finished: Path, capsys: pytest.CaptureFixture) -> None:
    found = plan(finished, capsys, "--rounds", "2")
    assert found[2, "rollout"] == ["not run yet"]
    assert found[2, "evaluate"] == ["not run yet", "after train of round 2"]
    assert {index for index, _ in found} == {2}


def test_other_tasks_are_seen(finished: Path, capsys: pytest.CaptureFixture) -> None:
    found = plan(finished, capsys, "--set", "tasks.train.seed=4")
    assert re.fullmatch(r"output tasks/train\.jsonl changed \(\w{8} -> \w{8}\)", found[0, "tasks"][0])
    assert found[0, "start"] == ["after tasks"]


@pytest.mark.parametrize(("damage", "reason"), [("gone", "output kept missing"), ("cut", "output kept damaged")])
def test_a_missing_or_damaged_output_is_named(workdir: Path, capsys: pytest.CaptureFixture, damage: str, reason: str) -> None:
    kept = workdir / "rounds/01/kept"
    if damage == "gone":
        shutil.rmtree(kept)
    else:
        next(kept.glob("part-*")).unlink()
    found = plan(workdir, capsys)
    assert found[1, "filter"] == [reason]
    assert found[1, "reward"] == ["after filter of round 1"]


def test_the_number_of_shards_and_the_cluster_change_nothing(finished: Path, capsys: pytest.CaptureFixture) -> None:
    assert plan(finished, capsys, "--set", "rollout.shards=3", "--set", "kubeflow.experiment=mine") == {}


def test_what_is_planned_is_what_runs(workdir: Path, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture) -> None:
    found = plan(workdir, capsys, "--set", "train.learning_rate=0.001")
    caplog.clear()
    assert cli.main(["run", "--workdir", str(workdir), "--set", "train.learning_rate=0.001"]) == 0
    ran = {(int(index), step) for step, index in re.findall(r"step=(\w+) round=(\d+) (?!state=up-to-date)", caplog.text)}
    assert ran == set(found) == {(1, "train"), (1, "evaluate")}
