"""What launchers share: the command of a rank, its log, and what becomes of a training that ended."""

from __future__ import annotations

import base64
import json
import logging
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from rlpipe.errors import DeadlineError, EngineError, RlpipeError
from rlpipe.step import Report
from rlpipe.train import job as jobs

log = logging.getLogger("rlpipe")

WORKER = "rlpipe.train.worker"
QUIET = {"TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
"""Environment of every rank."""


def torchrun(processes: int, *options: str) -> list[str]:
    """Arguments of Python that start `processes` of a module on this node; the module and its arguments follow."""
    return ["-m", "torch.distributed.run", *options, "--nproc-per-node", str(processes), "-m"]


def deepspeed(processes: int, environ: Mapping[str, str] = os.environ) -> list[str]:
    """The same by DeepSpeed's launcher for one node.

    It numbers accelerators from 0 whatever CUDA_VISIBLE_DEVICES says, so that those named there are handed on. The port is
    not used: ranks meet by a file.
    """
    named = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    devices = named[:processes] if len(named) >= processes else list(range(processes))
    world = base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()
    return ["-m", "deepspeed.launcher.launch", f"--world_info={world}", "--log_level=error", "--no_local_rank", "--module"]


STARTERS = {"torchrun": lambda processes: torchrun(processes, "--standalone"), "deepspeed": deepspeed}
"""What can start the ranks of one node: arguments of Python, the module and its arguments follow."""


class Tail:
    """Passes log lines on as they come and keeps the last ones for the message of a failure."""

    def __init__(self, num: int = 12) -> None:
        self.lines: deque[str] = deque(maxlen=num)

    def add(self, line: str) -> None:
        """Take in one line; empty ones are left out."""
        if line.strip():
            self.lines.append(line.rstrip())
            log.info("%s", line.rstrip())

    def __str__(self) -> str:
        return " | ".join(self.lines)


def report_of(folder: Path, failure: str | None, tail: Tail) -> Report:
    """The report of a training that ended.

    Args:
        folder: the job's.
        failure: how it ended, as the launcher knows it; None if well.
        tail: the end of its log.

    Raises:
        RlpipeError: what a rank explained, with the type it had there.
        EngineError: it failed without explanation, or ended well without a report.
    """
    report = jobs.read_report(folder)
    if failure is None and report is not None:
        return report
    if explained := jobs.read_error(folder):
        raise explained
    raise failed(failure or "it ended without a report", jobs.other_errors(folder), tail)


def failed(reason: str, errors: str, tail: Tail) -> RlpipeError:
    """A training that failed without explaining itself."""
    got = "; ".join(part for part in (reason, errors, f"last lines: {tail}" if tail.lines else "") if part)
    return EngineError(
        "the training failed", got=got, do="see its log above; if a rank was killed (signal 9), lower train.micro_batch_tokens or give more memory"
    )


def too_late(seconds: float, state: str) -> DeadlineError:
    """A training that did not end in its time."""
    return DeadlineError("the training ran past its time limit", got=f"{seconds:g} s; {state}", do="raise train.launcher.timeout_seconds, or train on less")
