"""What MLflow could not take is kept and sent later, in order, once: real stores, with outages, lost answers and kills.

Cases D01, D05, D07, D10, W36.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from rlpipe import cli
from rlpipe.errors import ConfigError
from rlpipe.session import retry_tags
from rlpipe.tracking import Tracker, TrackingConfig
from rlpipe.tracking_client import opened
from rlpipe.tracking_spool import PLACE, Entry, Spool

KEY = "a" * 64
ROUNDS = {"rounds": [{"round": "01", "previous": "00"}, {"round": "02", "previous": "01"}]}


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("store") / "mlflow.db"
    opened(f"sqlite:///{place}", 5).search_experiments()
    return place


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    policy = tmp_path / "rounds/01/policy"
    policy.mkdir(parents=True)
    (policy / "weights").write_bytes(b"weights")
    return tmp_path


def down(workdir: Path) -> None:
    (workdir / "mlflow.db").write_text("no database " * 50)


def tracker(workdir: Path, key: str = KEY, **given) -> Tracker:
    return Tracker(TrackingConfig(**given), workdir, key, ROUNDS)


def two_rounds(tracked: Tracker, workdir: Path) -> None:
    """All that a run says: steps, policies, a promotion, its end."""
    inputs = {"policy": {"path": "rounds/00/policy", "fingerprint": "b" * 64, "dvc": None}}
    for index in (1, 2):
        for at, step in enumerate(("rollout", "train", "evaluate")):
            tracked.log_step(step, index, {"loss": index / 2, "greedy_accuracy": 0.5}, {"truncated": 1}, inputs, {"lr": 0.1}, at=100 * index + at)
        tracked.register_policy(index, workdir / "rounds/01/policy", policy_version=index, fingerprint=str(index) * 64, dvc=None, metrics={})
    tracked.promote("1" * 64, "better")


def all_of(workdir: Path) -> dict:
    """What the store says, without ids."""
    store = MlflowClient(f"sqlite:///{workdir / 'mlflow.db'}")
    found = store.search_runs([store.get_experiment_by_name("rlpipe").experiment_id])
    runs = {
        run.info.run_name: {
            "status": run.info.status,
            "params": run.data.params,
            "inputs": sorted((item.dataset.name, item.dataset.digest, item.tags[0].value) for item in run.inputs.dataset_inputs),
            "points": sorted((m.key, m.step, m.timestamp, m.value) for name in run.data.metrics for m in store.get_metric_history(run.info.run_id, name)),
        }
        for run in found
    }
    assert len(runs) == len(found)  # no name twice
    versions = sorted(tuple(sorted(version.tags.items())) for version in store.search_model_versions("name = 'rlpipe-policy'"))
    return {"runs": runs, "versions": versions, "champion": store.get_model_version_by_alias("rlpipe-policy", "champion").tags["sha256"]}


@pytest.fixture(scope="module")
def expected(empty_store: Path, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("expected")
    shutil.copy(empty_store, folder / "mlflow.db")
    (folder / "rounds/01/policy").mkdir(parents=True)
    (folder / "rounds/01/policy/weights").write_bytes(b"weights")
    two_rounds(tracker(folder), folder)
    return comparable(all_of(folder))


def comparable(found: dict) -> dict:
    """Without the time of the promotion, which is that of the call."""
    return {**found, "versions": [[tag for tag in version if tag[0] != "champion_since"] for version in found["versions"]]}


def test_d01_an_outage_of_the_whole_run_loses_nothing_and_sends_nothing_twice(workdir, empty_store, expected, capsys) -> None:
    down(workdir)
    tracked = tracker(workdir)
    two_rounds(tracked, workdir)
    assert len(tracked.problems) == 9
    shutil.copy(empty_store, workdir / "mlflow.db")
    assert cli.main(["sync", "--workdir", str(workdir)]) == 0
    assert capsys.readouterr().out.startswith("sent=9 waiting=0 place=")
    assert comparable(all_of(workdir)) == expected
    assert not (workdir / PLACE).exists()
    assert cli.main(["sync", "--workdir", str(workdir)]) == 0
    assert comparable(all_of(workdir)) == expected


def test_d01_an_outage_in_the_middle_is_made_up_for_by_the_next_process(workdir, empty_store, expected) -> None:
    down(workdir)
    tracker(workdir).log_step("start", 0, {}, {}, {}, {}, at=1)
    shutil.copy(empty_store, workdir / "mlflow.db")
    two_rounds(tracker(workdir), workdir)
    found = comparable(all_of(workdir))
    del found["runs"]["round 00"]
    assert found == expected


def test_a_run_that_finds_all_finished_sends_what_was_kept(workdir, empty_store, expected) -> None:
    down(workdir)
    two_rounds(tracker(workdir), workdir)
    shutil.copy(empty_store, workdir / "mlflow.db")
    tracker(workdir).finish()
    assert comparable(all_of(workdir)) == expected


def test_a_kill_before_the_spool_was_emptied_sends_all_of_it_again_and_leaves_no_trace(workdir, empty_store, expected) -> None:
    down(workdir)
    two_rounds(tracker(workdir), workdir)
    kept = (workdir / PLACE).read_text()
    shutil.copy(empty_store, workdir / "mlflow.db")
    assert tracker(workdir).sync() == 9
    (workdir / PLACE).write_text(kept + '{"what": "cut sho')
    assert tracker(workdir).sync() == 9
    assert comparable(all_of(workdir)) == expected


@pytest.mark.parametrize("name", ["create_run", "create_model_version", "set_terminated", "log_batch", "set_registered_model_alias"])
def test_d07_an_answer_that_is_lost_makes_nothing_twice(workdir, empty_store, expected, monkeypatch, name: str) -> None:
    shutil.copy(empty_store, workdir / "mlflow.db")
    call, lost = getattr(MlflowClient, name), []

    def unanswered(*args, **given):
        done = call(*args, **given)
        if not lost:
            lost.append(name)
            raise ConnectionError("the answer is lost")
        return done

    monkeypatch.setattr(MlflowClient, name, unanswered)
    tracked = tracker(workdir)
    two_rounds(tracked, workdir)
    assert lost
    tracker(workdir).sync()
    assert comparable(all_of(workdir)) == expected


def test_what_is_kept_for_one_store_is_not_sent_to_another(workdir, empty_store, monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    tracker(workdir).log_step("train", 1, {}, {}, {}, {})
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    shutil.copy(empty_store, workdir / "mlflow.db")
    tracked = tracker(workdir)
    assert tracked.sync() == 0
    assert tracked.problems == ["train of round 1"]
    assert "secret" not in (workdir / PLACE).read_text()


def test_d05_another_config_is_a_run_that_names_the_one_before(tmp_path: Path) -> None:
    assert retry_tags(tmp_path, "a" * 64) == {}
    assert retry_tags(tmp_path, "a" * 64) == {}
    assert retry_tags(tmp_path, "b" * 64) == {"rlpipe.retry_of": "rlpipe-aaaaaaaa"}
    assert retry_tags(tmp_path, "b" * 64) == {"rlpipe.retry_of": "rlpipe-aaaaaaaa"}


def test_d10_many_processes_that_make_one_store_together(tmp_path: Path) -> None:
    """Sixteen at once, each a run of its own: no error, every metric there."""
    code = """
