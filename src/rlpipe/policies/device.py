"""Where tensors live, and what computes."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Names of `mallopt`'s settings, in bytes."""


def device() -> torch.device:
    """This process's accelerator, by its rank on the node, or the CPU where there is none."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cpu")


def num_cores() -> int:
    """Cores this process may use: its affinity, which a container may narrow, not what the machine has."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Let the GNU C library keep what is freed for what comes next.

    A tensor of some MB otherwise goes back to the system and comes again page by page: of an update on a CPU that took
    a sixth of the time. The process keeps its peak until it ends; the peak itself grows by a few percent.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(MMAP_THRESHOLD, 1 << 30)
        library.mallopt(TRIM_THRESHOLD, (1 << 31) - 1)
