"""A whole run: its artifacts, its table, its bytes, and what happens when it is run again, stopped or killed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlpipe import artifact, cli, dataset, params
from tests.integration.conftest import ARTIFACTS, MICRO, run

ROW = set(
    [
        "round",
        "outcome",
        "greedy_accuracy",
        "num_eval_tasks",
        "sampled_reward",
        "optimizer_steps",
        "tokens_generated",
        "tokens_trained",
        "groups",
        "groups_with_signal",
        "logprob_gap_max",
        "logprob_gap_p95",
        "seconds",
        "seconds_rollout",
        "seconds_reward",
        "seconds_train",
        "seconds_evaluate",
        "seconds_overhead",
        "peak_memory_mb",
        "policy_version",
    ]
)


def fingerprints(workdir: Path, round_index: int = 1) -> dict[str, str]:
    return {name: artifact.fingerprint(workdir / f"rounds/{round_index:02d}/{name}") for name in ARTIFACTS}


def report(workdir: Path) -> dict:
    return json.loads((workdir / "reports/run.json").read_text())


def test_every_artifact_is_finished(micro: Path) -> None:
    for name in ARTIFACTS:
        artifact.verify(micro / "rounds/01" / name)
    assert sorted(path.name for path in (micro / "rounds/01").iterdir() if path.name != ".gitignore") == sorted(ARTIFACTS)


def test_the_table_has_every_column(micro: Path) -> None:
    content = report(micro)
    assert set(content["start"]) == {"greedy_accuracy", "num_eval_tasks", "policy_version", "seconds"}
    (row,) = content["rounds"]
    assert set(row) >= ROW
    assert (row["round"], row["outcome"], row["groups"], row["num_eval_tasks"]) == (1, "trained", 6, 8)
    assert row["optimizer_steps"] >= 3
    assert row["groups_with_signal"] >= 4
    parts = row["seconds_rollout"] + row["seconds_reward"] + row["seconds_train"] + row["seconds_evaluate"] + row["seconds_overhead"]
    assert row["seconds"] == pytest.approx(parts)
    assert row["policy_version"] == row["optimizer_steps"]
    assert row["logprob_gap_max"] <= 1e-4


def test_trained_tokens_are_the_sampled_tokens(micro: Path) -> None:
    row = report(micro)["rounds"][0]
    trajectories = list(dataset.read(micro / "rounds/01/scored"))
    assert row["tokens_trained"] == sum(int(trajectory.mask.sum()) for trajectory in trajectories)
    assert {int(version) for trajectory in trajectories for version in trajectory.versions[trajectory.mask]} == {0}


def test_the_same_params_give_the_same_bytes_in_another_folder(micro: Path, tmp_path: Path) -> None:
    """Case F07: the whole run twice, every file of both rounds: datasets and weights."""
    assert run(tmp_path) == 0
    for round_index in (0, 1):
        for path in sorted((micro / f"rounds/{round_index:02d}").rglob("*")):
            if path.is_file() and path.name != ".gitignore":
                assert (tmp_path / path.relative_to(micro)).read_bytes() == path.read_bytes(), path


def test_another_seed_gives_other_trajectories(micro: Path, tmp_path: Path) -> None:
    assert run(tmp_path, "--set", "run.seed=1") == 0
    assert fingerprints(tmp_path)["trajectories"] != fingerprints(micro)["trajectories"]


def test_nothing_is_run_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(tmp_path) == 0
    before = report(tmp_path)
    caplog.clear()
    assert run(tmp_path) == 0
    assert caplog.text.count("state=up-to-date") == 7
    assert report(tmp_path) == before
    caplog.clear()
    assert run(tmp_path, "--set", "train.learning_rate=0.02") == 0
    assert re.findall(r"step=(\w+) round=\d+ state=up-to-date", caplog.text) == ["model", "start", "rollout", "filter", "reward"]


def test_dvc_agrees(micro: Path) -> None:
    from rlpipe import versioning

    assert versioning.status(micro) == {}


def test_dvc_sees_which_stages_a_learning_rate_touches(tmp_path: Path, micro: Path) -> None:
    from rlpipe import versioning

    workdir = tmp_path / "copy"
    shutil.copytree(micro, workdir)
    text = (workdir / "params.yaml").read_text()
    (workdir / "params.yaml").write_text(re.sub(r"learning_rate: \S+", "learning_rate: 0.02", text))
    assert set(versioning.status(workdir)) == {"train@0"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_dvc_repro_computes_the_same_hashes(tmp_path: Path, micro: Path) -> None:
    for name in ("params.yaml", "dvc.yaml", "dvc.lock", ".dvcignore"):
        if (micro / name).is_file():
            shutil.copy(micro / name, tmp_path / name)
    shutil.copytree(micro / ".dvc", tmp_path / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp"))
    before = (tmp_path / "dvc.lock").read_text()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "MLFLOW_TRACKING_URI": ""}
    subprocess.run([Path(sys.executable).parent / "dvc", "repro", "--force"], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "dvc.lock").read_text() == before
    assert fingerprints(tmp_path) == fingerprints(micro)
    assert set(report(tmp_path)["rounds"][0]) >= ROW


@pytest.mark.parametrize("name", ["start", "rollout", "filter", "reward", "train", "evaluate"])
def test_each_step_command_repeats_its_part_of_the_run(micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    workdir = tmp_path / "copy"
    shutil.copytree(micro, workdir)
    monkeypatch.chdir(workdir)
    round_index = 0 if name == "start" else 1
    before = {path: path.read_bytes() for path in sorted((workdir / "rounds").rglob("*")) if path.is_file()}
    assert cli.main([name, "--round-index", str(round_index), "--fresh"]) == 0
    assert {path: path.read_bytes() for path in sorted((workdir / "rounds").rglob("*")) if path.is_file()} == before


def test_once_the_target_is_met_later_rounds_pass_the_policy_on(tmp_path: Path) -> None:
    assert run(tmp_path, "--rounds", "2", "--set", "run.stop={metric: greedy_accuracy, target: 0.0, patience: 2}") == 0
    first, second = report(tmp_path)["rounds"]
    assert [first["outcome"], second["outcome"]] == ["trained", "stopped"]
    assert second["greedy_accuracy"] == first["greedy_accuracy"]
    assert second["sampled_reward"] is None
    assert (second["optimizer_steps"], second["tokens_generated"], second["groups"]) == (0, 0, 0)
    for name in ("policy", "evaluation"):
        assert fingerprints(tmp_path, 2)[name] == fingerprints(tmp_path, 1)[name]
    for name in ("trajectories", "kept", "scored"):
        assert artifact.outcome(tmp_path / "rounds/02" / name) == "stopped"
        assert list(dataset.read(tmp_path / "rounds/02" / name)) == []
    stop = json.loads((tmp_path / "rounds/01/evaluation/evaluation.json").read_text())["stop"]
    assert stop["met"] is True
    assert stop["course"] == [[0, 0.0], [1, 0.0]]


def test_without_signal_the_policy_is_kept_byte_for_byte(tmp_path: Path) -> None:
    constant = "reward.rewards=[{type: regex_format, pattern: '(?s).*'}]"
    assert run(tmp_path, "--set", constant) == 0
    (row,) = report(tmp_path)["rounds"]
    assert (row["outcome"], row["groups_with_signal"], row["sampled_reward"], row["policy_version"]) == ("no_signal", 0, 1.0, 0)
    assert artifact.fingerprint(tmp_path / "rounds/01/policy") == artifact.fingerprint(tmp_path / "rounds/00/policy")


def test_without_signal_the_run_can_stop(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert run(tmp_path, "--set", "reward.rewards=[{type: regex_format, pattern: '(?s).*'}]", "--set", "run.no_signal=stop") == 4
    assert "rlpipe: " in capfd.readouterr().err
    assert not (tmp_path / "rounds/01/policy").exists()


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes(micro: Path, tmp_path: Path) -> None:
    """SIGKILL as soon as a rollout chunk lies on disk."""
    command = [sys.executable, "-m", "rlpipe.cli", "run", "--params", str(MICRO), "--workdir", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        # folders come and go meanwhile, which os.walk takes calmly
        if any(re.fullmatch(r"chunk-\d+\.parquet", name) for _, _, names in os.walk(tmp_path / "rounds") for name in names):
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    assert process.wait() == -signal.SIGKILL
    assert run(tmp_path) == 0
    assert fingerprints(tmp_path) == fingerprints(micro)


def test_replay_trains_without_generating(micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(micro)
    out = tmp_path / "policy"
    assert cli.main(["replay", "rounds/01/scored", "--from", "rounds/00/policy", "--out", str(out)]) == 0
    assert artifact.fingerprint(out) == artifact.fingerprint(micro / "rounds/01/policy")


def test_repeat_shows_the_spread(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Case F07: where bytes are not promised, the spread over seeds is measured."""
    assert cli.main(["repeat", "-n", "2", "--params", str(MICRO), "--workdir", str(tmp_path)]) == 0
    assert re.search(r"^sampled_reward mean=\S+ std=\S+ min=\S+ max=\S+ num=2 values=\S+ \S+$", capfd.readouterr().out, re.MULTILINE)


