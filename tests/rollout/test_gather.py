"""Shards of a rollout and their joining, against the same rollout in one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpipe import artifact, dataset, gathering, steps
from rlpipe.errors import ArtifactError, ConfigError
from rlpipe.execute import Call, execute
from rlpipe.rollout import attempts
from rlpipe.rollout.section import Config
from rlpipe.tasks import Task, save
from tests.rollout.test_step import CONFIG, inputs

__all__ = ["inputs"]

OUTPUTS = ("trajectories", "progress")
Made = tuple[Path, Path, dict[str, Any]]


def made(inputs: dict[str, Path], out: Path, num_shards: int, shard_index: int, round_index: int = 1, **changed: Path) -> Made:
    """One shard as a pod makes it, or with -1 the whole rollout: folders that do not tell which one they are."""
    step = steps.load("rollout")
    places = {"policy": inputs["policy"], "tasks": inputs["tasks"]}
    places |= {"progress_in": inputs["progress"], "history_in": inputs["history"], "evaluation_in": inputs["evaluation"]} | changed
    places |= {name: out / name for name in OUTPUTS}
    config = CONFIG.model_copy(update={"shards": num_shards})
    record = execute(Call(step, config, places, round_index, out / "work", {"shard_index": shard_index}))
    return places["trajectories"], places["progress"], record


def shards_of(inputs: dict[str, Path], out: Path, num_shards: int, **changed: Path) -> list[Made]:
    return [made(inputs, out / f"shard{k}", num_shards, k, **changed) for k in range(num_shards)]


def gather(shards: Sequence[Made], out: Path, round_index: int = 1) -> dict[str, Any]:
    return gathering.gather(shards, out / "trajectories", out / "progress", out / "work", round_index)


def manifests(out: Path) -> dict[str, bytes]:
    return {name: (out / name / "manifest.json").read_bytes() for name in OUTPUTS}


@pytest.fixture(scope="module")
def whole(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rollout in one process: five tasks in three chunks."""
    out = tmp_path_factory.mktemp("whole")
    made(inputs, out, 1, -1)
    return out


