"""What surrounds every task in its pod: the time limit, quiet libraries, and a failure that says why where people look for it."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlpipe import deadline
from rlpipe.errors import RlpipeError
from rlpipe.logs import quiet

TIMEOUT, FAILURE, PARENT = "RLPIPE_TIMEOUT_SECONDS", "RLPIPE_FAILURE_FILE", "RLPIPE_PARENT_PID"
"""Environment of a task: its time limit; where it says why it failed; the process it must not outlive."""
FINISHED, RUN_ENDS, MODULES = "RLPIPE_FINISHED_IN", "RLPIPE_RUN_ENDS", "RLPIPE_MODULES_IN"
"""On a local runner: the working folder in which its step may be finished already; when the whole run must end, in seconds
since 1970; folders with the user's own modules and task files, looked into after all others."""
IMAGE, RUN_ID = "RLPIPE_IMAGE", "RLPIPE_RUN"
"""And for what it starts elsewhere: its image, and Kubeflow's id of the run."""
TERMINATION_LOG = Path("/dev/termination-log")
"""What Kubernetes shows as the reason of a pod that ended."""

log = logging.getLogger("rlpipe")


@contextmanager
def guarded(task: str, round_index: int | None = None) -> Iterator[None]:
    """Keep to the time limit; end with the exit code and message of what rlpipe explains itself.

    Raises:
        SystemExit: with the documented exit code.
    """
    quiet(debug=False)
    _speak()
    sys.path += [str(folder) for folder in own_folders() if str(folder) not in sys.path]
    what = task if round_index is None else f"{task} of round {round_index}"
    _watch(task, what)
    try:
        yield
    except RlpipeError as error:
        _tell(what, error)
        sys.exit(error.exit_code)


def own_folders() -> list[Path]:
    """Where the user's own modules and task files lie on a local runner, the working folder first; none in a cluster."""
    return [Path(folder) for folder in os.environ.get(MODULES, "").split(os.pathsep) if folder]


def _watch(task: str, what: str) -> None:
    """Keep to the task's time limit, or to what is left of the run's where that is less."""
    limits = {}
    if TIMEOUT in os.environ:
        limits[f"kubeflow.resources.{task}.timeout_seconds"] = float(os.environ[TIMEOUT])
    if RUN_ENDS in os.environ:
        limits["kubeflow.run_timeout_seconds"] = max(0.0, float(os.environ[RUN_ENDS]) - time.time())
    if limits:
        key = min(limits, key=limits.__getitem__)
        parent = int(os.environ[PARENT]) if PARENT in os.environ else None
        deadline.watch(limits[key], what, f"raise {key}", lambda error: _tell(what, error), parent)


def _speak() -> None:
    """kfp's executor lets every library log; here only warnings of theirs, and rlpipe's lines as they are."""
    logging.getLogger().setLevel(logging.WARNING)
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
    log.propagate = False


def _tell(what: str, error: RlpipeError) -> None:
    """The message to the log, to Kubernetes, and to whoever started this run."""
    sys.stderr.write(f"rlpipe: {what}: {error}\n")
    sys.stderr.flush()
    if TERMINATION_LOG.exists() and os.access(TERMINATION_LOG, os.W_OK):
        TERMINATION_LOG.write_text(f"{what}: {error}"[:4000], encoding="utf-8")
    if place := os.environ.get(FAILURE):
        state = "timeout" if error.exit_code == 11 else "failed"
        content = {"task": what, "state": state, "exit_code": error.exit_code, "type": type(error).__name__, "message": str(error)}
        Path(place).write_text(json.dumps(content), encoding="utf-8")
