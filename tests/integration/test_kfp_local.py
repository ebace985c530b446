"""The compiled pipeline on kfp's subprocess runner: the bytes of `rlpipe run`, its failures, its gates, and no secrets."""

import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe import artifact, params
from tests.integration.conftest import ARTIFACTS, MICRO, run, run_tiny

KFP = ("--on", "kfp-local")
SECRET = "marker-7f3a9c"


def hashes(workdir: Path, num_rounds: int) -> dict[str, str]:
    """Sha256 of every artifact and file of a run, by its place."""
    places = ["models/start", *(f"rounds/00/{name}" for name in ("policy", "progress", "history", "evaluation"))]
    places += [f"rounds/{index:02d}/{name}" for index in range(1, num_rounds + 1) for name in ARTIFACTS]
    found = {place: artifact.verify(workdir / place)["fingerprint"] for place in places}
    return found | {place: artifact.sha256(workdir / place) for place in ("tasks/train.jsonl", "tasks/eval.jsonl")}


def recorded(workdir: Path) -> dict:
    """What `dvc.lock` says of each stage's outputs: manifests included, so that these are equal too."""
    stages = params.read_yaml(workdir / "dvc.lock")["stages"]
    return {name: {out["path"]: out["md5"] for out in stage["outs"]} for name, stage in stages.items()}


def log(workdir: Path) -> str:
    return (workdir / ".rlpipe/kfp-local.log").read_text()


def promotions(workdir: Path) -> list[str]:
    """The tasks `promote` that ran."""
    return re.findall(r"Executing task \S*?'(promote(?:-\d+)?)'", log(workdir))


@pytest.fixture(scope="module")
def micro_on_kfp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished micro run of one round on the runner, its rollout in two shards, a secret in its environment; not to be changed."""
    workdir = tmp_path_factory.mktemp("micro-kfp")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_TOKEN", SECRET)
        environment.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        assert run(workdir, *KFP, "--set", "rollout.shards=2") == 0
    return workdir


@pytest.mark.recipes
@pytest.mark.timeout(900)
def test_three_rounds_are_those_of_the_run_in_process(tiny: Path, tmp_path: Path) -> None:
    """The same sha256 of every artifact, at the same places, and the same hashes in `dvc.lock`. Case B09: promote runs where the gate says so."""
    rows = run_tiny(tmp_path, *KFP, "--set", "tracking.enabled=false")
    assert hashes(tmp_path, 3) == hashes(tiny, 3)
    assert recorded(tmp_path) == recorded(tiny)
    before = json.loads((tiny / "reports/run.json").read_text())["rounds"]
    assert [row["sampled_reward"] for row in rows] == [row["sampled_reward"] for row in before]
    decisions = [row["decision"] for row in before]
    assert "promote" in decisions
    assert len(promotions(tmp_path)) == decisions.count("promote")


def test_one_round_in_shards_is_that_of_dvc_repro(micro: Path, micro_on_kfp: Path) -> None:
    """`micro` is held against `dvc repro` in test_micro_run.py; after the runner DVC has nothing to do either. Shards change no byte."""
    assert hashes(micro_on_kfp, 1) == hashes(micro, 1)
    assert recorded(micro_on_kfp) == recorded(micro)
    done = subprocess.run([sys.executable, "-m", "dvc", "status"], cwd=micro_on_kfp, capture_output=True, text=True, check=True)
    assert "up to date" in done.stdout


def test_a_policy_that_the_gate_does_not_promote_is_not_promoted(micro_on_kfp: Path) -> None:
    """Case B09: the other way, here for too few tasks; what did not run is said to be skipped."""
    assert json.loads((micro_on_kfp / "reports/run.json").read_text())["rounds"][0]["decision"] == "not enough"
    assert promotions(micro_on_kfp) == []


def test_nothing_of_the_runner_is_left(micro_on_kfp: Path) -> None:
    assert not (micro_on_kfp / ".rlpipe/kfp").exists()


def test_a_run_in_process_finds_it_finished(micro_on_kfp: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rlpipe")
    before = {path: path.stat().st_mtime_ns for path in micro_on_kfp.glob("rounds/*/*/manifest.json")}
    assert run(micro_on_kfp) == 0
    assert {path: path.stat().st_mtime_ns for path in micro_on_kfp.glob("rounds/*/*/manifest.json")} == before


def test_mlflow_has_one_run_with_the_params_of_every_step(micro: Path, micro_on_kfp: Path) -> None:
    def tracked(workdir: Path) -> tuple:
        with sqlite3.connect(workdir / "mlflow.db") as database:
            wanted = "select p.key from params p join tags t on t.run_uuid = p.run_uuid where t.key = 'rlpipe.role'"
            # how the work is spread is no part of what a step is decided by
            keys = {key for (key,) in database.execute(wanted) if key not in ("rounds", "rollout.shards")}
            metrics = {key for (key,) in database.execute("select distinct key from metrics")}
            runs = list(database.execute("select name, status from runs order by name"))
            tags = sorted((key, version, value != "") for key, version, value in database.execute("select key, version, value from model_version_tags"))
            aliases = list(database.execute("select alias, version from registered_model_aliases"))
        return keys, metrics, [(name.split("-")[0], status) for name, status in runs], tags, aliases

    assert tracked(micro_on_kfp) == tracked(micro)


def test_a_secret_of_the_environment_is_nowhere(micro_on_kfp: Path) -> None:
    """Case B07: in no file that the run left: log, manifests, records, lock, MLflow."""
    holding = [path for path in micro_on_kfp.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert holding == []


def test_a_failing_step_ends_with_its_own_exit_code_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """As in process: 4 for a round that can teach nothing. Case B27: a filter that drops everything ends the run, nothing hangs."""
    wanted = ["--set", "tracking.enabled=false", "--set", "filter.filters=[{type: too_long, max_tokens: 1}]", "--set", "run.no_signal=stop"]
    assert run(tmp_path, *KFP, *wanted) == 4
    said = capsys.readouterr().err
    assert "train of round 1" in said
    assert "Executing task" in log(tmp_path)
    assert re.search(r"Executing task \S*?'finish'", log(tmp_path))


def test_a_task_out_of_time_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Case B14: exit 11, the state is timeout, the limit and what to raise are named."""
    assert run(tmp_path, *KFP, "--set", "kubeflow.resources={start: {timeout_seconds: 1}}") == 11
    said = capsys.readouterr().err
    assert "start of round 0" in said
    assert "state timeout" in said
    assert "kubeflow.resources.start.timeout_seconds" in said


