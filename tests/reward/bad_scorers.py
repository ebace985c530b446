"""Rewards that misbehave, each when the completion says so; any other completion is scored 1."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from rlpipe.reward.base import Attempt
from rlpipe.tasks import Task


class Scripted:
    """Does what the completion says."""

    def __init__(self, value: float = 1.0) -> None:
        self.value = value

    def __call__(self, trajectory: Attempt, task: Task) -> float | None:
        act = getattr(self, trajectory.completion, None)
        return act() if act else self.value

    def loop(self) -> float:
        while True:
            pass

    def loop_without_gil_switch(self) -> float:
        return float(len(str(9**9**8)))

    def sleep(self) -> float:
        time.sleep(60)
        return 0.0

    def ignore_sigterm(self) -> float:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU):
            signal.signal(number, signal.SIG_IGN)
        return self.loop()

    def grandchild(self) -> float:
        if os.fork() == 0:
            self.loop()
        return self.loop()

    def leaves_a_process(self) -> float:
        subprocess.Popen(["sleep", "613"], start_new_session=True)
        return 0.75

    def leaves_a_process_and_hangs(self) -> float:
        self.leaves_a_process()
        return self.loop()

    def fork_twice(self) -> float:
        os.fork()
        return 0.5

    def answer_for_another(self) -> float:
        return self._answer(b'[1, 99.0, "ok", null]\n')

    def answer_with_garbage(self) -> float:
        return self._answer(b"\xff\n")

    def _answer(self, line: bytes) -> float:
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                    os.write(int(entry), line)
        time.sleep(60)
        return 0.0

    def memory(self) -> float:
        hoard = [bytearray(1 << 20) for _ in range(100_000)]
        return float(len(hoard))

    def segfault(self) -> float:
        os.kill(os.getpid(), signal.SIGSEGV)
        return 0.0

    def quit(self) -> float:
        os._exit(3)

    def sys_exit(self) -> float:
        sys.exit(4)

    def print(self) -> float:
        sys.stdout.write('[0, 99.0, "ok", null]\n' * 1000)
        sys.stdout.flush()
        os.write(1, b"\xff\n" * 100)
        os.write(2, b"\xff\n" * 100)
        return 0.25

    def raise_type_error(self) -> float:
        raise TypeError(f"bad\nthing {self!r}")

    def nan(self) -> float:
        return float("nan")

    def infinite(self) -> float:
        return float("-inf")

    def nothing(self) -> None:
        return None

    def text(self) -> str:
        return "high"


class Raises:
    def __call__(self, trajectory: Attempt, task: Task) -> float:
        raise TypeError("unsupported operand")


def length(trajectory: Attempt, task: Task) -> float:
    """Number of tokens, which only a whole trajectory has."""
    return float(len(trajectory.token_ids))  # type: ignore[attr-defined]


class Burns:
    """Uses 0.8 s of CPU."""

    def __call__(self, trajectory: Attempt, task: Task) -> float:
        end = time.process_time() + 0.8
        while time.process_time() < end:
            pass
        return 1.0


def num_heavy_modules(trajectory: Attempt, task: Task) -> float:
    return float(len({"torch", "pyarrow", "numpy", "transformers"} & sys.modules.keys()))
