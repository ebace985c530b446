"""Counts what a process does to a folder, and ends it at a chosen point.

Python tells audit hooks of every file opened, renamed, linked and removed, so nothing in rlpipe knows of this. Calls of MLflow's client are
told in the same way by `watch_tracking`.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Death = Literal["kill", "node", "term", "disk"]
DEATHS: tuple[Death, ...] = ("kill", "term", "disk", "node")
"""SIGKILL of the process, or of all of its session; SIGTERM; no write works from here on."""
NAMES = {"os.rename": "rename", "os.link": "link", "os.remove": "remove", "os.mkdir": "mkdir", "os.rmdir": "rmdir", "os.truncate": "truncate"}
TRACKING = "rlpipe.tests.tracking"
CALLS = ("create_run", "log_batch", "log_param", "set_tag", "set_terminated", "create_model_version", "set_model_version_tag", "set_registered_model_alias")
OPENED_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Fault:
    """Where to end it: at the `at`-th thing done below `folder`, counted over all processes in the file `counter`; 0 only records."""

    folder: str
    counter: str
    at: int
    death: Death = "kill"

    def install(self) -> None:
        """Watch this process from now on; cannot be undone."""
        watching = _Watching(self)
        sys.addaudithook(watching)


class _Watching:
    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.counter = os.open(fault.counter, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.events = os.open(fault.counter + ".events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.full = False

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        found = self._of_interest(event, args)
        if found is None:
            return
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.write(self.counter, b".")
        number = os.lseek(self.counter, 0, os.SEEK_CUR)
        if self.fault.at == 0:
            os.write(self.events, f"{found[0]}\t{found[1]}\n".encode())
        if number == self.fault.at:
            self._end(found[0])

    def _of_interest(self, event: str, args: tuple[Any, ...]) -> tuple[str, str] | None:
        if event == TRACKING:
            return "tracking", str(args[0])
        if event == "open" and isinstance(args[2], int) and args[2] & OPENED_TO_WRITE:
            return self._below("write", args[0])
        return self._below(NAMES[event], args[1] if event in ("os.rename", "os.link") else args[0]) if event in NAMES else None

    def _below(self, name: str, path: Any) -> tuple[str, str] | None:
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        place = os.path.abspath(os.fsdecode(path))
        return (name, os.path.relpath(place, self.fault.folder)) if place.startswith(self.fault.folder + os.sep) else None

    def _end(self, event: str) -> None:
        if self.fault.death == "disk":
            self.full = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.fault.death == "node":
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGTERM if self.fault.death == "term" else signal.SIGKILL)


def watch_tracking() -> None:
    """Tell audit hooks of the calls of MLflow's client that change something, before and after each."""
    from mlflow import MlflowClient

    for name in CALLS:
        call = getattr(MlflowClient, name)

        @functools.wraps(call)
        def told(*args: Any, _call: Any = call, _name: str = name, **named: Any) -> Any:
            sys.audit(TRACKING, f"before {_name}")
            result = _call(*args, **named)
            sys.audit(TRACKING, f"after {_name}")
            return result

        setattr(MlflowClient, name, told)


def recorded(counter: Path) -> list[tuple[str, str]]:
    """What a recording run did, in its order: the kind of event, and the path or call."""
    lines = Path(f"{counter}.events").read_text(encoding="utf-8", errors="replace").splitlines()
    return [(kind, place) for kind, _, place in (line.partition("\t") for line in lines)]
