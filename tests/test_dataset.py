"""Trajectory datasets on disk: streaming, sharding, damage (case C05)."""

import random
import resource
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpipe import artifact, dataset
from rlpipe.errors import ArtifactError
from rlpipe.trajectory import SCHEMA, Span, Trajectory, groups_of

TOKENS = np.array([5, 6, 7], dtype=np.int32)
LOGPROBS = np.array([np.nan, -0.5, -1.5], dtype=np.float32)
SPANS = (Span("prompt", 0, 1), Span("policy", 1, 3, trained=True))


def attempt(i, num_attempts=4, **changes):
    group = f"01/t{i // num_attempts}/0"
    row = Trajectory(f"{group}/{i % num_attempts}", group, f"t{i // num_attempts}", i % num_attempts, 1, TOKENS, LOGPROBS, SPANS)
    return replace(row, **changes) if changes else row


def stored(folder, rows, **options):
    with dataset.Writer(folder, **options) as writer:
        writer.write(rows)
    artifact.write_manifest(folder)
    return folder


def hashes(folder):
    return {name: entry["sha256"] for name, entry in artifact.read_manifest(folder)["files"].items()}


def test_rows_come_back_in_their_order(tmp_path):
    rows = [attempt(i, token_ids=np.arange(i % 7, dtype=np.int32), logprobs=np.zeros(i % 7, np.float32)) for i in range(5000)]
    found = list(dataset.read(stored(tmp_path / "d", rows)))
    assert [row.trajectory_id for row in found] == [row.trajectory_id for row in rows]
    assert all(np.array_equal(one.token_ids, other.token_ids) for one, other in zip(rows, found, strict=True))


def test_bytes_depend_on_the_rows_and_not_on_how_they_arrive(tmp_path):
    rows = [attempt(i) for i in range(3000)]
    stored(tmp_path / "once", rows)
    with dataset.Writer(tmp_path / "by_group") as writer:
        for group in groups_of(rows):
            writer.write(group)
    artifact.write_manifest(tmp_path / "by_group")
    assert hashes(tmp_path / "once") == hashes(tmp_path / "by_group")
    assert pq.read_metadata(tmp_path / "by_group/part-00000.parquet").num_row_groups == 2


def test_long_rows_make_smaller_row_groups(tmp_path):
    long = {"token_ids": np.zeros(1_500_000, np.int32), "logprobs": np.zeros(1_500_000, np.float32)}
    folder = stored(tmp_path / "d", [attempt(i, **long) for i in range(4)])
    metadata = pq.read_metadata(folder / "part-00000.parquet")
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [3, 1]


def test_c05_few_files_and_a_changed_row_rewrites_one(tmp_path):
    rows = [attempt(i) for i in range(50_000)]
    before = hashes(stored(tmp_path / "before", rows))
    rows[20_000] = replace(rows[20_000], completion="changed")
    after = hashes(stored(tmp_path / "after", rows))
    assert len(before) <= 10
    assert [name for name in before if before[name] != after[name]] == ["part-00002.parquet"]


def test_shards_are_full_but_the_last(tmp_path):
    folder = stored(tmp_path / "d", [attempt(i) for i in range(25)], rows_per_shard=10)
    assert dataset.shard_rows(folder) == {"part-00000.parquet": 10, "part-00001.parquet": 10, "part-00002.parquet": 5}


def test_batches_and_rows_mix_in_their_order(tmp_path):
    source = stored(tmp_path / "a", [attempt(i) for i in range(4)])
    with dataset.Writer(tmp_path / "b") as writer:
        writer.write([attempt(100)])
        for batch in dataset.read_batches(source):
            writer.write_batch(batch)
        writer.write(dataset.read(source))
    artifact.write_manifest(tmp_path / "b")
    assert [row.index for row in dataset.read(tmp_path / "b")] == [0, 0, 1, 2, 3, 0, 1, 2, 3]
    assert writer.num_rows == 9


def test_empty_has_a_schema_and_no_rows(tmp_path):
    folder = stored(tmp_path / "d", [])
    assert list(dataset.read(folder)) == []
    assert pq.read_schema(folder / "part-00000.parquet").names == SCHEMA.names


def test_groups_gather_by_id_whatever_the_order(tmp_path):
    rows = [attempt(i, num_attempts=3) for i in range(30)] + [attempt(90)]
    random.Random(0).shuffle(rows)
    groups = list(dataset.read_groups(stored(tmp_path / "d", rows, rows_per_shard=7)))
    assert sorted(group.group_id for group in groups) == sorted({row.group_id for row in rows})
    for group in groups:
        assert [row.index for row in group] == sorted(row.index for row in rows if row.group_id == group.group_id)


def test_without_a_manifest(tmp_path):
    with dataset.Writer(tmp_path / "d") as writer:
        writer.write([attempt(0)])
    with pytest.raises(ArtifactError, match=r"has no manifest\.json: it is unfinished"):
        next(dataset.read(tmp_path / "d"))


def test_a_truncated_shard(tmp_path):
    folder = stored(tmp_path / "d", [attempt(i) for i in range(9)])
    shard = folder / "part-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ArtifactError, match=r"part-00000\.parquet is damaged; got \d+ bytes; accepted: \d+ bytes"):
        list(dataset.read(folder))
    artifact.write_manifest(folder)
    with pytest.raises(ArtifactError, match=r"part-00000\.parquet is damaged"):
        list(dataset.read(folder))


def test_a_changed_shard(tmp_path):
    folder = stored(tmp_path / "d", [attempt(i) for i in range(9)])
    shard = folder / "part-00000.parquet"
    content = bytearray(shard.read_bytes())
    content[50] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ArtifactError, match="another sha256"):
        list(dataset.read(folder))


def test_a_missing_shard(tmp_path):
    folder = stored(tmp_path / "d", [attempt(i) for i in range(9)], rows_per_shard=5)
    (folder / "part-00001.parquet").unlink()
    with pytest.raises(ArtifactError, match=r"part-00001\.parquet is missing"):
        list(dataset.read(folder))


def test_a_shard_of_something_else(tmp_path):
    folder = tmp_path / "d"
    folder.mkdir()
    pq.write_table(pa.table({"a": [1]}), folder / "part-00000.parquet")
    artifact.write_manifest(folder)
    with pytest.raises(ArtifactError, match="no column trajectory_id"):
        list(dataset.read(folder))


def test_a_full_disk_comes_out_as_it_is(tmp_path):
    (tmp_path / "part-00000.parquet").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"), dataset.Writer(tmp_path) as writer:
        writer.write(attempt(i) for i in range(4 * dataset.ROWS_PER_ROW_GROUP))


def test_memory_stays_with_the_row_group(tmp_path):
    tokens, logprobs = np.zeros(256, np.int32), np.full(256, -1, np.float32)
    stored(tmp_path / "warm", [attempt(0)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    folder = stored(tmp_path / "d", (attempt(i, token_ids=tokens, logprobs=logprobs) for i in range(40_000)))
    assert sum(len(row.token_ids) for row in dataset.read(folder)) == 40_000 * 256
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 300
