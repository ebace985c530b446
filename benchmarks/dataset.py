"""Trajectories to disk and back against plain ways of storing the same rows: `python benchmarks/dataset.py`.

MB/s counts 8 bytes a token (int32 id, float32 log-prob). Writing begins with objects in memory and ends with the sha256 of
every file known; reading checks those and ends with the arrays of every row. The peers write what people write without
rlpipe: rows as dicts through `Table.from_pylist` (what `datasets.Dataset.from_list` does), and JSON lines; they hash nothing.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlpipe import artifact, dataset
from rlpipe.trajectory import Span, Trajectory

PEER_ROWS = 5000


def rows(count: int, num_tokens: int) -> list[Trajectory]:
    """Groups of 8; a quarter of the tokens is prompt; ids are drawn as in text, few of them often."""
    draw = np.random.default_rng(0)
    prompt = num_tokens // 4
    tokens = (draw.zipf(1.3, size=(count, num_tokens)) % 49152).astype(np.int32)
    logprobs = -draw.exponential(1, size=(count, num_tokens)).astype(np.float32)
    logprobs[:, :prompt] = np.nan
    spans = (Span("prompt", 0, prompt), Span("policy", prompt, num_tokens, trained=True))
    return [
        Trajectory(f"01/t{i // 8}/0/{i % 8}", f"01/t{i // 8}/0", f"t{i // 8}", i % 8, 1, tokens[i], logprobs[i], spans, prompt="a prompt", completion=" 44\n")
        for i in range(count)
    ]


def write_rlpipe(folder: Path, trajectories: list[Trajectory]) -> None:
    with dataset.Writer(folder) as writer:
        writer.write(trajectories)
    artifact.write_manifest(folder)


def read_rlpipe(folder: Path) -> int:
    return sum(len(row.token_ids) + len(row.logprobs) for row in dataset.read(folder))


def plain(row: Trajectory) -> dict[str, object]:
    spans = [{"source": span.source, "start": span.start, "end": span.end, "trained": span.trained} for span in row.spans]
    return {"id": row.trajectory_id, "group": row.group_id, "token_ids": row.token_ids.tolist(), "logprobs": row.logprobs.tolist(), "spans": spans}


def write_parquet(folder: Path, trajectories: list[Trajectory]) -> None:
    pq.write_table(pa.Table.from_pylist([plain(row) for row in trajectories]), folder / "rows.parquet", compression="zstd")


def read_parquet(folder: Path) -> int:
    return sum(len(row["token_ids"]) + len(row["logprobs"]) for row in pq.read_table(folder / "rows.parquet").to_pylist())


def write_jsonl(folder: Path, trajectories: list[Trajectory]) -> None:
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps(plain(row)) + "\n" for row in trajectories)


def read_jsonl(folder: Path) -> int:
    with (folder / "rows.jsonl").open() as file:
        return sum(len(row["token_ids"]) + len(row["logprobs"]) for row in map(json.loads, file))


class PeakMemory:
    """The largest resident memory above that at the start, in MB, looked at every 5 ms."""

    def __enter__(self) -> PeakMemory:
        self._start = self._peak = self._now()
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()
        self.mb = (self._peak - self._start) / 1e6

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self._peak = max(self._peak, self._now())

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(name: str, write: Callable[[Path, list[Trajectory]], None], read: Callable[[Path], int], trajectories: list[Trajectory], repeat: int) -> None:
    """Print MB/s of the fastest of `repeat` times, and the largest extra memory of all."""
    megabytes = sum(len(row.token_ids) for row in trajectories) * 8 / 1e6
    writes, reads, written_mb, read_mb = [], [], 0.0, 0.0
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as place:
            with PeakMemory() as memory:
                began = time.perf_counter()
                write(Path(place), trajectories)
                writes.append(megabytes / (time.perf_counter() - began))
            written_mb = max(written_mb, memory.mb)
            with PeakMemory() as memory:
                began = time.perf_counter()
                entries = read(Path(place))
                reads.append(megabytes / (time.perf_counter() - began))
            read_mb = max(read_mb, memory.mb)
            size = sum(file.stat().st_size for file in Path(place).iterdir())
            if entries != megabytes * 1e6 / 4:
                sys.exit(f"{name} read {entries} entries, not {megabytes * 1e6 / 4:.0f}")
    spread = f"(write {min(writes):.0f}-{max(writes):.0f}, read {min(reads):.0f}-{max(reads):.0f})"
    print(
        f"{name:>16}  rows={len(trajectories)} write={max(writes):.0f}MB/s read={max(reads):.0f}MB/s {spread} "
        f"extra_write={written_mb:.0f}MB extra_read={read_mb:.0f}MB on_disk={size / megabytes / 1e6:.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    trajectories = rows(options.rows, options.tokens)
    with tempfile.TemporaryDirectory() as place:  # what is imported on first use is not the speed of a row
        write_rlpipe(Path(place), trajectories[:8])
        read_rlpipe(Path(place))
    measure("rlpipe", write_rlpipe, read_rlpipe, trajectories, options.repeat)
    measure("parquet, dicts", write_parquet, read_parquet, trajectories[:PEER_ROWS], 1)
    measure("jsonl", write_jsonl, read_jsonl, trajectories[:PEER_ROWS], 1)


if __name__ == "__main__":
    main()
