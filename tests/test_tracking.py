"""MLflow with a real sqlite store, and with servers that are not there (cases D02, D04)."""

import json
import logging
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlpipe import artifact, layout, params, steps
from rlpipe.errors import ConfigError
from rlpipe.tracking import Tracker, TrackingConfig
from rlpipe.tracking_client import opened
from rlpipe.tracking_place import reason, tracking_uri, without_user

NUMBERS = {"greedy_accuracy": 0.5, "num_eval_tasks": 200}
PARAMS = {"run": {"seed": 0}, "train": {"learning_rate": 1e-5, "betas": [0.9, 0.95], "kl": None}}
KEY = "a" * 64
PARENT = "tags.`rlpipe.role` = 'run'"
REFUSED = "ConnectionRefusedError: [Errno 111] Connection refused"


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """A sqlite file with MLflow's tables, since making one takes seconds."""
    folder = tmp_path_factory.mktemp("store")
    opened(f"sqlite:///{folder / 'mlflow.db'}", 5).search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def workdir(tmp_path, empty_store, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    policy = tmp_path / "rounds/01/policy/modules/policy"
    policy.mkdir(parents=True)
    (policy / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def tracker(workdir, *, key=KEY, params=PARAMS, **config):
    return Tracker(TrackingConfig(**config), workdir, key, params)


def client(workdir):
    return MlflowClient(f"sqlite:///{workdir / 'mlflow.db'}")


def runs(workdir, text=""):
    store = client(workdir)
    return store.search_runs([store.get_experiment_by_name("rlpipe").experiment_id], text)


def one(workdir, text):
    (found,) = runs(workdir, text)
    return found


def statuses(workdir):
    return {run.info.run_name: run.info.status for run in runs(workdir)}


def inputs(path="rounds/00/policy"):
    return {"policy": {"path": path, "fingerprint": "b" * 64, "dvc": "c" * 32 + ".dir"}}


def register(tracked, workdir, fingerprint="d" * 64, metrics=NUMBERS, round_index=1):
    tracked.register_policy(round_index, workdir / "rounds/01/policy", policy_version=3, fingerprint=fingerprint, dvc="c" * 32 + ".dir", metrics=metrics)
    return tracked.version_of(fingerprint)


def test_one_parent_and_one_child_a_round_whichever_process_asks(workdir):
    for step, round_index in (("rollout", 1), ("train", 1), ("rollout", 2)):
        tracked = tracker(workdir)
        tracked.log_step(step, round_index, {"num_groups": 4}, {"truncated": 2}, inputs(), {"num_tasks": 4})
        assert tracked.problems == []
    parent = one(workdir, PARENT)
    assert parent.data.params == {"run.seed": "0", "train.learning_rate": "1e-05", "train.betas": "[0.9, 0.95]", "train.kl": "None"}
    children = runs(workdir, f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert sorted(run.data.tags["rlpipe.round"] for run in children) == ["1", "2"]
    first = next(run for run in children if run.data.tags["rlpipe.round"] == "1")
    assert first.data.metrics == {"rollout/num_groups": 4, "rollout/reason/truncated": 2, "train/num_groups": 4, "train/reason/truncated": 2}
    assert first.data.params == {"round": "1", "rollout.num_tasks": "4", "train.num_tasks": "4"}


def test_another_key_is_another_run(workdir):
    for key in ("a" * 64, "b" * 64):
        tracker(workdir, key=key).log_step("rollout", 1, {}, {}, {}, {})
    assert len(runs(workdir, "tags.`rlpipe.role` = 'run'")) == 2


def test_evaluations_draw_a_course_over_rounds_in_the_parent(workdir):
    tracked = tracker(workdir)
    tracked.log_step("start", 0, {"greedy_accuracy": 0.25}, {}, {}, {})
    tracked.log_step("evaluate", 1, {"greedy_accuracy": 0.5}, {}, {}, {})
    parent = runs(workdir, "tags.`rlpipe.role` = 'run'")[0].info.run_id
    course = client(workdir).get_metric_history(parent, "evaluate/greedy_accuracy")
    assert [(point.step, point.value) for point in course] == [(0, 0.25), (1, 0.5)]


def test_the_round_s_course_reaches_the_parent_with_evaluate_whichever_process_asks(workdir):
    losses = {"loss": -0.5, "approx_kl": 0.125, "entropy": 2, "clip_fraction": 0, "grad_norm": 1.5}
    for round_index in (1, 2):
        tracker(workdir).log_step("rollout", round_index, {"mean_completion_tokens": 7.5, "num_trajectories": 16, "seconds": 2}, {}, {}, {})
        tracker(workdir).log_step("reward", round_index, {"sampled_reward": 0.25, "num_groups_with_signal": 3, "num_scored": 16}, {}, {}, {})
        tracker(workdir).log_step("train", round_index, losses, {}, {}, {})
        tracker(workdir).log_step("evaluate", round_index, {"greedy_accuracy": 0.5}, {}, {}, {})
    parent = one(workdir, PARENT)
    sent = ("rollout/mean_completion_tokens", "rollout/seconds", "reward/sampled_reward", "reward/num_groups_with_signal", "evaluate/greedy_accuracy")
    assert set(parent.data.metrics) == {*sent, *(f"train/{name}" for name in losses)}
    course = client(workdir).get_metric_history(parent.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in course] == [(1, -0.5), (2, -0.5)]


def test_a_child_carries_its_round_and_no_params_of_the_parent(workdir):
    raw = params.read_yaml(Path("configs/micro.yaml"))
    tracked = tracker(workdir, params=steps.resolved(raw))
    for step in ("start", *layout.ROUND_STEPS):
        tracked.log_step(step, 1, {}, {}, {}, params.resolved(steps.config(step, raw)))
    assert one(workdir, "tags.`rlpipe.round` = '1'").data.params == {"round": "1"}


def test_inputs_are_datasets_with_path_and_hash(workdir):
    tracker(workdir).log_step("train", 1, {}, {}, inputs(), {})
    found = runs(workdir, "tags.`rlpipe.round` = '1'")[0].inputs.dataset_inputs[0]
    assert (found.dataset.name, found.dataset.digest, found.tags[0].value) == ("policy", "c" * 32 + ".dir", "train")
    assert json.loads(found.dataset.source) == {"path": "rounds/00/policy", "sha256": "b" * 64, "dvc": "c" * 32 + ".dir"}


def test_the_same_step_twice_is_no_conflict(workdir):
    for _ in range(2):
        tracked = tracker(workdir)
        tracked.log_step("train", 1, NUMBERS, {}, inputs(), {"learning_rate": 1e-5})
        assert tracked.problems == []


def test_a_policy_is_registered_by_reference_once_and_promoted(workdir):
    tracked = tracker(workdir)
    version = register(tracked, workdir)
    assert register(tracker(workdir), workdir) == version
    tracked.promote("d" * 64, "it is better")
    found = client(workdir).get_model_version_by_alias("rlpipe-policy", "champion")
    assert str(found.version) == version
    assert found.source == f"dvc://{'c' * 32}.dir/rounds/01/policy"
    wanted = {"sha256": "d" * 64, "dvc": "c" * 32 + ".dir", "policy_version": "3", "path": "rounds/01/policy", "bytes": "7", "round": "1"}
    wanted |= {"champion_because": "it is better", "champion_after": ""}
    assert wanted.items() <= found.tags.items()
    assert not (workdir / "mlartifacts").exists()


def test_d08_over_the_limit_goes_the_uri_under_it_the_weights(workdir):
    """A policy kept elsewhere: over the threshold MLflow has its URI, hash and size and no copy; under it a copy that is the policy."""
    place = {"policy_version": 3, "fingerprint": "d" * 64, "dvc": None, "metrics": {}, "uri": "s3://bucket/policy"}
    policy = workdir / "rounds/01/policy"
    over, under = tracker(workdir, key="1" * 64), tracker(workdir, key="2" * 64, copy_below_mb=1)
    over.register_policy(1, policy, **place)
    found = client(workdir).get_model_version("rlpipe-policy", over.version_of("d" * 64))
    assert (found.source, found.tags["sha256"], found.tags["bytes"]) == ("s3://bucket/policy", "d" * 64, "7")
    assert not (workdir / "mlartifacts").exists()
    under.register_policy(1, policy, **place)
    found = client(workdir).get_model_version("rlpipe-policy", under.version_of("d" * 64))
    copy = Path(client(workdir).download_artifacts(found.run_id, "policy"))
    assert artifact.folder_fingerprint(copy) == artifact.folder_fingerprint(policy)


def test_a_small_policy_is_copied_below_the_limit(workdir):
    version = register(tracker(workdir, copy_below_mb=1), workdir)
    copy = Path(client(workdir).download_artifacts(client(workdir).get_model_version("rlpipe-policy", version).run_id, "policy"))
    assert (copy / "modules/policy/model.safetensors").read_bytes() == b"weights"
    assert (workdir / "mlartifacts").is_dir()
    assert not (workdir / "mlruns").exists()


def test_d02_what_is_not_finite_is_counted_and_stops_no_registration(workdir):
    tracked = tracker(workdir)
    tracked.log_step("train", 3, {"reward": math.nan, "loss": math.inf, "kl": None, "steps": 5}, {}, {}, {})
    assert runs(workdir, "tags.`rlpipe.round` = '3'")[0].data.metrics == {"train/steps": 5, "train/non_finite": 2}
    assert register(tracked, workdir, metrics={"greedy_accuracy": math.nan}, round_index=3) == "1"
    assert tracked.problems == []


def test_d04_the_place_is_one_whatever_lies_around(workdir, monkeypatch):
    (workdir / "mlruns").mkdir()
    monkeypatch.chdir(workdir / "mlruns")
    tracked = tracker(workdir)
    assert tracked.place == str(workdir / "mlflow.db")
    tracked.log_step("rollout", 1, {}, {}, {}, {})
    assert os.listdir(workdir / "mlruns") == []
    assert len(runs(workdir)) == 2


@pytest.mark.parametrize("uri", ["./mlruns", "file:///tmp/mlruns", "file:mlruns", "/tmp/mlruns", "mlruns"])
def test_d04_folders_are_refused(tmp_path, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI names a folder") as caught:
        tracker(tmp_path)
    assert "unset MLFLOW_TRACKING_URI" in str(caught.value)


@pytest.mark.parametrize("uri", ["http://host:5000", "https://host/mlflow", "postgresql+psycopg2://host/db", "sqlite:////data/mlflow.db", "databricks"])
def test_stores_of_the_environment_are_taken(tmp_path, monkeypatch, uri):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    assert tracking_uri(tmp_path) == uri


def closed_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("uri", ["http://user:secret@127.0.0.1:{port}", "postgresql://user:secret@127.0.0.1:{port}/db"])
def test_a_dead_server_costs_records_and_no_time(workdir, monkeypatch, uri, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri.format(port=closed_port()))
    tracked = tracker(workdir)
    began = time.monotonic()
    tracked.log_step("train", 1, NUMBERS, {}, inputs(), {})
    assert register(tracked, workdir) is None
    tracked.finish()
    assert time.monotonic() - began < 5
    assert tracked.problems == ["train of round 1", "policy of round 1", "status FINISHED"]
    logging.getLogger("urllib3.connectionpool").warning("heard again")
    assert caplog.messages == [f"tracking=off place={tracked.place} what='train of round 1' error={REFUSED} do=rlpipe_sync", "heard again"]
    assert "secret" not in caplog.text + tracked.place


def test_a_server_that_never_answers_is_given_up_after_the_timeout(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        code = f"""
from pathlib import Path
from rlpipe.tracking import Tracker, TrackingConfig
from rlpipe.tracking_client import opened
tracked = Tracker(TrackingConfig(timeout_seconds=1), Path({str(tmp_path)!r}), "a" * 64, {{}})
tracked.log_step("train", 1, {{}}, {{}}, {{}}, {{}})
tracked.log_step("evaluate", 1, {{}}, {{}}, {{}}, {{}})
assert tracked.problems == ["train of round 1", "evaluate of round 1"], tracked.problems
"""
        environment = {**os.environ, "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60, capture_output=True, text=True)
    assert time.monotonic() - began < 30
    assert [line.partition(" ")[0] for line in done.stderr.splitlines()] == ["tracking=off"]


def test_a_store_that_cannot_be_opened_is_given_up_at_once(tmp_path):
    (tmp_path / "mlflow.db").write_text("this is no database, however long one makes it " * 20)
    tracked = tracker(tmp_path)
    began = time.monotonic()
    tracked.log_step("train", 1, {}, {}, {}, {})
    assert tracked.problems == ["train of round 1"]
    assert time.monotonic() - began < 5


def test_no_path_of_the_machine_and_no_secret_is_sent(workdir):
    params = {"model": {"path": str(workdir / "models/start"), "other": "/home/ann/models/big"}, "url": "https://ann:secret@host/x"}
    tracker(workdir, params=params).log_step("train", 1, {}, {}, inputs(str(workdir / "rounds/00/policy")), {"url": "s3://key:secret@bucket"})
    sent = json.dumps([[run.data.params, run.data.tags, [d.dataset.source for d in run.inputs.dataset_inputs]] for run in runs(workdir)])
    assert "secret" not in sent
    assert str(workdir) not in sent
    assert "/home" not in sent
    assert "models/start" in sent
    assert without_user("see http://ann:secret@host/a?b") == "see http://host/a?b"


def test_many_and_long_params(workdir):
    params = {"train": {f"p{i}": "x" * 7000 for i in range(250)}}
    tracked = tracker(workdir, params=params)
    tracked.log_step("train", 1, {}, {}, {}, {})
    assert tracked.problems == []
    sent = runs(workdir, "tags.`rlpipe.role` = 'run'")[0].data.params
    assert len(sent) == 250
    assert {len(value) for value in sent.values()} == {6000}


def test_the_last_round_s_policy_ends_the_parent_whichever_process_asks(workdir):
    rounds = {"rounds": [{"round": "01", "previous": "00"}, {"round": "02", "previous": "01"}]}
    for round_index, status in ((0, "RUNNING"), (1, "RUNNING"), (2, "FINISHED")):
        tracker(workdir, params=rounds).log_step("evaluate", round_index, {}, {}, {}, {})
        register(tracker(workdir, params=rounds), workdir, fingerprint=str(round_index) * 64, round_index=round_index)
        assert one(workdir, PARENT).info.status == status
    tracker(workdir, params=rounds).log_step("train", 2, {}, {}, {}, {})
    assert set(statuses(workdir).values()) == {"FINISHED"}


def test_a_failure_marks_only_the_round_in_progress_until_the_run_goes_on(workdir):
    rounds = {"rounds": [{"round": "01", "previous": "00"}]}
    tracked = tracker(workdir, params=rounds)
    tracked.log_step("start", 0, {}, {}, {}, {})
    register(tracked, workdir, fingerprint="0" * 64, round_index=0)
    tracked.log_step("rollout", 1, {}, {}, {}, {})
    tracked.finish("FAILED")
    assert statuses(workdir) == {"rlpipe-aaaaaaaa": "FAILED", "round 00": "FINISHED", "round 01": "FAILED"}
    again = tracker(workdir, params=rounds)
    again.log_step("train", 1, {}, {}, {}, {})
    assert statuses(workdir) == {"rlpipe-aaaaaaaa": "RUNNING", "round 00": "FINISHED", "round 01": "RUNNING"}
    register(again, workdir)
    again.finish("FAILED")  # after the last policy there is nothing to fail
    assert set(statuses(workdir).values()) == {"FINISHED"}


def test_a_reason_is_one_sentence_of_at_most_120_characters():
    assert reason(ValueError("no such model. Try another\nSELECT 1")) == "ValueError: no such model"
    assert reason(ValueError("x" * 500)) == f"ValueError: {'x' * 119}…"
    assert reason(ValueError()) == "ValueError: "


def test_switched_off(tmp_path):
    tracked = tracker(tmp_path, enabled=False)
    tracked.log_step("train", 1, {}, {}, {}, {})
    assert tracked.problems == []
    assert list(tmp_path.iterdir()) == []
