"""A command whose whole process group ends with it, with this process's parent, or when it is told to: `python -m rlpipe.engines.guard COMMAND …`.

Standard input is the parent's pipe and never written to: it closes when the parent closes it or is gone, however it ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

GRACE_SECONDS = 5.0
"""How long the group may take to end when told to, before it is killed."""
POLL_SECONDS = 0.05
SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Run the command; returns its exit code, or 0 if it was told to end. Must lead a process group."""
    over, parent = threading.Event(), os.getppid()

    def end(number: int, frame: FrameType | None) -> None:
        over.set()

    signal.signal(signal.SIGTERM, end)
    if sys.platform == "linux":
        # what a process leaves behind that died becomes a child of this one, so that it is seen
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_wait_for_parent, args=(over,), daemon=True).start()
    codes: dict[int, int] = {}
    # a fork of the parent may hold the pipe open
    while _collect(codes) and child.pid not in codes and os.getppid() == parent and not over.wait(POLL_SECONDS):
        pass
    os.killpg(0, signal.SIGTERM)
    until = time.monotonic() + GRACE_SECONDS
    while _collect(codes):
        if time.monotonic() > until:
            os.killpg(0, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return codes.get(child.pid, 0)


def _wait_for_parent(over: threading.Event) -> None:
    os.read(0, 1)
    over.set()


def _collect(codes: dict[int, int]) -> bool:
    """Take note of children that ended; False once none is left."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = abs(os.waitstatus_to_exitcode(ended[1]))
    except ChildProcessError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
