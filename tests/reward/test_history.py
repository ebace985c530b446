from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpipe import artifact
from rlpipe.errors import ArtifactError
from rlpipe.reward import history
from rlpipe.reward.history import TaskHistory
from rlpipe.trajectory import Group
from tests.reward.rows import trajectory


def scored(task: str, *totals: float | None) -> Group:
    return Group(task, tuple(trajectory(group=task, task=task, index=i, reward=total) for i, total in enumerate(totals)))


def test_update_adds_visits_attempts_and_totals():
    before = {"b": TaskHistory("b", visits=2, attempts=8, reward_sum=3.0, last_round=1)}
    after = history.update(before, [scored("b", 1.0, None, 0.5), scored("a", None)], round_index=4)
    assert after == {"b": TaskHistory("b", 3, 10, 4.5, 4), "a": TaskHistory("a", 1, 0, 0.0, 4)}
    assert before["b"].visits == 2


def test_the_same_history_gives_the_same_bytes_sorted_by_task(tmp_path):
    groups = [scored(name, 1.0) for name in ("b", "c", "a")]
    for folder, order in (("one", groups), ("two", groups[::-1])):
        history.write(tmp_path / folder, history.update({}, order, round_index=1))
        artifact.write_manifest(tmp_path / folder)
    assert artifact.fingerprint(tmp_path / "one") == artifact.fingerprint(tmp_path / "two")
    assert list(history.read(tmp_path / "one")) == ["a", "b", "c"]


def test_an_empty_history_has_its_columns(tmp_path):
    history.empty(tmp_path)
    assert history.read(tmp_path) == {}
    assert pq.read_schema(tmp_path / "history.parquet").names == ["task_id", "visits", "attempts", "reward_sum", "last_round"]


def test_bad_histories_are_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"history.parquet cannot be read"):
        history.read(tmp_path)
    (tmp_path / "history.parquet").write_bytes(b"PAR1")
    with pytest.raises(ArtifactError, match=r"history.parquet cannot be read"):
        history.read(tmp_path)
    pq.write_table(pa.table({"task_id": ["a"]}), tmp_path / "history.parquet")
    with pytest.raises(ArtifactError, match=r"history.parquet is not a history; got task_id; accepted: task_id, visits"):
        history.read(tmp_path)
