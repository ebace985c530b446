"""What MLflow has not taken yet, on disk: one JSON line an entry, in the order of their sending. One process writes at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlpipe import artifact

PLACE = Path(".rlpipe") / "tracking.jsonl"
"""Relative to the working folder."""


class Entry(NamedTuple):
    """One exchange with MLflow that can be repeated without a trace.

    Attributes:
        place: the store it is for.
        what: what it sends, for people.
        run: whose it is: the keyword arguments of `tracking_run.TrackedRun`, plain.
        call: name of the method of `TrackedRun`.
        given: its keyword arguments, plain.
    """

    place: str
    what: str
    run: Mapping[str, Any]
    call: str
    given: Mapping[str, Any]


class Spool:
    """Entries in a file; no file where there are none.

    Args:
        path: the file; its folder is made with the first entry. None keeps them in memory, for a process whose folder nobody comes back to.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._memory: list[Entry] = []

    def append(self, entry: Entry) -> None:
        """Add an entry; it is on disk when this returns."""
        if self._path is None:
            self._memory.append(entry)
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry._asdict()) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def entries(self) -> list[Entry]:
        """All entries; a line that a kill cut short is none, since what it speaks of was not reported as tracked."""
        if self._path is None:
            return list(self._memory)
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.is_file() else []
        return [Entry(**content) for line in lines if (content := _whole(line))]

    def keep(self, entries: list[Entry]) -> None:
        """Replace what the file holds."""
        if self._path is None:
            self._memory = list(entries)
        elif entries:
            artifact.write_text(self._path, "".join(json.dumps(entry._asdict()) + "\n" for entry in entries))
        else:
            self._path.unlink(missing_ok=True)


def _whole(line: str) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
