"""Progress bars on a terminal; nothing in a pipe, where each step's one line says it all."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def track(work: Iterable[T], *, total: int | None, label: str) -> Iterator[T]:
    """Pass `work` through, with a bar on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield from work
        return
    from tqdm import tqdm

    yield from tqdm(work, total=total, desc=label, leave=False, dynamic_ncols=True)
