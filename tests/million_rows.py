"""A million trajectories held against their rules; prints what it cost as JSON. Run by test_checks."""

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from rlpipe import artifact, checks, dataset
from rlpipe.columns import to_batch
from rlpipe.trajectory import Span, Trajectory

ROWS, ATTEMPTS = 8192, 8


def main(folder):
    tokens, logprobs = np.arange(4, dtype=np.int32), np.array([np.nan, np.nan, -1, -1], np.float32)
    spans = (Span("prompt", 0, 2), Span("policy", 2, 4, trained=True))
    batch = to_batch([Trajectory("", "", "t", i % ATTEMPTS, 1, tokens, logprobs, spans) for i in range(ROWS)])
    with dataset.Writer(folder) as writer:
        for start in range(0, 1_000_000, ROWS):
            count = min(ROWS, 1_000_000 - start)
            ids = {
                "trajectory_id": [f"01/t/{i}" for i in range(start, start + count)],
                "group_id": [f"01/t/{i // ATTEMPTS}" for i in range(start, start + count)],
            }
            columns = [pa.array(ids[name]) if name in ids else batch.column(name).slice(0, count) for name in batch.schema.names]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=batch.schema))
    artifact.write_manifest(folder)
    checks.warm().join()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    checks.check("trajectories", folder, outcome=None, role="in")
    seconds = time.monotonic() - began
    extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    sys.stdout.write(json.dumps({"rows": writer.num_rows, "seconds": seconds, "extra_mb": extra / 1024}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) / "d")
