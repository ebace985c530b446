"""What a round's trajectories and an evaluation say of the weights that made them, and of how they ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlpipe import artifact, dataset, params, tasks
from rlpipe.engines import Completion, Request, Sampling, Torch
from rlpipe.errors import ConfigError, EngineError
from rlpipe.evaluate import results, verdict
from rlpipe.evaluate.measuring import measure
from rlpipe.evaluate.section import Config as Evaluate
from rlpipe.evaluate.step import run as evaluate
from rlpipe.params import Run
from rlpipe.reward import history
from rlpipe.reward.digit_share import DigitShare
from rlpipe.rollout.building import attempt
from rlpipe.rollout.prompts import Prompt
from rlpipe.rollout.step import Config, initial_progress, run
from rlpipe.step import Report
from rlpipe.tasks import Task
from rlpipe.train.tally import MicroNumbers, Tally
from rlpipe.trajectory import Trajectory
from tests.factories import tiny_policy

CONFIG = Config(run=Run(seed=5, threads=1), engine=Torch(dtype="float32", chunk_groups=2), num_tasks=3, num_attempts=2, max_new_tokens=6)
EVALUATE = Evaluate(run=Run(threads=1), engine=Torch(dtype="float32"), rewards=(DigitShare(),), num_attempts=0, pass_at=(), max_new_tokens=6)
VERSIONS = (17, 42)
"""Optimizer steps behind two policies; neither is the number of a round, a group or an attempt."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("inputs")
    for version in VERSIONS:
        tiny_policy(root / str(version), seed=version, version=version)
    tasks.save(root / "tasks.jsonl", three_tasks())
    artifact.write_json(root / "progress" / "progress.json", initial_progress())
    artifact.write_json(root / "evaluation" / "evaluation.json", {"stop": {"met": False}})
    history.empty(root / "history")
    for name in ("progress", "evaluation", "history"):
        artifact.write_manifest(root / name)
    return {path.stem: path for path in root.iterdir()}


def three_tasks(middle: str = "2 =") -> list[Task]:
    return [Task(task_id=name, prompt=prompt, reference="2") for name, prompt in (("a", "1 + 1 ="), ("b", middle), ("c", "2 + 0 ="))]


def roll(inputs: dict[str, Path], out: Path, policy: Path, round_index: int = 1, config: Config = CONFIG, **changed: Path) -> tuple[Report, list[Trajectory]]:
    """The report and the rows of one round of attempts."""
    paths = {"tasks": inputs["tasks"], "progress_in": inputs["progress"], "history_in": inputs["history"], "evaluation_in": inputs["evaluation"]}
    for name in ("trajectories", "progress"):
        (out / name).mkdir(parents=True, exist_ok=True)
    report = run(
        config, policy=policy, **paths | changed, trajectories=out / "trajectories", progress=out / "progress", round_index=round_index, shard_index=-1
    )
    artifact.write_manifest(out / "trajectories", facts=report.facts)
    return report, list(dataset.read(out / "trajectories"))


def versions_of(rows: list[Trajectory]) -> set[int]:
    return {int(version) for row in rows for version in row.versions[row.mask]}


def test_a24_the_rollout_says_which_weights_it_sampled_from(inputs: dict[str, Path], tmp_path: Path) -> None:
    """Case A24: the fingerprint in its manifest is that of the policy's files as they are; the log-probs are those of these weights."""
    _, rows = roll(inputs, tmp_path, inputs["42"])
    facts = artifact.read_manifest(tmp_path / "trajectories")["facts"]
    assert facts["policy_versions"] == {"42": artifact.fingerprint(inputs["42"])}
    for version, same in (("42", True), ("17", False)):
        with Torch(dtype="float32").open(inputs[version], 1) as engine:
            scored = engine.logprobs([row.token_ids for row in rows])
        gaps = [np.abs(found - row.logprobs)[row.mask].max() for row, found in zip(rows, scored, strict=True)]
        assert bool(max(gaps) < 1e-4) is same


def test_a24_an_engine_without_weights_generates_nothing(inputs: dict[str, Path]) -> None:
    """Case A24: closed, as one that sleeps, it fails and makes nothing up."""
    queued = [Request("a", np.array([1, 2], dtype=np.int32), (1,), Sampling(6, 1.0))]
    with Torch(dtype="float32").open(inputs["42"], 1) as engine:
        engine.submit(queued)
        assert [len(completion.token_ids) > 0 for completion in engine.stream()] == [True]
        engine.close()
        engine.submit(queued)
        with pytest.raises(EngineError, match="closed"):
            list(engine.stream())


def test_a45_a_load_that_fails_once_changes_no_version(inputs: dict[str, Path], tmp_path: Path) -> None:
    """Case A45: round 1 by version 17; the weights of version 42 come in two parts; nothing says 42 before they are whole."""
    _, first = roll(inputs, tmp_path / "1", inputs["17"], 1)
    assert versions_of(first) == {17}
    policy = tiny_policy(tmp_path / "policy", seed=42, version=42)
    weights = policy / "modules/policy/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="holds no causal language model"):
        roll(inputs, tmp_path / "2", policy, 2)
    assert [path for path in (tmp_path / "2").rglob("*") if path.is_file()] == []
    weights.write_bytes(whole)
    report, second = roll(inputs, tmp_path / "2", policy, 2)
    assert versions_of(second) == {42}
    assert report.facts["policy_versions"] == {"42": artifact.fingerprint(inputs["42"])}
    assert {row.round for row in second} == {2}


