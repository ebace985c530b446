"""The rollout step on a random character model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rlpipe import artifact, chunks, dataset, tasks
from rlpipe.engines import Torch
from rlpipe.params import Run
from rlpipe.reward import history
from rlpipe.rollout import attempts
from rlpipe.rollout.step import Config, initial_progress, run, select
from rlpipe.step import Report
from rlpipe.tasks import Task
from rlpipe.trajectory import Trajectory
from tests.factories import tiny_policy

CONFIG = Config(run=Run(seed=5, threads=1), engine=Torch(dtype="float32", chunk_groups=2), num_tasks=5, num_attempts=3, max_new_tokens=6)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("inputs")
    tiny_policy(root / "policy", version=4)
    tasks.save(root / "tasks.jsonl", [Task(task_id=f"t{i}", prompt=f"max({i}, {i + 1}) =", reference=str(i + 1)) for i in range(7)])
    artifact.write_json(root / "progress" / "progress.json", initial_progress())
    artifact.write_json(root / "evaluation" / "evaluation.json", {"stop": {"met": False}})
    artifact.write_json(root / "goal" / "evaluation.json", {"stop": {"met": True}})
    history.empty(root / "history")
    for name in ("progress", "evaluation", "goal", "history"):
        artifact.write_manifest(root / name)
    return {path.stem: path for path in root.iterdir()}


def roll(inputs: dict[str, Path], out: Path, config: Config = CONFIG, **changed: Path) -> Report:
    paths = {
        "policy": inputs["policy"],
        "tasks": inputs["tasks"],
        "progress_in": inputs["progress"],
        "history_in": inputs["history"],
        "evaluation_in": inputs["evaluation"],
    }
    for name in ("trajectories", "progress"):
        (out / name).mkdir(parents=True, exist_ok=True)
    report = run(config, **paths | changed, trajectories=out / "trajectories", progress=out / "progress", round_index=1)
    for name in ("trajectories", "progress"):
        artifact.write_manifest(out / name, outcome=report.outcome)
    return report


def rows(out: Path) -> list[Any]:
    return list(dataset.read(out / "trajectories"))


def test_a_round_of_attempts(inputs: dict[str, Path], tmp_path: Path) -> None:
    report = roll(inputs, tmp_path)
    found = rows(tmp_path)
    assert len(found) == 15
    assert len({row.trajectory_id for row in found}) == 15
    assert {row.group_id for row in found} == {f"01/{row.task_id}/0" for row in found}
    assert all(row.versions.max() == 4 for row in found)
    assert report.numbers["num_groups"] == 5
    assert report.numbers["num_trajectories"] == 15
    assert report.numbers["num_tokens_generated"] == sum(row.num_sampled_tokens for row in found)
    assert report.numbers["num_truncated"] == sum(row.status == "truncated" for row in found)
    assert report.facts["policy_versions"] == {"4": artifact.read_manifest(inputs["policy"])["fingerprint"]}
    progress = json.loads((tmp_path / "progress" / "progress.json").read_text())
    assert (progress["round"], progress["selector"]["state"]["cursor"]) == (1, 5)


def test_a42_siblings_differ_and_the_run_seed_changes_them(inputs: dict[str, Path], tmp_path: Path) -> None:
    other = CONFIG.model_copy(update={"run": Run(seed=6, threads=1)})
    roll(inputs, tmp_path / "a")
    roll(inputs, tmp_path / "b", other)
    first, second = ([(row.task_id, tuple(row.token_ids)) for row in rows(tmp_path / name)] for name in "ab")
    assert len(set(first)) == 15
    assert not set(first) & set(second)


def make_chunks(inputs: dict[str, Path], out: Path, config: Config, num_chunks: int) -> None:
    """What a round leaves that was killed after `num_chunks` chunks."""
    known = {task.task_id: task for task in tasks.load(inputs["tasks"])}
    visits, _ = select(config, inputs["progress"], list(known))
    with config.engine.open(inputs["policy"], 1) as engine:
        rollout = attempts.Rollout(config, engine, inputs["policy"], 1)
        prompts, _ = rollout.prompts([(known[visit.task_id], visit) for visit in visits])
        rollout.make(prompts, out / "trajectories", range(num_chunks))


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_a_killed_round_goes_on_to_the_same_bytes(inputs: dict[str, Path], tmp_path: Path, num_chunks: int) -> None:
    whole = roll(inputs, tmp_path / "whole")
    make_chunks(inputs, tmp_path / "killed", CONFIG, num_chunks)
    (tmp_path / "killed" / "trajectories" / artifact.RESUME / ".chunk-00002.parquet.partial").write_bytes(b"PAR1")
    assert roll(inputs, tmp_path / "killed") == whole
    for name in ("trajectories", "progress"):
        assert artifact.fingerprint(tmp_path / "killed" / name) == artifact.fingerprint(tmp_path / "whole" / name)


def test_a_damaged_chunk_is_named_and_made_again(inputs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    roll(inputs, tmp_path / "whole")
    make_chunks(inputs, tmp_path / "killed", CONFIG, 2)
    damaged = tmp_path / "killed" / "trajectories" / artifact.RESUME / "chunk-00001.parquet"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:200] + bytes([content[200] ^ 1]) + content[201:])  # one bit
    roll(inputs, tmp_path / "killed")
    assert "chunk=chunk-00001.parquet state=damaged" in caplog.text
    assert artifact.fingerprint(tmp_path / "killed" / "trajectories") == artifact.fingerprint(tmp_path / "whole" / "trajectories")


def test_finished_chunks_are_not_made_again(inputs: dict[str, Path], tmp_path: Path) -> None:
    other = CONFIG.model_copy(update={"run": Run(seed=6, threads=1)})
    roll(inputs, tmp_path / "a")
    roll(inputs, tmp_path / "b", other)
    make_chunks(inputs, tmp_path / "mixed", other, 1)
    roll(inputs, tmp_path / "mixed")
    first, second, mixed = ([row.token_ids.tolist() for row in rows(tmp_path / name)] for name in ("a", "b", "mixed"))
    assert mixed == second[:6] + first[6:]


def test_a_round_killed_within_a_chunk_makes_that_one_again_and_no_other(inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    write = chunks.write

    def killed_in_the_second(path: Path, found: Iterable[Trajectory]) -> None:
        begun.append(path.stem)
        if len(begun) == 2:
            next(iter(found))
            raise KeyboardInterrupt
        write(path, found)

    monkeypatch.setattr(chunks, "write", killed_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        roll(inputs, tmp_path)
    roll(inputs, tmp_path)
    assert begun == ["chunk-00000", "chunk-00001", "chunk-00001", "chunk-00002"]
    assert len(rows(tmp_path)) == 15


def test_f05_a_prompt_that_does_not_fit_is_listed_with_its_length(inputs: dict[str, Path], tmp_path: Path) -> None:
    """Case F05."""
    listed = [
        Task(task_id="a", prompt="1 + 1 =", reference="2"),
        Task(task_id="long", prompt="1" * 123, reference="2"),
        Task(task_id="c", prompt="2 =", reference="2"),
    ]
    tasks.save(tmp_path / "tasks.jsonl", listed)
    report = roll(inputs, tmp_path / "out", CONFIG.model_copy(update={"num_tasks": 3}), tasks=tmp_path / "tasks.jsonl")
    assert report.facts["rejected_prompts"] == [{"task_id": "long", "num_tokens": 123, "max_new_tokens": 6, "max_length": 128}]
    assert report.reasons == {"prompt_too_long": 1}
    assert {row.task_id for row in rows(tmp_path / "out")} == {"a", "c"}


def test_once_the_goal_is_met_nothing_is_attempted(inputs: dict[str, Path], tmp_path: Path) -> None:
    report = roll(inputs, tmp_path, evaluation_in=inputs["goal"])
    assert report.outcome == "stopped"
    assert rows(tmp_path) == []
    assert artifact.fingerprint(tmp_path / "progress") == artifact.fingerprint(inputs["progress"])


def test_the_next_round_goes_on_where_the_last_one_ended(inputs: dict[str, Path], tmp_path: Path) -> None:
    roll(inputs, tmp_path / "1")
    roll(inputs, tmp_path / "2", progress_in=tmp_path / "1" / "progress")
    first, second = ([row.group_id for row in rows(tmp_path / name)][::3] for name in "12")
    assert len({group.split("/")[1] for group in (*first, *second[:2])}) == 7
    assert [group.split("/")[2] for group in second] == ["0", "0", "1", "1", "1"]


def test_many_chunks_become_full_row_groups(inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "ROWS_PER_ROW_GROUP", 4)
    roll(inputs, tmp_path)
    (shard,) = dataset.shards(tmp_path / "trajectories")
    metadata = pq.read_metadata(shard)
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [4, 4, 4, 3]
