"""Following a run to its end: `submit --wait` and `runs show --wait`."""

import dataclasses
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from rlpipe.errors import ClusterError, DeadlineError, RunCancelledError, RunFailedError
from rlpipe.kubeflow.auth import Credentials
from rlpipe.kubeflow.client import Server
from rlpipe.kubeflow.wait import follow
from tests.kubeflow.conftest import FAST
from tests.kubeflow.contract_server import ContractServer, api, detail, stage

GOOD = [
    stage("PENDING"),
    stage("RUNNING", detail("start", "RUNNING")),
    stage("RUNNING", detail("start", "RUNNING")),
    stage("RUNNING", detail("start", "SUCCEEDED"), detail("train", "PENDING")),
    stage("SUCCEEDED", detail("start", "SUCCEEDED"), detail("train", "SUCCEEDED")),
]
BAD = [stage("RUNNING", detail("train")), stage("FAILED", detail("start", "SUCCEEDED"), detail("train", "FAILED", error="loss is not finite"))]


def test_success_is_told_one_line_a_change(contract: ContractServer, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    contract.script = GOOD
    run = contract.add_run()
    with caplog.at_level(logging.INFO, "rlpipe"):
        follow(server, run.run_id)
    assert caplog.messages == [
        f"run={run.run_id} state=PENDING",
        f"run={run.run_id} state=RUNNING",
        "task=start state=RUNNING",
        "task=start state=SUCCEEDED",
        "task=train state=PENDING",
        f"run={run.run_id} state=SUCCEEDED",
        "task=train state=SUCCEEDED",
    ]


def test_a_failed_run_names_its_failed_tasks_and_what_they_said(contract: ContractServer, server: Server) -> None:
    contract.script = BAD
    run = contract.add_run()
    with pytest.raises(RunFailedError, match="train: loss is not finite") as caught:
        follow(server, run.run_id)
    assert f"do: rlpipe runs logs {run.run_id}" in str(caught.value)
    assert "start" not in str(caught.value)


def test_a_task_is_named_with_the_pipelines_it_is_nested_in(contract: ContractServer, server: Server) -> None:
    contract.script = [
        stage(
            "FAILED",
            detail("root", "FAILED", task_id="0"),
            detail("rl-round-2", "FAILED", task_id="1", parent_task_id="0"),
            detail("train", "FAILED", task_id="2", parent_task_id="1", child_tasks=[api.PipelineTaskDetailChildTask(pod_name="tiny-x-9")]),
            detail("executor", "FAILED", task_id="3", pod_name="tiny-x-9", error="out of memory"),
            error="child 'train' failed",
        )
    ]
    with pytest.raises(RunFailedError) as caught:
        follow(server, contract.add_run().run_id)
    assert "FAILED; rl-round-2.train: out of memory; the run: child 'train' failed" in str(caught.value)


def test_a_failure_without_any_reason_is_a_failure(contract: ContractServer, server: Server) -> None:
    contract.script = [stage("FAILED", detail("train", "FAILED"))]
    with pytest.raises(RunFailedError, match="train: the server tells no reason"):
        follow(server, contract.add_run().run_id)


def test_a_skipped_run_is_no_success(contract: ContractServer, server: Server) -> None:
    contract.script = [stage("SKIPPED")]
    with pytest.raises(RunFailedError, match="SKIPPED"):
        follow(server, contract.add_run().run_id)


def test_a_cancelled_run_ends_the_wait(contract: ContractServer, server: Server) -> None:
    contract.script = [stage("RUNNING"), stage("CANCELING"), stage("CANCELED")]
    with pytest.raises(RunCancelledError):
        follow(server, contract.add_run().run_id)


def test_the_wait_runs_out_and_the_run_goes_on(contract: ContractServer, server: Server) -> None:
    contract.script = [stage("RUNNING")]
    run = contract.add_run()
    began = time.monotonic()
    with pytest.raises(DeadlineError, match="goes on") as caught:
        follow(server, run.run_id, timeout=0.1)
    assert time.monotonic() - began < 5
    assert "--timeout" in str(caught.value)
    assert run.state == "RUNNING"


def test_the_budget_of_the_run_ends_it(contract: ContractServer, server: Server) -> None:
    contract.script = [stage("RUNNING")]
    run = contract.add_run()
    with pytest.raises(DeadlineError, match="run_timeout_seconds and was ended"):
        follow(server, run.run_id, timeout=60, run_timeout=0.1)
    assert run.state == "CANCELED"


def test_a_run_that_cannot_be_ended_is_said(contract: ContractServer, server: Server) -> None:
    contract.script = [stage("RUNNING")]
    contract.fault("POST", "/runs/.*:terminate", status=403)
    with pytest.raises(DeadlineError, match=r"could not be ended.*403"):
        follow(server, contract.add_run().run_id, run_timeout=0.05)


def test_a_server_that_is_away_for_a_while_does_not_end_the_wait(contract: ContractServer) -> None:
    contract.script = GOOD
    contract.fault("GET", "/runs/.*", status=503, times=10)
    patient = dataclasses.replace(FAST, outage=30)
    follow(Server(contract.url, Credentials(), patience=patient), contract.add_run().run_id)
    assert contract.count("GET", "/runs/.*") == 10 + len(GOOD)


def test_a_server_that_stays_away_ends_the_wait(contract: ContractServer, server: Server) -> None:
    contract.fault("GET", "/runs/.*", status=503)
    with pytest.raises(ClusterError, match="503 for: get run"):
        follow(server, contract.add_run().run_id)


@pytest.mark.parametrize(
    ("script", "options", "code", "words"),
    [
        (GOOD, [], 0, ""),
        (BAD, [], 13, "train: loss is not finite"),
        ([stage("CANCELED")], [], 14, "cancelled"),
        ([stage("RUNNING")], ["--timeout", "0.1"], 11, "--timeout"),
    ],
)
def test_exit_codes(
    contract: ContractServer, rlpipe: Callable[..., int], capsys: pytest.CaptureFixture[str], script: list[Any], options: list[str], code: int, words: str
) -> None:
    contract.script = script
    run = contract.add_run()
    assert rlpipe("runs", "show", run.run_id, "--wait", *options) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("status", [401, 403, 404, 409, 500])
def test_api_trouble_is_exit_code_12(contract: ContractServer, rlpipe: Callable[..., int], capsys: pytest.CaptureFixture[str], status: int) -> None:
    contract.fault("GET", "/runs/.*", status=status)
    assert rlpipe("runs", "show", contract.add_run().run_id, "--wait") == 12
    assert f"{status} for: get run" in capsys.readouterr().err


def test_an_interrupted_wait_says_that_the_run_goes_on(contract: ContractServer) -> None:
    contract.script = [stage("RUNNING")]
    run = contract.add_run()
    program = "import sys; from rlpipe import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "runs", "show", run.run_id, "--wait", "--host", contract.url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr.readline() == f"run={run.run_id} state=RUNNING\n"
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert "the run goes on" in said
    assert f"rlpipe runs stop {run.run_id}" in said
    assert run.state == "RUNNING"
