"""One batch of calls on the sandbox's workers: what waits, what each worker has, what came back."""

from __future__ import annotations

import json
import pickle
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rlpipe.reward.worker import Limits, Outcome, send

MAX_CHUNK = 256
CHUNKS_PER_WORKER = 4
SEND_SECONDS = 30

Call = tuple[int, tuple[Any, ...]]
"""Index of the scorer, and its arguments."""


class Worker:
    """One worker as the parent sees it: the calls it has, and since when it is busy with the first of them."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self.connection = pid, connection
        self.positions: deque[int] = deque()
        self.since = 0.0
        self.unread = b""
        self.proven = False
        connection.settimeout(SEND_SECONDS)


class Workers(Protocol):
    """Where a batch gets its workers from."""

    workers: list[Worker]

    def start_worker(self) -> Worker: ...

    def end_worker(self, worker: Worker) -> int: ...


class Batch:
    """One batch: what waits, what each worker has, what came back."""

    def __init__(self, sandbox: Workers, calls: Sequence[Call], limits: Limits, deadline_seconds: float) -> None:
        self.sandbox, self.calls, self.limits, self.deadline_seconds = sandbox, calls, limits, deadline_seconds
        self.outcomes: list[Outcome | None] = [None] * len(calls)
        self.num_open = len(calls)
        self.waiting = deque(range(len(calls)))
        self.selector = selectors.DefaultSelector()
        self.chunk = 1

    def run(self, num_workers: int) -> list[Outcome]:
        deadline = time.monotonic() + self.deadline_seconds
        self.chunk = min(MAX_CHUNK, -(-len(self.calls) // (CHUNKS_PER_WORKER * max(1, num_workers))))
        with self.selector:
            for worker in list(self.sandbox.workers):
                self._enlist(worker)
            while self.num_open:
                while self.waiting and len(self.sandbox.workers) < num_workers:
                    self._enlist(self.sandbox.start_worker())
                self._wait(deadline)
        return [outcome for outcome in self.outcomes if outcome is not None]

    def _wait(self, deadline: float) -> None:
        """Read what came, then end what has been at one call for too long."""
        busy = [worker.since + self.limits.wall_seconds for worker in self.sandbox.workers if worker.positions]
        for key, _ in self.selector.select(max(0.0, min(deadline, *busy) - time.monotonic())):
            self._read(key.data)
        now = time.monotonic()
        for worker in list(self.sandbox.workers):
            if worker.positions and now - worker.since > self.limits.wall_seconds:
                self._lost(worker, self._overrun())
        if now > deadline:
            self._give_up()

    def _enlist(self, worker: Worker) -> None:
        self.selector.register(worker.connection, selectors.EVENT_READ, worker)
        self._hand_out(worker)

    def _hand_out(self, worker: Worker) -> None:
        """Give an idle worker its next chunk."""
        positions = [self.waiting.popleft() for _ in range(min(self.chunk, len(self.waiting)))]
        if not positions:
            return
        worker.positions.extend(positions)
        worker.since = time.monotonic()
        try:
            send(worker.connection, pickle.dumps([(position, *self.calls[position]) for position in positions]))
        except OSError:
            # It died, or stopped listening, while idle: no call is to blame, unless it never worked
            self._lost(worker, None if worker.proven else self._death)

    def _read(self, worker: Worker) -> None:
        try:
            content = worker.connection.recv(1 << 18)
        except OSError:
            content = b""
        if not content:
            self._lost(worker, self._death)
            return
        worker.since = time.monotonic()
        worker.proven = True
        whole, _, worker.unread = (worker.unread + content).rpartition(b"\n")
        if not self._settled(worker, whole):
            return
        if not worker.positions:
            self._hand_out(worker)

    def _settled(self, worker: Worker, lines: bytes) -> bool:
        """Take a worker's answers; False if it had to be ended over one of them."""
        for position, value, status, reason in _parsed(lines):
            if not worker.positions or worker.positions[0] != position:
                self._lost(worker, Outcome(None, "died", "answered out of turn"))
                return False
            if status == "memory":
                # What it left behind would count against the calls that follow
                self._lost(worker, Outcome(None, status, f"over the limit of {self.limits.memory_mb} MB"))
                return False
            self._settle(worker.positions.popleft(), Outcome(value, status, reason))
        return True

    def _lost(self, worker: Worker, verdict: Outcome | Callable[[int], Outcome] | None) -> None:
        """End a worker; `verdict` falls on the call it was at, the rest of its chunk waits again."""
        self.selector.unregister(worker.connection)
        code = self.sandbox.end_worker(worker)
        if verdict is not None and worker.positions:
            self._settle(worker.positions.popleft(), verdict(code) if callable(verdict) else verdict)
        self.waiting.extendleft(reversed(worker.positions))

    def _death(self, code: int) -> Outcome:
        if code == -signal.SIGXCPU:
            return self._overrun()
        return Outcome(None, "died", f"exit status {code}" if code >= 0 else f"signal {signal.Signals(-code).name}")

    def _overrun(self) -> Outcome:
        # One text for both limits: which of them strikes first depends on the machine's load
        return Outcome(None, "timeout", f"over the limit of {self.limits.wall_seconds:g} s or {self.limits.cpu_seconds} s of CPU")

    def _give_up(self) -> None:
        for worker in list(self.sandbox.workers):
            if worker.positions:
                self._lost(worker, None)
        late = Outcome(None, "timeout", f"the batch was over its deadline of {self.deadline_seconds:g} s")
        for position, outcome in enumerate(self.outcomes):
            if outcome is None:
                self._settle(position, late)
        self.waiting.clear()

    def _settle(self, position: int, outcome: Outcome) -> None:
        self.outcomes[position] = outcome
        self.num_open -= 1


def _parsed(lines: bytes) -> list[Any]:
    """The answers in whole lines of JSON; one that is out of turn where they cannot be read."""
    try:
        answers: list[Any] = json.loads(b"[" + lines.replace(b"\n", b",") + b"]")
    except ValueError:
        return [[-1, None, "died", None]]
    return answers
