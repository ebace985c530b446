"""`rlpipe runs list|show|logs|stop`."""

from collections.abc import Callable

import pytest

from rlpipe.errors import ClusterError, ConfigError
from rlpipe.kubeflow import runs
from rlpipe.kubeflow.client import Server
from tests.kubeflow.contract_server import ContractServer, api, detail, stage

Said = pytest.CaptureFixture[str]


def test_list_joins_pages_newest_first(contract: ContractServer, server: Server) -> None:
    names = [f"run {i}" for i in range(230)]
    for name in names:
        contract.add_run(display_name=name)
    assert [run.display_name for run in runs.newest(server, limit=220)] == names[::-1][:220]
    assert contract.count("GET", "/runs") == 3


def test_a_server_that_gives_the_same_page_again_is_left(contract: ContractServer, server: Server) -> None:
    contract.fault("GET", "/runs", status=200, raw=b'{"runs": [{"run_id": "a"}], "next_page_token": "more"}', kind="application/json", times=10)
    with pytest.raises(ClusterError, match="the same page again for: list runs"):
        runs.newest(server)
    assert contract.count("GET", "/runs") == 2


@pytest.mark.parametrize("limit", ["0", "-1"])
def test_a_limit_below_one_is_refused(contract: ContractServer, rlpipe: Callable[..., int], limit: str) -> None:
    assert rlpipe("runs", "list", "--limit", limit) == 2
    assert contract.requests == []


def test_list_of_one_experiment(contract: ContractServer, rlpipe: Callable[..., int], capsys: Said) -> None:
    contract.kept["experiments"]["e1"] = api.V2beta1Experiment(experiment_id="e1", display_name="papers")
    contract.add_run(display_name="other")
    ours = contract.add_run(display_name="ours", experiment_id="e1", state="SUCCEEDED")
    assert rlpipe("runs", "list", "--experiment", "papers") == 0
    assert capsys.readouterr().out.startswith(f"run={ours.run_id} state=SUCCEEDED name='ours' created_at=20")
    assert rlpipe("runs", "list", "--experiment", "none") == 2


def test_show(contract: ContractServer, rlpipe: Callable[..., int], capsys: Said) -> None:
    contract.script = [stage("FAILED", detail("start", "SUCCEEDED"), detail("train", "FAILED", error="no space"))]
    run = contract.add_run(display_name="a b")
    assert rlpipe("runs", "show", run.run_id) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"run={run.run_id} state=FAILED name='a b'")
    assert rest == ["task=start state=SUCCEEDED", "task=train state=FAILED error='no space'", f"link={contract.url}/#/runs/details/{run.run_id}"]


def test_an_unknown_run_is_said(rlpipe: Callable[..., int], capsys: Said) -> None:
    assert rlpipe("runs", "show", "nothing") == 12
    assert "404 for: get run nothing (run nothing not found.)" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["show", "logs", "stop"])
def test_an_id_is_needed(rlpipe: Callable[..., int], action: str) -> None:
    assert rlpipe("runs", action) == 2


def test_stop_ends_a_run_and_leaves_an_ended_one(contract: ContractServer, rlpipe: Callable[..., int], capsys: Said) -> None:
    run = contract.add_run(state="RUNNING")
    assert rlpipe("runs", "stop", run.run_id) == 0
    assert run.state == "CANCELED"
    assert rlpipe("runs", "stop", run.run_id) == 0
    assert capsys.readouterr().out.splitlines() == [f"run={run.run_id} state=stopping", f"run={run.run_id} state=had_ended"]
    assert contract.count("POST", "/runs/.*:terminate") == 1


def failed_with_pods(contract: ContractServer) -> str:
    contract.script = [
        stage(
            "FAILED",
            detail("train-driver", "SUCCEEDED", pod_name="p1"),
            detail("start", "SUCCEEDED", pod_name="p2"),
            detail("train", "FAILED", pod_name="p3", error="bad"),
        )
    ]
    contract.logs = {"p1": "driver", "p2": "start says\n", "p3": "Traceback\nbad\n"}
    return str(contract.add_run().run_id)


@pytest.mark.parametrize("place", ["ui", "api"])
def test_logs_of_what_failed_from_either_server(contract: ContractServer, rlpipe: Callable[..., int], capsys: Said, place: str) -> None:
    contract.logs_from = place
    run_id = failed_with_pods(contract)
    assert rlpipe("runs", "logs", run_id) == 0
    assert capsys.readouterr().out == "==> train (FAILED)\nTraceback\nbad\n"
    assert rlpipe("runs", "logs", run_id, "--task", "start") == 0
    assert capsys.readouterr().out == "==> start (SUCCEEDED)\nstart says\n"


def test_logs_of_all_tasks_where_none_failed(contract: ContractServer, server: Server) -> None:
    run_id = failed_with_pods(contract)
    contract.script = [stage("RUNNING", detail("start", pod_name="p2"), detail("train", pod_name="p3"), detail("train-driver", pod_name="p1"))]
    assert [text for _, text in runs.logs(server, run_id)] == ["start says\n", "Traceback\nbad\n"]


def test_the_pods_namespace_is_that_of_the_experiment(contract: ContractServer, server: Server) -> None:
    run_id = failed_with_pods(contract)
    contract.kept["experiments"]["e1"] = api.V2beta1Experiment(experiment_id="e1", display_name="papers", namespace="ada")
    contract.kept["runs"][run_id].experiment_id = "e1"
    contract.logs = {}
    with pytest.raises(ClusterError, match="kubectl logs --namespace ada --selector pipeline/runid="):
        runs.logs(server, run_id)


@pytest.mark.parametrize("place", ["ui", "api", "nowhere"])
def test_logs_that_the_server_does_not_give(contract: ContractServer, rlpipe: Callable[..., int], capsys: Said, place: str) -> None:
    contract.logs_from = place
    run_id = failed_with_pods(contract)
    contract.logs = {}
    assert rlpipe("runs", "logs", run_id) == 12
    assert f"do: kubectl logs --namespace kubeflow --selector pipeline/runid={run_id} --container main" in capsys.readouterr().err


def test_logs_of_an_unknown_task(contract: ContractServer, server: Server) -> None:
    with pytest.raises(ConfigError, match="accepted: train-driver, start, train"):
        runs.logs(server, failed_with_pods(contract), task="tran")