@pytest.mark.parametrize("version", VERSIONS)
def test_a45_an_evaluation_says_which_policy_it_measured(inputs: dict[str, Path], tmp_path: Path, version: int) -> None:
    """Case A45: in round 2, by version and fingerprint; the completions are those of that policy, and of no other."""
    policy = inputs[str(version)]
    start = measure(EVALUATE, inputs["17"], three_tasks(), 0, tmp_path / "measured")
    verdict.write(EVALUATE, tmp_path / "before", start, "the champion's", None, 0)
    evaluate(EVALUATE, policy=policy, tasks=inputs["tasks"], evaluation_in=tmp_path / "before", evaluation=tmp_path / "evaluation", round_index=2)
    content = json.loads((tmp_path / "evaluation/evaluation.json").read_text())
    assert (content["policy_version"], content["policy_fingerprint"], content["round"]) == (version, artifact.fingerprint(policy), 2)
    found = [row.completion for row in results.read(tmp_path / "evaluation" / results.RESULTS)]
    assert (found == [row.completion for row in start.results]) is (version == 17)


def test_f05_the_prompt_in_the_middle_is_too_long_and_costs_the_others_nothing(inputs: dict[str, Path], tmp_path: Path) -> None:
    """Case F05: three prompts; two results, each on its own prompt, and one rejection with its lengths, in the report and the manifest."""
    tasks.save(tmp_path / "tasks.jsonl", three_tasks(middle="1" * 123))
    once = CONFIG.model_copy(update={"num_attempts": 1, "engine": Torch(dtype="float32", chunk_groups=3)})
    report, rows = roll(inputs, tmp_path, inputs["17"], config=once, tasks=tmp_path / "tasks.jsonl")
    assert sorted((row.task_id, row.group_id, row.prompt) for row in rows) == [("a", "01/a/0", "1 + 1 ="), ("c", "01/c/0", "2 + 0 =")]
    assert all(row.num_sampled_tokens > 0 for row in rows)
    rejected = [{"task_id": "b", "num_tokens": 123, "max_new_tokens": 6, "max_length": 128}]
    assert report.facts["rejected_prompts"] == rejected == artifact.read_manifest(tmp_path / "trajectories")["facts"]["rejected_prompts"]
    assert (report.numbers["num_rejected_prompts"], report.reasons) == (1, {"prompt_too_long": 1})


@pytest.mark.parametrize(("last", "reason", "status"), [(46, "stop", "completed"), (0, "length", "truncated")])
def test_a19_the_engine_says_how_a_completion_ended(last: int, reason: Any, status: str) -> None:
    """Case A19: ended on a chat mark that is not the end id 0; and cut on what happens to be the end id."""
    said = Completion("g", 0, np.array([5, last], dtype=np.int32), np.array([-1.0, -1.0], dtype=np.float32), reason)
    row = attempt(Prompt("g", "t", "1", np.array([2], dtype=np.int32)), said, "4", round_index=1, policy_version=17, temperature=1.0)
    assert (row.status, row.finish_reason, row.mask.tolist()) == (status, reason, [False, True, True])


def test_a22_a_cut_vocabulary_is_refused_and_a_gap_is_seen_where_the_mean_is_small() -> None:
    """Case A22: top-p 0.9 of [0.6, 0.3, 0.1] makes the engine say ln 0.667 where training says ln 0.6; with 1 token in 10 so, the mean gap is 0.01."""
    with pytest.raises(ConfigError, match=r"rollout.top_p: .*every importance ratio would be off by the kept mass; leave top_p at 1"):
        params.section(Config, {"rollout": {"top_p": 0.9}}, "rollout")
    gap = np.log(0.6 / 0.9) - np.log(0.6)
    tally = Tally()
    tally.add(MicroNumbers(loss=0.0, num_tokens=10, approx_kl=0.0, num_clipped=0, entropy=0.0, kl=None, gaps=np.array([gap, *[0.0] * 9])))
    tally.add(MicroNumbers(loss=0.0, num_tokens=10, approx_kl=0.0, num_clipped=0, entropy=0.0, kl=None, gaps=np.array([*[0.0] * 9, gap])))
    tally.finish_step(1.0)
    numbers = tally.numbers(seconds=1.0)
    assert (numbers["logprob_gap_max"], numbers["logprob_gap_p95"]) == (pytest.approx(0.105361, abs=1e-6), pytest.approx(0.105361, abs=1e-6))


@pytest.mark.parametrize("logprob", [np.nan, -np.inf])
def test_tokens_of_a_policy_that_is_not_finite_are_refused_and_not_scored_as_wrong(logprob: float) -> None:
    """Greedy tokens of spoiled weights are tokens like any other; an evaluation would count them as wrong answers."""
    said = Completion("g", 3, np.array([5, 0], dtype=np.int32), np.array([-1.0, logprob], dtype=np.float32), "stop")
    with pytest.raises(EngineError, match=r"log-probs are not finite; got 1 of 2 tokens of 02/eval/a/3; do: see whether the policy's weights are finite"):
        attempt(Prompt("02/eval/a", "a", "1", np.array([2], dtype=np.int32)), said, "4", round_index=2, policy_version=17, temperature=1.0)
