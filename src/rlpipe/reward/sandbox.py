"""Runs scorers in child processes with hard limits, and always comes back.

A call that hangs, dies, eats memory or raises costs its own result and nothing else: its process group is killed, a
fresh worker takes its place, and the rest of its chunk is handed out again. Results stand in the order of the calls
and do not depend on the number of workers.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlpipe.errors import ConfigError, ScorerError
from rlpipe.reward import own_code
from rlpipe.reward.batch import Batch, Call, Worker
from rlpipe.reward.worker import LENGTH, Limits, Outcome, Scorer, receive, send

log = logging.getLogger("rlpipe")

START = "import sys; sys.path[:] = sys.argv[2:]; from rlpipe.reward.worker import main; main(int(sys.argv[1]))"


class Sandbox:
    """A template process and its workers, kept from one batch to the next. Usable from any thread, one batch at a time."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self._lock = threading.Lock()
        self._folders: tuple[Path, ...] = ()
        self._own_code: dict[str, str] = {}
        self._prepared: bytes | None = None
        self._template: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where the children look for modules after `sys.path`: the current folder, unless `look_in` named others."""
        return self._folders or (Path.cwd(),)

    @property
    def pid(self) -> int | None:
        """The template's process id, of which the workers are children; None while nothing runs."""
        return self._template.pid if self._template else None

    def look_in(self, folders: Sequence[Path]) -> None:
        """Let the children look for modules in `folders`, after `sys.path`."""
        wanted = tuple(folder.absolute() for folder in folders)
        with self._lock:
            if wanted != self._folders:
                self._close()
            self._folders = wanted

    def warm(self, code: Mapping[str, str] | None = None) -> None:
        """Begin to start the template without waiting for it; one that may have loaded other `code` (see `Section.own_code`) is ended first."""
        wanted = dict(code or {})
        with self._lock:
            if any(self._own_code.get(path, content) != content for path, content in wanted.items()):
                self._close()
            self._own_code |= wanted
            self._start_template()

    def run(self, scorers: Sequence[Scorer], calls: Sequence[Call], limits: Limits, *, workers: int, deadline_seconds: float) -> list[Outcome]:
        """The outcome of each call, in order.

        Args:
            scorers: picklable; `prepare` is called once, outside every limit.
            calls: (index into `scorers`, arguments) each.
            workers: processes to use.
            deadline_seconds: wall time for all calls together; what is open then is a `timeout`.

        Raises:
            ConfigError: a scorer cannot be loaded.
            ScorerError: the template process is gone, killed from outside or by a module it imported.
        """
        with self._lock:
            try:
                self._prepare(pickle.dumps((tuple(scorers), limits)))
                for worker in self.workers[workers:]:
                    self.end_worker(worker)
                return Batch(self, calls, limits, deadline_seconds).run(min(workers, len(calls)))
            except BaseException:
                # Also on Ctrl-C: what is half-way in a socket would be taken for an answer to the next batch
                self._close()
                raise

    def close(self) -> None:
        """End every child process; the next batch starts new ones."""
        with self._lock:
            self._close()

    def start_worker(self) -> Worker:
        """A fresh worker, forked from the template."""
        ours, theirs = socket.socketpair()
        with theirs:
            pid = self._ask("start", None, theirs.fileno())
        worker = Worker(pid, ours)
        self.workers.append(worker)
        return worker

    def end_worker(self, worker: Worker) -> int:
        """Kill a worker and what it started; returns its exit code, negative for a signal."""
        self.workers.remove(worker)
        worker.connection.close()
        return int(self._ask("end", worker.pid))

    def forget(self) -> None:
        """Let go of the parent's children in a forked process, without ending them."""
        for connection in (self._control, *(worker.connection for worker in self.workers)):
            if connection is not None:
                connection.close()

    def _prepare(self, prepared: bytes) -> None:
        self._start_template()
        if prepared == self._prepared:
            return
        for worker in list(self.workers):
            self.end_worker(worker)
        if problem := self._ask("prepare", prepared):
            raise ConfigError("a reward cannot be loaded", got=problem, do="check reward.rewards, and `path` and `args` of a custom one")
        self._prepared = prepared

    def _start_template(self) -> None:
        if self._template is not None:
            return
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", START, str(theirs.fileno()), *own_code.search_path(self.folders)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._template = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                process_group=0,
            )

    def _ask(self, kind: str, argument: Any, descriptor: int | None = None) -> Any:
        assert self._control is not None
        try:
            send(self._control, pickle.dumps((kind, argument)))
            if descriptor is not None:
                socket.send_fds(self._control, [b"\0"], [descriptor])
            answer = receive(self._control)
        except (BrokenPipeError, ConnectionResetError):
            answer = None
        if answer is None:
            raise ScorerError("the scoring processes are gone", got=f"no answer to {kind}", do="look for an out-of-memory kill, then run the step again")
        return pickle.loads(answer)

    def _close(self) -> None:
        template, self._template, self._prepared = self._template, None, None
        control, self._control = self._control, None
        if control is not None:
            with suppress(OSError):
                control.shutdown(socket.SHUT_WR)
        for worker in self.workers:
            worker.connection.close()
        if template is not None:
            try:
                template.wait(5)
            except subprocess.TimeoutExpired:
                for group in (template.pid, *(worker.pid for worker in self.workers)):
                    with suppress(ProcessLookupError):
                        os.killpg(group, signal.SIGKILL)
                template.wait()
        if control is not None:
            if template is not None and template.returncode == 0 and (num := _num_left(control)):
                log.warning("step=reward children_ended=%d reason=left_behind_by_a_scorer", num)
            control.close()
        self.workers.clear()


def _num_left(control: socket.socket) -> int:
    """What a template that ended by itself says last: how many processes scorers had left."""
    try:
        said = control.recv(1 << 20, socket.MSG_DONTWAIT)
    except OSError:
        return 0
    return int(LENGTH.unpack(said[-LENGTH.size :])[0]) if len(said) >= LENGTH.size else 0


_SANDBOXES: dict[str, Sandbox] = {}


def shared() -> Sandbox:
    """This process's sandbox; its children end with the process, however it ends."""
    return _SANDBOXES.setdefault("own", Sandbox())


def _close() -> None:
    for sandbox in _SANDBOXES.values():
        sandbox.close()


def _forget() -> None:
    for sandbox in _SANDBOXES.values():
        sandbox.forget()
    _SANDBOXES.clear()


atexit.register(_close)
os.register_at_fork(after_in_child=_forget)