import multiprocessing, sys
from pathlib import Path
import mlflow
from rlpipe.tracking import Tracker, TrackingConfig

def work(name):
    tracked = Tracker(TrackingConfig(timeout_seconds=60), Path(sys.argv[1]), name * 64, {}, keep=False)
    tracked.log_step("train", 1, {"loss": 0.5}, {}, {}, {}, at=1)
    assert tracked.problems == []

running = [multiprocessing.get_context("fork").Process(target=work, args=(name,)) for name in "0123456789abcdef"]
for process in running: process.start()
for process in running: process.join()
sys.exit(sum(process.exitcode != 0 for process in running))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[-2000:]) == (0, "")
    store = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    found = store.search_runs([store.get_experiment_by_name("rlpipe").experiment_id], "tags.`rlpipe.round` = '1'")
    assert [run.data.metrics for run in found] == [{"train/loss": 0.5}] * 16


def test_a_promotion_by_hand_is_recorded_with_its_reason(workdir, empty_store, capsys) -> None:
    shutil.copy(empty_store, workdir / "mlflow.db")
    two_rounds(tracker(workdir), workdir)
    assert cli.main(["promote", "--to", "2", "--reason", "round 1 speaks French", "--workdir", str(workdir)]) == 0
    assert capsys.readouterr().out.startswith("champion=2 before=1 policy_version=2 round=2")
    tags = MlflowClient(f"sqlite:///{workdir / 'mlflow.db'}").get_model_version_by_alias("rlpipe-policy", "champion").tags
    assert (tags["champion_because"], tags["champion_after"]) == ("by hand: round 1 speaks French", "1")
    assert cli.main(["promote", "--to", "7", "--reason", "x", "--workdir", str(workdir)]) == ConfigError.exit_code
    assert "rlpipe-policy has no such version; got 7; accepted: 2, 1" in capsys.readouterr().err
    down(workdir)
    assert cli.main(["promote", "--to", "1", "--reason", "x", "--workdir", str(workdir)]) == 16


def test_an_entry_is_read_as_it_was_written(tmp_path: Path) -> None:
    entry = Entry("place", "train of round 1", {"key": "k", "params": {"a": "1"}}, "log_step", {"at": 1.5})
    for spool in (Spool(tmp_path / "deep/spool.jsonl"), Spool(None)):
        spool.append(entry)
        assert spool.entries() == [entry]
        spool.keep([])
        assert spool.entries() == []
    assert json.dumps(entry._asdict())
    assert not (tmp_path / "deep/spool.jsonl").exists()
