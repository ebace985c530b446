"""SIGTERM as an exception: what was started is ended on the way out, and work that can be saved quickly is saved first.

Kubernetes, systemd and schedulers send SIGTERM and kill what is still there a while later.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATED = 128 + signal.SIGTERM


class Terminated(SystemExit):
    """SIGTERM came; unwinds the stack as Ctrl-C does, with the exit code that a shell gives for it."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


class Saving:
    """Whether a save is wanted before the process ends; see `saved_first`."""

    wanted = False


@contextmanager
def terminating() -> Iterator[None]:
    """Within it SIGTERM raises `Terminated`; only the main thread can do so, elsewhere nothing changes."""
    with _on_sigterm(_leave):
        yield


@contextmanager
def saved_first(grace_seconds: float) -> Iterator[Saving]:
    """Within it SIGTERM sets `wanted`, for the code inside to save; `Terminated` is raised at its end, and after `grace_seconds` whatever that code does."""
    saving = Saving()

    def ask(number: int, frame: FrameType | None) -> None:
        saving.wanted = True
        signal.signal(signal.SIGALRM, _leave)
        signal.setitimer(signal.ITIMER_REAL, grace_seconds)

    before = signal.getsignal(signal.SIGALRM)
    with _on_sigterm(ask):
        try:
            yield saving
        finally:
            if saving.wanted:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
    if saving.wanted:
        raise Terminated


@contextmanager
def _on_sigterm(handler: object) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, frame: FrameType | None) -> None:
    raise Terminated