def test_fingerprint_prints_one_line(micro: Path, capfd: pytest.CaptureFixture) -> None:
    capfd.readouterr()
    assert cli.main(["fingerprint", str(micro / "rounds/01/policy")]) == 0
    assert re.fullmatch(r"[0-9a-f]{64}\n", capfd.readouterr().out)


def test_inspect_shows_counts_and_trajectories(micro: Path, capfd: pytest.CaptureFixture) -> None:
    capfd.readouterr()
    assert cli.main(["inspect", str(micro / "rounds/01/scored"), "-n", "2"]) == 0
    out = capfd.readouterr().out
    assert "num_trajectories=24 num_groups=6" in out
    assert out.count("* policy[") == 2


def test_no_machine_path_in_artifacts_reports_and_lock(micro: Path) -> None:
    for path in [*(micro / "rounds").rglob("*.json"), *(micro / "reports").rglob("*.json"), micro / "dvc.lock", micro / "dvc.yaml", micro / "params.yaml"]:
        assert str(micro) not in path.read_text(), path


def test_params_of_the_folder_are_resolved(micro: Path) -> None:
    content = params.read_yaml(micro / "params.yaml")
    assert content["train"]["max_grad_norm"] == 1.0
    assert content["rounds"] == [{"round": "01", "previous": "00"}]


def test_overhead_is_in_every_record(micro: Path) -> None:
    for step in ("rollout", "filter", "reward", "train", "evaluate"):
        record = json.loads((micro / f"reports/01/{step}.json").read_text())
        assert 0 <= record["seconds_overhead"] <= record["seconds"]
        assert record["peak_memory_mb"] > 0
        assert set(record["environment"]) == {"python", "packages", "cpu", "commit", "dirty"}
