"""Processes as Linux shows them: what a step left behind is ended, and `rlpipe ps` lists what of rlpipe is alive.

Where there is no /proc nothing is found and nothing is ended.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rlpipe.reward import sandbox

log = logging.getLogger("rlpipe")

PROC = Path("/proc")
SET_CHILD_SUBREAPER = 36
OWN_EXIT_SECONDS = 1.0
"""How long a child may take to go by itself, as those of an engine do that is being closed."""
TERMINATE_SECONDS = 3.0
"""How long one that was told to end may take before it is killed."""
POLL_SECONDS = 0.02
KEPT = "multiprocessing.resource_tracker"
"""Python's own, one a process, which ends with it."""


@dataclass(frozen=True)
class Process:
    """A process; `started` is in clock ticks since boot, so that with `pid` it names this process and no later one."""

    pid: int
    started: int
    parent: int
    group: int
    name: str

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.started


def alive() -> list[Process]:
    """Every process of this machine that runs; not those that are dead and not yet collected."""
    found = (_read(int(place.name)) for place in (PROC.iterdir() if PROC.is_dir() else ()) if place.name.isdigit())
    return [process for process in found if process is not None]


def _read(pid: int) -> Process | None:
    text = _content(pid, "stat")
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    if len(fields) < 20 or fields[0] in "ZX":
        return None
    return Process(pid, int(fields[19]), int(fields[1]), int(fields[2]), name)


def _content(pid: int, name: str) -> str:
    """A file of /proc/PID; empty where the process is gone or another user's."""
    try:
        return (PROC / str(pid) / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def arguments(pid: int) -> list[str]:
    """The command line of a process."""
    return _content(pid, "cmdline").split("\0")[:-1]


def below(roots: Iterable[int], processes: Sequence[Process], leave: Callable[[Process], bool] = lambda _: False) -> list[Process]:
    """The children of `roots`, theirs, and so on; not those to `leave`, nor what is below them."""
    found: list[Process] = []
    level = set(roots)
    while level:
        children = [process for process in processes if process.parent in level and process not in found and not leave(process)]
        found += children
        level = {process.pid for process in children}
    return found


@contextmanager
def none_left_by(step: str) -> Iterator[list[str]]:
    """Within it a step runs; the child processes it started and left are then ended, and named in the list it gives.

    Those whose own parent died are found too. The scoring processes, which serve one step after the other, are left.
    """
    before = {child.identity for child in _children()}
    ended: list[str] = []
    _adopt_orphans(True)
    try:
        yield ended
    finally:
        ended += [child.name for child in end_new(before)]
        _adopt_orphans(False)
        if ended:
            log.warning("step=%s children_ended=%d names=%s reason=left_behind", step, len(ended), ",".join(ended))


def end_new(before: set[tuple[int, int]]) -> list[Process]:
    """End this process's descendants but for those in `before`: terminated first, then killed with their groups; returns them."""

    def new() -> list[Process]:
        return [child for child in _children() if child.identity not in before]

    if _gone(new, OWN_EXIT_SECONDS):
        return []
    left = new()
    groups = {child.group for child in left if child.group == child.pid}
    identities = {child.identity for child in left}

    def still() -> list[Process]:
        return [process for process in alive() if process.identity in identities or process.group in groups]

    _signal(left, signal.SIGTERM)
    if not _gone(still, TERMINATE_SECONDS):
        _signal(still(), signal.SIGKILL)
        _gone(still, TERMINATE_SECONDS)
    for child in left:
        with suppress(ChildProcessError):
            os.waitpid(child.pid, os.WNOHANG)
    return left


def _children() -> list[Process]:
    serving = sandbox.shared().pid
    return below([os.getpid()], alive(), lambda child: child.pid == serving or KEPT in " ".join(arguments(child.pid)))


def _gone(find: Callable[[], list[Process]], seconds: float) -> bool:
    """Whether nothing is found within this time."""
    until = time.monotonic() + seconds
    while find():
        if time.monotonic() > until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def _signal(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)


def _adopt_orphans(on: bool) -> None:
    """Let descendants whose parent died become children of this process instead of the machine's first one."""
    if PROC.is_dir():
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


@dataclass(frozen=True)
class Running:
    """A process of rlpipe, as `rlpipe ps` shows it; `round` is None where the command line does not say."""

    pid: int
    seconds: float
    memory_mb: float
    round: str | None
    workdir: str
    command: str


def running() -> list[Running]:
    """Every process of rlpipe on this machine but this one, and what they started, oldest first."""
    processes = alive()
    roots = [process for process in processes if _is_rlpipe(arguments(process.pid))]
    found = {process.pid: process for process in (*roots, *below([root.pid for root in roots], processes)) if process.pid != os.getpid()}
    return [_described(process) for process in sorted(found.values(), key=lambda process: process.identity[::-1])]


def _is_rlpipe(command: Sequence[str]) -> bool:
    """`rlpipe …`, `python …/rlpipe …`, `python -m rlpipe.cli …`, or `python -c` with code that imports rlpipe."""
    names = [Path(word).name for word in command[:2]]
    if names[:1] == ["rlpipe"] or (names[1:] == ["rlpipe"] and names[0].startswith("python")):
        return True
    return any((flag == "-m" and word.split(".")[0] == "rlpipe") or (flag == "-c" and "from rlpipe" in word) for flag, word in pairwise(command))


def _described(process: Process) -> Running:
    command = arguments(process.pid)
    booted = float((_content_of_machine("uptime").split() or ["0"])[0])
    memory = [line.split()[1] for line in _content(process.pid, "status").splitlines() if line.startswith("VmRSS:")]
    folder = _folder(process.pid)
    return Running(
        pid=process.pid,
        seconds=max(0.0, booted - process.started / os.sysconf("SC_CLK_TCK")),
        memory_mb=int(memory[0]) / 1024 if memory else 0.0,
        round=_option(command, "--round-index"),
        workdir=os.path.normpath(os.path.join(folder, _option(command, "--workdir") or "")) if folder else "",
        command=_step(command) or process.name,
    )


def _content_of_machine(name: str) -> str:
    return (PROC / name).read_text(encoding="ascii") if (PROC / name).is_file() else ""


def _folder(pid: int) -> str:
    try:
        return os.readlink(PROC / str(pid) / "cwd")
    except OSError:
        return ""


def _option(command: Sequence[str], name: str) -> str | None:
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _step(command: Sequence[str]) -> str | None:
    """`rlpipe train` for a command of the CLI; never its options, which may be long or private."""
    for word, following in pairwise(command):
        if Path(word).name == "rlpipe" or word == "rlpipe.cli":
            return f"rlpipe {following}"
    return "rlpipe scoring" if any("rlpipe.reward.worker" in word for word in command) else None


def holder(lock: Path) -> int | None:
    """The process that has a lock file open; None if there is none, or none that may be looked into."""
    wanted = os.path.realpath(lock)
    for process in alive():
        with suppress(OSError):
            if any(os.path.realpath(descriptor) == wanted for descriptor in (PROC / str(process.pid) / "fd").iterdir()):
                return process.pid
    return None


def table(processes: Sequence[Running], lock: Path) -> str:
    """What `rlpipe ps` prints."""
    rows = [["pid", "age", "memory", "round", "command", "workdir"]]
    rows += [[str(one.pid), _age(one.seconds), f"{one.memory_mb:.0f} MB", one.round or "-", one.command, one.workdir] for one in processes]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    pid = holder(lock)
    return "\n".join([*lines, "", f"lock of the working folder: {'held by pid ' + str(pid) if pid else 'free'}"])


def _age(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
