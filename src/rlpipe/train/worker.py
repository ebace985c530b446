"""One rank of a training that a launcher started: `python -m rlpipe.train.worker JOB.json`.

Every rank runs the same `fit` on its share; rank 0 writes the policy and the report. Ranks end by themselves when the
coordinator is gone, whatever ended it.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

from rlpipe.errors import RlpipeError
from rlpipe.train import job as jobs
from rlpipe.train.ranks import join, rank_of

log = logging.getLogger("rlpipe")

STDIN = 0


def main(file: Path) -> None:
    """Train as one rank; see the module."""
    folder, rank = file.parent, rank_of(os.environ)
    logging.basicConfig(level=logging.WARNING, format=f"rank={rank} %(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)
    sys.excepthook = _Recorder(folder, rank)
    job, terms = jobs.read(file)
    threading.Thread(target=_end_with_coordinator, args=(folder / jobs.ALIVE, terms), daemon=True).start()
    ranks = join(folder, terms.exchange)
    log.info("num_ranks=%d state=joined", ranks.size)
    report = job.fit(ranks)
    if ranks.first:
        jobs.write_report(folder, report)
    ranks.wait()
    log.info("state=trained")


class _Recorder:
    """Hands an error back before the rank ends; an explained one without its traceback."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        jobs.write_error(self.folder, self.rank, error)
        if isinstance(error, RlpipeError):
            log.error("%s", error)
        else:
            log.error("%s", "".join(traceback.format_exception(kind, error, trace)))


def _end_with_coordinator(alive: Path, terms: jobs.Terms) -> None:
    """End this process when its parent is another, the coordinator lets go of it, or its sign of life stands still.

    Only changes of the file's time count, not the time itself: clocks of machines differ.
    """
    parent, seen, since = os.getppid(), None, time.monotonic()
    held = [STDIN] if terms.held else []
    # nothing is ever sent, so that there is something to read only when the other end is closed
    while os.getppid() == parent and not select.select(held, [], [], min(1.0, terms.grace / 4))[0]:
        now = alive.stat().st_mtime_ns if alive.exists() else None
        if now is not None and now != seen:
            seen, since = now, time.monotonic()
        if now is None or time.monotonic() - since > terms.grace:
            break
    log.error("state=ended reason=the_coordinator_is_gone")
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
