"""kfp's local runners print everything to standard output; here all of it goes into a file, and what rlpipe said on to people."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
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
        with suppress(OSError):
            self._file.close()

    def write(self, text: str) -> int:
        """Take a piece of text."""
        self._keep(text)
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            said = line.strip()
            if said.startswith(SHOWN):
                sys.stderr.write(said + "\n")
        return len(text)

    def _keep(self, text: str) -> None:
        """Into the file, as long as the disk takes it: what failed for want of space is said by the task."""
        if self._file.closed:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError:
            sys.stderr.write(f"rlpipe: {self.path} cannot be written any more\n")
            with suppress(OSError):
                self._file.close()

    def flush(self) -> None:
        """Every piece is in the file already, so that it can be read while the run goes on."""
