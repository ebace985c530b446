"""Ranks as the system sees them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def ranks_below(folder: Path) -> dict[int, int]:
    """Process ids of the ranks whose job lies below `folder`, by rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            environ = dict(entry.partition(b"=")[::2] for entry in (process / "environ").read_bytes().split(b"\0"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if b"rlpipe.train.worker" in command and any(str(folder).encode() in part for part in command) and b"RANK" in environ:
            found[int(environ[b"RANK"])] = int(process.name)
    return found


def wait_for(condition: Callable[[], T], seconds: float = 120) -> T:
    """What `condition` gives once it gives something true."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, "it never came"
        time.sleep(0.2)
    return value
