"""The child side of the sandbox: a template process that forks, and the workers it forks.

The *template* imports what the scorers need, once, and calls none of them, so it always answers; when its parent goes,
however it goes, its socket closes and it takes its workers along. A *worker* is forked from it in a few milliseconds
and calls scorers under limits; it has its own process group and talks to the parent through a socket of its own, so
what a scorer prints goes nowhere. Nothing heavy is imported here.
"""

from __future__ import annotations

import gc
import json
import math
import os
import pickle
import re
import resource
import signal
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, Protocol

from rlpipe.reward.base import OverLimit

LENGTH = struct.Struct("!Q")
PREPARE_SECONDS = 120
TEMPLATE_SECONDS = 5
MAX_REASON = 200


class Limits(NamedTuple):
    """What one call of a scorer may take. Memory is a process's own writable memory, its imports included."""

    wall_seconds: float
    cpu_seconds: int
    memory_mb: int


class Outcome(NamedTuple):
    """What became of one call: `value` is None where there is none; `status` is ok, limit, error, timeout, memory or died."""

    value: float | None
    status: str
    reason: str | None = None


class Scorer(Protocol):
    """What a worker calls: `prepare` imports what it needs before any clock starts."""

    def prepare(self) -> None: ...

    def __call__(self, *arguments: Any) -> float | None: ...


def send(connection: socket.socket, content: bytes) -> None:
    """Send one message."""
    connection.sendall(LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket) -> bytes | None:
    """One message; None once the other side is gone."""
    header = _exactly(connection, LENGTH.size)
    return None if header is None else _exactly(connection, int(LENGTH.unpack(header)[0]))


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    pieces = bytearray()
    while len(pieces) < size:
        try:
            piece = connection.recv(min(size - len(pieces), 1 << 20))
        except ConnectionResetError:
            return None
        if not piece:
            return None
        pieces += piece
    return bytes(pieces)


def main(descriptor: int) -> None:
    """Serve as the template until the parent closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=descriptor) as control:
        Template(control).serve()


class Template:
    """Prepares scorers, forks workers, and ends and reaps them, one request after the other."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.scorers: Sequence[Scorer] = ()
        self.limits = Limits(1.0, 1, 1024)
        self.workers: set[int] = set()
        self.num_left = 0

    def serve(self) -> None:
        try:
            while (request := receive(self.control)) is not None:
                kind, argument = pickle.loads(request)
                send(self.control, pickle.dumps(self.answer(kind, argument)))
        finally:
            for pid in list(self.workers):
                self.end(pid)
            self.num_left += _end_below(os.getpid())
            # the last that is sent, so that it is found whatever the parent has not read
            with suppress(OSError):
                self.control.sendall(LENGTH.pack(self.num_left))

    def answer(self, kind: str, argument: Any) -> str | int | None:
        """Do what a request asks."""
        if kind == "prepare":
            return self.prepare(argument)
        return self.start() if kind == "start" else self.end(argument)

    def prepare(self, pickled: bytes) -> str | None:
        """Load scorers and limits; returns what went wrong. A load that never ends is ended by the alarm's default action."""
        signal.alarm(PREPARE_SECONDS)
        try:
            self.scorers, self.limits = pickle.loads(pickled)
            for scorer in self.scorers:
                scorer.prepare()
        except Exception as error:  # the boundary to third-party code: whatever it raises is reported by name
            return reason(error)
        finally:
            signal.alarm(0)
        gc.collect()
        gc.freeze()
        return None

    def start(self) -> int:
        """Fork a worker on the socket that follows the request; returns its process id."""
        _, descriptors, _, _ = socket.recv_fds(self.control, 1, 1)
        pid = os.fork()
        if pid == 0:
            self._become_worker(descriptors[0])
        os.close(descriptors[0])
        # Both sides set the group, so that it stands before either goes on
        with suppress(OSError):
            os.setpgid(pid, pid)
        self.workers.add(pid)
        return pid

    def end(self, pid: int) -> int:
        """Kill a worker's process group and what it started outside of it, or find it dead; returns its exit code, negative for a signal."""
        # Only this process reaps, so the id cannot have passed to another process
        ended, status = os.waitpid(pid, os.WNOHANG)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGSTOP)  # so that it starts nothing meanwhile
        if not ended:
            self.num_left += _end_below(pid, but=pid)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        if not ended:
            _, status = os.waitpid(pid, 0)
        self.workers.discard(pid)
        return os.waitstatus_to_exitcode(status)

    def _become_worker(self, descriptor: int) -> NoReturn:
        code = 1
        try:
            self.control.close()
            os.setpgid(0, 0)
            memory = self.limits.memory_mb << 20
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
            with socket.socket(fileno=descriptor) as connection:
                work(connection, self.scorers, self.limits.cpu_seconds)
            # the template ends this process, to find what it left; only where the template is gone it ends by itself
            time.sleep(TEMPLATE_SECONDS)
            code = 0
        finally:
            os._exit(code)


def _end_below(root: int, but: int | None = None) -> int:
    """Kill the descendants of a process but for those in the process group `but`; returns how many.

    While a step runs, those whose own parent died are the step's to end.
    """
    from rlpipe import processes  # which imports the sandbox, and that this module

    found = processes.below([root], processes.alive(), lambda child: processes.KEPT in " ".join(processes.arguments(child.pid)))
    left = [child.pid for child in found if child.group != but]
    for pid in left:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(left)


def work(connection: socket.socket, scorers: Sequence[Scorer], cpu_seconds: int) -> None:
    """Answer chunks of calls, one line of JSON a call as soon as it is done, until the parent closes the socket."""
    own = os.getpid()
    while (request := receive(connection)) is not None:
        for position, scorer, arguments in pickle.loads(request):
            allowed = math.ceil(time.process_time() + cpu_seconds)
            resource.setrlimit(resource.RLIMIT_CPU, (allowed, resource.RLIM_INFINITY))
            answer = [position, *judged(scorers[scorer], arguments)]
            if os.getpid() != own:
                # The scorer forked and came back in both processes: only one may answer
                os._exit(0)
            connection.sendall(json.dumps(answer).encode() + b"\n")


def judged(scorer: Scorer, arguments: tuple[Any, ...]) -> Outcome:
    """What one call comes to."""
    try:
        value = scorer(*arguments)
        if value is None:
            return Outcome(None, "error", "no_score")
        value = float(value)
        return Outcome(value, "ok") if math.isfinite(value) else Outcome(None, "error", "non_finite")
    except OverLimit as limit:
        return Outcome(0.0, "limit", reason(limit))
    except MemoryError:
        return Outcome(None, "memory")
    except BaseException as error:  # the one boundary to scorers: whatever they raise is "could not score"
        return Outcome(None, "error", reason(error))


def reason(error: BaseException) -> str:
    """`ExceptionType: short text`, on one line, the same in every process."""
    try:
        said = str(error)
    except BaseException:  # of the same boundary: an exception whose text raises too
        said = "without a text"
    text = re.sub(r"0x[0-9a-fA-F]+", "0x…", " ".join(said.split()))
    return f"{type(error).__name__}: {text}"[:MAX_REASON].encode(errors="replace").decode()
