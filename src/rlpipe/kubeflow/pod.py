"""What surrounds every task in its pod: the time limit, quiet libraries, and a failure that says why where people look for it."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlpipe import deadline
from rlpipe.cli import quiet
from rlpipe.errors import RlpipeError

TIMEOUT, FAILURE, PARENT = "RLPIPE_TIMEOUT_SECONDS", "RLPIPE_FAILURE_FILE", "RLPIPE_PARENT_PID"
"""Environment of a task: its time limit; where it says why it failed; the process it must not outlive."""
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
    what = task if round_index is None else f"{task} of round {round_index}"
    seconds = float(os.environ.get(TIMEOUT, "0"))
    if seconds:
        parent = int(os.environ[PARENT]) if PARENT in os.environ else None
        deadline.watch(seconds, what, f"raise kubeflow.resources.{task}.timeout_seconds", lambda error: _tell(what, error), parent)
    try:
        yield
    except RlpipeError as error:
        _tell(what, error)
        sys.exit(error.exit_code)


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