@pytest.fixture(scope="module")
def two(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[Made]:
    """The same rollout in two shards."""
    return shards_of(inputs, tmp_path_factory.mktemp("two"), 2)


@pytest.mark.parametrize(
    ("num_shards", "chunks"),
    [(1, [[0, 1, 2]]), (2, [[0, 1], [2]]), (3, [[0], [1], [2]]), (5, [[0], [1], [2], [], []])],
)
def test_shards_take_whole_chunks_one_after_the_other(num_shards: int, chunks: list[list[int]]) -> None:
    config = CONFIG.model_copy(update={"shards": num_shards})
    assert [list(attempts.chunks_of(5, config, k)) for k in range(num_shards)] == chunks
    assert list(attempts.chunks_of(5, config)) == [0, 1, 2]


def test_a_shard_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no such shard of the rollout; got 2; accepted: 0 to 1, or -1 for all"):
        attempts.chunks_of(5, CONFIG.model_copy(update={"shards": 2}), 2)


@pytest.mark.parametrize("num_shards", [1, 3, 5])
def test_gathered_shards_are_the_whole_rollout(inputs: dict[str, Path], whole: Path, tmp_path: Path, num_shards: int) -> None:
    """Case B27 too: with five shards of three chunks, two have nothing to do."""
    shards = shards_of(inputs, tmp_path, num_shards)
    record = gather(list(reversed(shards)), tmp_path)
    assert manifests(tmp_path) == manifests(whole)
    for name in OUTPUTS:
        assert artifact.fingerprint(tmp_path / name) == artifact.fingerprint(whole / name)
        artifact.verify(tmp_path / name)
    unsharded = json.loads((whole / "work/reports/01/rollout.json").read_text())
    same = ("step", "round", "outcome", "numbers", "reasons", "inputs", "outputs", "params", "code")
    assert {name: record[name] for name in same} == {name: unsharded[name] for name in same}
    assert record == json.loads((tmp_path / "work/reports/01/rollout.json").read_text())


def test_gathering_does_not_depend_on_the_order_of_the_folders(two: list[Made], whole: Path, tmp_path: Path) -> None:
    (first, first_progress, first_record), (second, second_progress, second_record) = two
    gather([(second, first_progress, first_record), (first, second_progress, second_record)], tmp_path)
    assert manifests(tmp_path) == manifests(whole)


def test_shards_have_keys_of_their_own_and_the_whole_has_no_number_of_shards(two: list[Made], whole: Path) -> None:
    found = [artifact.read_manifest(shard[0]) for shard in two]
    assert [manifest["scalars"] for manifest in found] == [{"shard_index": 0}, {"shard_index": 1}]
    assert [manifest["params"]["shards"] for manifest in found] == [2, 2]
    alone = artifact.read_manifest(whole / "trajectories")
    assert "scalars" not in alone
    assert "shards" not in alone["params"]
    assert alone["params"]["num_tasks"] == 5


def test_every_shard_leaves_the_progress_of_the_round(two: list[Made], whole: Path) -> None:
    assert {artifact.fingerprint(shard[1]) for shard in two} == {artifact.fingerprint(whole / "progress")}
    assert [shard[2]["numbers"]["num_groups"] for shard in two] == [4, 1]


def test_b27_a_shard_without_chunks_is_empty_and_says_so(inputs: dict[str, Path], tmp_path: Path) -> None:
    """Case B27."""
    trajectories, _, record = made(inputs, tmp_path, 4, 3)
    assert artifact.outcome(trajectories) == "empty"
    assert list(dataset.read(trajectories)) == []
    assert (record["outcome"], record["numbers"]["num_groups"], record["numbers"]["mean_completion_tokens"]) == ("empty", 0, None)


def test_b27_once_the_goal_is_met_all_shards_are_stopped_and_so_is_the_round(inputs: dict[str, Path], tmp_path: Path) -> None:
    """Case B27."""
    made(inputs, tmp_path / "whole", 1, -1, evaluation_in=inputs["goal"])
    record = gather(shards_of(inputs, tmp_path, 2, evaluation_in=inputs["goal"]), tmp_path)
    assert record["outcome"] == "stopped"
    assert manifests(tmp_path) == manifests(tmp_path / "whole")


def test_rejected_prompts_are_counted_once(inputs: dict[str, Path], tmp_path: Path) -> None:
    rows = [Task(task_id=f"t{i}", prompt="1" * 123 if i == 2 else f"{i} =", reference="2") for i in range(5)]
    save(tmp_path / "tasks.jsonl", rows)
    record = gather(shards_of(inputs, tmp_path, 2, tasks=tmp_path / "tasks.jsonl"), tmp_path)
    made(inputs, tmp_path / "whole", 1, -1, tasks=tmp_path / "tasks.jsonl")
    assert record["reasons"] == {"prompt_too_long": 1}
    assert (record["numbers"]["num_rejected_prompts"], record["numbers"]["num_trajectories"]) == (1, 12)
    assert manifests(tmp_path) == manifests(tmp_path / "whole")


def test_the_time_is_that_of_the_slowest_shard_and_of_joining(two: list[Made], tmp_path: Path) -> None:
    shards = [(*two[0][:2], two[0][2] | {"seconds": 7.0, "peak_memory_mb": 1e6}), (*two[1][:2], two[1][2] | {"seconds": 90.0, "peak_memory_mb": 5.0})]
    record = gather(shards, tmp_path)
    assert 90 < record["seconds"] < 120
    assert record["peak_memory_mb"] == 1e6
    assert [shard["seconds"] for shard in record["shards"]] == [7.0, 90.0]
    assert gather(shards, tmp_path) == record


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([0], r"trajectories of round 1 cannot be gathered; got missing: shard 1; accepted: shards 0 to 1, each once"),
        ([0, 1, 1], r"got more than once: shard 1; accepted:"),
        ([1, 1], r"got missing: shard 0; more than once: shard 1"),
        ([], r"no trajectories to gather"),
    ],
)
def test_missing_and_double_shards_are_named(two: list[Made], tmp_path: Path, chosen: list[int], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        gather([two[k] for k in chosen], tmp_path)
    assert not (tmp_path / "trajectories").exists()


def test_a_shard_of_another_round_is_named(inputs: dict[str, Path], two: list[Made], tmp_path: Path) -> None:
    other = made(inputs, tmp_path / "other", 2, 1, round_index=2)
    with pytest.raises(ArtifactError, match=r"other/trajectories is of another round; got 2; accepted: 1;"):
        gather([two[0], other], tmp_path)


def test_a_whole_rollout_is_no_shard(two: list[Made], whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"is no shard of a rollout"):
        gather([two[0], (whole / "trajectories", whole / "progress", {})], tmp_path)


def test_shards_made_otherwise_are_refused(inputs: dict[str, Path], two: list[Made], tmp_path: Path) -> None:
    rows = [Task(task_id=f"u{i}", prompt=f"{i} =", reference="2") for i in range(7)]
    save(tmp_path / "tasks.jsonl", rows)
    other = made(inputs, tmp_path / "other", 2, 1, tasks=tmp_path / "tasks.jsonl")
    with pytest.raises(ArtifactError, match=r"shard 1 was made otherwise than shard 0; got other inputs, progress"):
        gather([two[0], other], tmp_path)


def test_a_damaged_shard_is_refused(inputs: dict[str, Path], two: list[Made], tmp_path: Path) -> None:
    damaged = made(inputs, tmp_path / "damaged", 2, 1)
    (shard,) = dataset.shards(damaged[0])
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"damaged/trajectories/part-00000\.parquet is damaged"):
        gather([two[0], damaged], tmp_path)
    assert not (tmp_path / "trajectories").exists()


def test_records_of_a_pod_go_to_its_own_folder_only(inputs: dict[str, Path], tmp_path: Path) -> None:
    made(inputs, tmp_path, 2, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["progress", "trajectories", "work"]
    assert [path.relative_to(tmp_path / "work").as_posix() for path in (tmp_path / "work").rglob("*") if path.is_file()] == ["reports/01/rollout.json"]


def test_the_number_of_shards_is_a_setting_of_the_section() -> None:
    assert Config(shards=8).shards == 8
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Config(shards=0)
