"""A time limit that holds whatever the step does: a watching process ends the step and its children when it has run out.

The watcher also ends the step when the process that started it is gone, so that nothing goes on unseen.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from rlpipe import processes
from rlpipe.errors import DeadlineError

GRACE_SECONDS = 10.0
"""How long a process that was asked to end may take, such as one that has a job elsewhere to remove."""
POLL_SECONDS = 0.05


def watch(seconds: float, what: str, do: str, told: Callable[[DeadlineError], None], parent: int | None = None) -> None:
    """Start the watcher of this process. Linux only; elsewhere the platform's own time limit has to do.

    Args:
        seconds: how long this process may go on.
        what: names the step in the message.
        do: what to change for more time.
        told: called in the watcher with the error, before the step is ended.
        parent: the process without which the step has no reason to go on; None is its own parent.
    """
    if not hasattr(os, "pidfd_open"):
        return
    step, parent, ends = os.getpid(), parent or os.getppid(), time.monotonic() + seconds
    sys.stdout.flush()
    sys.stderr.flush()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return
    # forked twice, so that the watcher is nobody's child and no step takes it for one of its own
    if os.fork() == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with suppress(ProcessLookupError):
            _watch(step, parent, ends, lambda: told(DeadlineError(f"{what} took longer than {seconds:g} s", do=do)))
    os._exit(0)


def _watch(step: int, parent: int, ends: float, told: Callable[[], None]) -> None:
    watched = {os.pidfd_open(step): step, os.pidfd_open(parent): parent}
    gone, _, _ = select.select(list(watched), [], [], max(0.0, ends - time.monotonic()))
    if step in (watched[descriptor] for descriptor in gone):
        return
    if not gone:
        told()
    # children before the step: once it is gone they could not be found by it
    _end([*(child.pid for child in processes.below([step], processes.alive())), step])


def _end(pids: list[int]) -> None:
    """Ask each to end, then end those that have not."""
    _signal(pids, signal.SIGTERM)
    until = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < until and any(process.pid in pids for process in processes.alive()):
        time.sleep(POLL_SECONDS)
    _signal(pids, signal.SIGKILL)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