def test_the_whole_run_out_of_time_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Case B14: the run's own budget ends the task under way."""
    assert run(tmp_path, *KFP, "--set", "kubeflow.run_timeout_seconds=4") == 11
    assert "kubeflow.run_timeout_seconds" in capsys.readouterr().err


def test_the_run_goes_on_from_what_is_finished(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path, *KFP, "--set", "tracking.enabled=false", "--set", "kubeflow.resources={rollout: {timeout_seconds: 1}}") == 11
    begun = artifact.read_manifest(tmp_path / "rounds/00/policy")
    capsys.readouterr()
    assert run(tmp_path, *KFP, "--set", "tracking.enabled=false", "--set", "kubeflow.resources={filter: {timeout_seconds: 1}}") == 11
    assert "step=start round=0 state=up-to-date" in capsys.readouterr().err
    assert artifact.read_manifest(tmp_path / "rounds/00/policy") == begun
    assert artifact.verify(tmp_path / "rounds/01/trajectories")


def test_preflight_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    os.environ.pop("MISSING_TOKEN", None)
    assert run(tmp_path, *KFP, "--set", "kubeflow.secrets=[{name: hub, env: {token: MISSING_TOKEN}}]") == 15
    assert "MISSING_TOKEN" in capsys.readouterr().err


def test_params_too_long_for_a_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Case B04: locally nothing bounds a section. The first task gets them all; here it ends the run for another reason, to be quick."""
    raw = params.read_yaml(MICRO)
    raw["rollout"]["stop"] = [f"never-{index:06d}" for index in range(14_000)]
    raw["kubeflow"] = {"secrets": [{"name": "hub", "env": {"token": "MISSING_TOKEN"}}]}
    long = tmp_path / "long.yaml"
    long.write_text(json.dumps(raw))
    assert long.stat().st_size > 200_000
    assert run(tmp_path / "run", *KFP, config=long) == 15
    assert "MISSING_TOKEN" in capsys.readouterr().err
