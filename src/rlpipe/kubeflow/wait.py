"""Follow a run to its end: one line a change of state, and an error that says what failed."""

from __future__ import annotations

import logging
import time
from typing import Any

from rlpipe.errors import INTERRUPTED, ClusterError, DeadlineError, RlpipeError, RunCancelledError, RunFailedError
from rlpipe.kubeflow.answers import UnansweredError
from rlpipe.kubeflow.client import Server
from rlpipe.kubeflow.run_tasks import ENDED, failures, state_of, tasks_of
from rlpipe.kubeflow.runs import get, stop

log = logging.getLogger("rlpipe")


class WaitInterruptedError(RlpipeError):
    """Ctrl-C while a run was waited for."""

    exit_code = INTERRUPTED


def follow(server: Server, run_id: str, *, timeout: float | None = None, run_timeout: float | None = None) -> None:
    """Wait until a run has succeeded.

    Args:
        timeout: seconds to wait; the run goes on after them.
        run_timeout: seconds the run may take from now; it is ended after them.

    Raises:
        RunFailedError: it failed; the tasks that failed are named.
        RunCancelledError: it was cancelled.
        DeadlineError: one of the times ran out.
        ClusterError: the server refused, or was away for too long.
    """
    began = answered = time.monotonic()
    shown: dict[str, str] = {}
    while True:
        try:
            run = get(server, run_id)
            answered = time.monotonic()
            _show_changes(run, shown)
            if state_of(run) in ENDED:
                return judge(run)
        except UnansweredError:
            if time.monotonic() - answered > server.patience.outage:
                raise
        passed = time.monotonic() - began
        if run_timeout is not None and passed > run_timeout:
            raise _ended(server, run_id, run_timeout)
        if timeout is not None and passed > timeout:
            do = f"the run goes on; wait again with `rlpipe runs show {run_id} --wait`"
            raise DeadlineError("waiting for the run took longer than --timeout", got=f"{timeout:g} s for run {run_id}", do=do)
        limits = [limit - passed for limit in (timeout, run_timeout) if limit is not None]
        time.sleep(max(0.01, min([server.patience.poll, *limits])))


def judge(run: Any) -> None:
    """Nothing if an ended run succeeded.

    Raises:
        RunFailedError: it failed or was skipped.
        RunCancelledError: it was cancelled.
    """
    state = state_of(run)
    if state == "CANCELED":
        raise RunCancelledError("the run was cancelled", got=f"run {run.run_id}", do="submit again; what is finished under the same inputs need not run again")
    if state != "SUCCEEDED":
        reasons = [f"{task.name}: {task.error or 'the server tells no reason'}" for task in failures(run)]
        if run.error and run.error.message:
            reasons.append(f"the run: {run.error.message}")
        got = f"run {run.run_id} {state}; " + ("; ".join(reasons) or "the server names no task")
        raise RunFailedError("the run failed", got=got, do=f"rlpipe runs logs {run.run_id}")


def _show_changes(run: Any, shown: dict[str, str]) -> None:
    for key, name, state in [("run", None, state_of(run)), *((task.key, task.name, task.state) for task in tasks_of(run))]:
        if shown.get(key) != state:
            shown[key] = state
            log.info(f"run={run.run_id} state={state}" if name is None else f"task={name} state={state}")


def _ended(server: Server, run_id: str, seconds: float) -> DeadlineError:
    """End a run whose time is up."""
    do = "give kubeflow.run_timeout_seconds more, or the run less to do"
    try:
        stop(server, run_id)
    except ClusterError as error:
        return DeadlineError(
            "the run took longer than kubeflow.run_timeout_seconds, and could not be ended", got=f"{seconds:g} s for run {run_id}; {error}", do=do
        )
    return DeadlineError("the run took longer than kubeflow.run_timeout_seconds and was ended", got=f"{seconds:g} s for run {run_id}", do=do)
