"""kfp's local runners print everything to standard output; here all of it goes into a file, and what rlpipe said on to people."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

SHOWN = ("step=", "stage=", "rlpipe: ", "tracking=", "check=", "pipeline=")
"""How the lines begin that are shown."""


class Lines(io.TextIOBase):
    """A text stream that writes every line into a file and shows those of rlpipe on standard error.

    Args:
        path: the file, begun anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._rest = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._file.close()

    def write(self, text: str) -> int:
        """Take a piece of text."""
        self._file.write(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            said = line.strip()
            if said.startswith(SHOWN):
                sys.stderr.write(said + "\n")
        return len(text)

    def flush(self) -> None:
        """Bring the file up to date, so that it can be read while the run goes on."""
        if not self._file.closed:
            self._file.flush()
