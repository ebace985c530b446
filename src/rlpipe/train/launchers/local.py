"""Several ranks on this machine, started by torchrun or by DeepSpeed's launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rlpipe.errors import EngineError
from rlpipe.params import PositiveInt, Section
from rlpipe.policies.device import num_cores
from rlpipe.step import Report
from rlpipe.stopping import terminating
from rlpipe.train import job as jobs
from rlpipe.train.launchers.base import QUIET, STARTERS, WORKER, Tail, report_of, too_late

if TYPE_CHECKING:
    from rlpipe.train.job import Job

GRACE_SECONDS = 20.0
"""How long ranks outlive a coordinator that stands still, and may take to end when told to. They end at once with one that was killed."""
BEAT_SECONDS = 0.5


class Local(Section):
    """Ranks in the step's own machine or pod."""

    type: Literal["local"] = "local"
    num_processes: PositiveInt
    """Ranks; each holds the whole model, or its part with `backend.zero_stage` 3."""
    starter: Literal["torchrun", "deepspeed"] = "torchrun"
    """What starts the ranks, whichever the backend; `deepspeed` is DeepSpeed's own launcher."""
    timeout_seconds: float = Field(14_400, gt=0)
    """The training is ended after this time (exit code 11)."""
    exchange_seconds: float = Field(1_800, gt=0)
    """A rank that keeps the others waiting longer is given up (exit code 8)."""

    @property
    def num_ranks(self) -> int:
        """Processes that train."""
        return self.num_processes

    def run(self, job: Job) -> Report:
        """Train in ranks and wait for them; when this process ends, so do they.

        Raises:
            DeadlineError: it took longer than `timeout_seconds`.
            EngineError: `starter` is not installed, or a rank died, or kept the others waiting for longer than `exchange_seconds`.
            RlpipeError: what a rank raised.
        """
        if self.starter == "deepspeed" and find_spec("deepspeed") is None:
            raise EngineError(
                "train.launcher.starter deepspeed cannot be used", got="no deepspeed", do="pip install 'rlpipe[deepspeed]', or set it to torchrun"
            )
        with tempfile.TemporaryDirectory(prefix="rlpipe-train-") as name, terminating():
            file = jobs.write(Path(name), job, jobs.Terms(self.exchange_seconds, GRACE_SECONDS, held=True))
            tail = Tail()
            failure = self._wait(file, job.config.run.threads, tail)
            return report_of(file.parent, failure, tail)

    def _wait(self, file: Path, threads: int, tail: Tail) -> str | None:
        """How the ranks failed, if they did."""
        command = [sys.executable, *STARTERS[self.starter](self.num_processes), WORKER, str(file)]
        threads = threads or max(1, num_cores() // self.num_processes)
        environ = {**os.environ, **QUIET, "OMP_NUM_THREADS": str(threads)}
        process = _started(command, environ)
        reader = threading.Thread(target=_pass_on, args=(process, tail), daemon=True)
        reader.start()
        until = time.monotonic() + self.timeout_seconds
        try:
            while not _ended(process):
                (file.parent / jobs.ALIVE).touch()
                if time.monotonic() > until:
                    raise too_late(self.timeout_seconds, f"{self.num_processes} ranks at work")
        finally:
            _end(process)
            reader.join(timeout=5)
        return None if process.returncode == 0 else f"{self.starter} ended with exit code {process.returncode}"


def _started(command: list[str], environ: dict[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE  # as standard input it is inherited by the ranks and closed by the system with this process
    return subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)


def _ended(process: subprocess.Popen[str]) -> bool:
    try:
        process.wait(BEAT_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[str]) -> None:
    """End what started the ranks, which ends them; torchrun's have groups of their own, so that killing its group would miss them."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _pass_on(process: subprocess.Popen[str], tail: Tail) -> None:
    for line in process.stdout or ():
        tail.add(line)
