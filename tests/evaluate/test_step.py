"""The evaluate step, and the artifact it carries from round to round."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlpipe import artifact, chunks, params, tasks
from rlpipe.engines import Torch
from rlpipe.engines.base import Completion
from rlpipe.engines.torch_engine import TorchEngine
from rlpipe.errors import ConfigError, EngineError
from rlpipe.evaluate import results, verdict
from rlpipe.evaluate.gate import Paired
from rlpipe.evaluate.measuring import Measurement, measure
from rlpipe.evaluate.results import TaskResult
from rlpipe.evaluate.step import Config, run
from rlpipe.params import Run, Stop
from rlpipe.reward.digit_share import DigitShare
from rlpipe.step import Report
from rlpipe.tasks import Task
from rlpipe.trajectory import Trajectory
from tests.factories import tiny_policy

CONFIG = Config(
    run=Run(seed=5, threads=1),
    engine=Torch(dtype="float32"),
    rewards=(DigitShare(),),
    correct_at=0.01,
    num_attempts=3,
    pass_at=(1, 3, 9),
    max_new_tokens=6,
    chunk_groups=4,
    gate=Paired(min_tasks=4),
)


def seven_tasks() -> list[Task]:
    return [Task(task_id=f"t{i}", prompt=f"max({i}, {i + 1}) =", reference=str(i + 1)) for i in range(7)]


def result(task_id: str, correct: bool | None, attempts: int = 0, attempts_correct: int = 0) -> TaskResult:
    return TaskResult(task_id, correct, "", 4, attempts, attempts_correct)


def measured(*correct: bool | None, version: int = 1) -> Measurement:
    return Measurement(version, tuple(result(f"t{i}", value) for i, value in enumerate(correct)), {f"t{i}": {} for i in range(len(correct))})


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("policies")
    return [tiny_policy(root / str(seed), seed=seed, version=seed) for seed in (0, 1)]


def test_a59_every_task_is_evaluated_whatever_the_chunk(policies: list[Path], tmp_path: Path) -> None:
    found = measure(CONFIG, policies[0], seven_tasks(), 1, tmp_path / "a")
    assert [row.task_id for row in found.results] == [f"t{i}" for i in range(7)]
    assert all(row.attempts == 3 and row.correct is not None and row.num_tokens for row in found.results)
    whole = measure(CONFIG.model_copy(update={"chunk_groups": 7}), policies[0], seven_tasks(), 1, tmp_path / "b")
    assert [(row.completion, row.attempts_correct) for row in whole.results] == [(row.completion, row.attempts_correct) for row in found.results]


def test_a_prompt_over_the_models_length_is_unscored_not_wrong(policies: list[Path], tmp_path: Path) -> None:
    listed = [*seven_tasks(), Task(task_id="long", prompt="1" * 125, reference="1")]
    found = measure(CONFIG, policies[0], listed, 1, tmp_path)
    assert found.results[7] == TaskResult("long", None, "", None, 0, 0, "prompt of 125 tokens, model length 128")
    numbers = results.metrics(found.results, (1,))
    assert (numbers["num_eval_tasks"], numbers["num_unscored"]) == (8, 1)
    assert numbers["greedy_accuracy"] == sum(bool(row.correct) for row in found.results) / 7


def test_an_engine_that_fails_says_nothing_of_the_policy(policies: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More failures than `max_unscorable` end the step, and nothing of them is kept for the next call."""
    whole = measure(CONFIG, policies[0], seven_tasks(), 1, tmp_path / "whole")

    def lost(self: TorchEngine) -> Iterator[Completion]:
        yield from (replace(done, finish_reason="error", error="connection lost") for done in stream(self))

    stream = TorchEngine.stream
    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "stream", lost)
        with pytest.raises(EngineError, match="28 of 28 completions, most often: connection lost"):
            measure(CONFIG, policies[0], seven_tasks(), 1, tmp_path / "failed")
    assert measure(CONFIG, policies[0], seven_tasks(), 1, tmp_path / "failed").results == whole.results


def test_metrics_by_hand() -> None:
    rows = [result("a", True, 4, 1), result("b", False, 4, 4), result("c", None, 1, 0)]
    assert results.metrics(rows, (1, 4, 8)) == {
        "greedy_accuracy": 0.5,
        "mean_completion_tokens": 4.0,
        "num_eval_tasks": 3,
        "num_unscored": 1,
        "pass_at_1": pytest.approx((0.25 + 1 + 0) / 3),
        "pass_at_4": 1.0,
    }


def evaluation(config: Config, folder: Path, found: Measurement, before: Path | None, round_index: int) -> dict[str, Any]:
    return verdict.write(config, folder, found, f"f{found.policy_version}", verdict.read_before(before) if before else None, round_index)


def test_the_champion_is_carried_until_a_better_policy_comes(tmp_path: Path) -> None:
    wrong, right = [False] * 6, [True] * 6
    start = evaluation(CONFIG, tmp_path / "0", measured(*wrong, version=0), None, 0)
    assert start["decision"] == "promote"
    better = evaluation(CONFIG, tmp_path / "1", measured(*right, version=1), tmp_path / "0", 1)
    assert (better["decision"], better["champion"]["policy_version"]) == ("promote", 1)
    worse = evaluation(CONFIG, tmp_path / "2", measured(*wrong, version=2), tmp_path / "1", 2)
    assert (worse["decision"], worse["policy_version"], worse["champion"]) == ("hold", 2, better["champion"])
    assert verdict.read_before(tmp_path / "2").champion == measured(*right).results
    same = evaluation(CONFIG, tmp_path / "3", measured(*right, version=1), tmp_path / "2", 3)
    assert (same["decision"], same["reason"]) == ("hold", "the policy is the champion, byte for byte")


@pytest.mark.parametrize(("patience", "met"), [(1, [False, True, False, True, True]), (2, [False, False, False, False, True])])
def test_the_goal_is_met_after_patience_rounds_in_a_row(tmp_path: Path, patience: int, met: list[bool]) -> None:
    config = CONFIG.model_copy(update={"run": Run(stop=Stop(target=0.75, patience=patience))})
    before, found = None, []
    for i, right in enumerate([1, 4, 2, 3, 4]):
        folder = tmp_path / str(i)
        found.append(evaluation(config, folder, measured(*[True] * right, *[False] * (4 - right), version=i), before, i)["stop"])
        before = folder
    assert [entry["met"] for entry in found] == met
    assert found[-1]["course"] == [[0, 0.25], [1, 1.0], [2, 0.5], [3, 0.75], [4, 1.0]]


def test_a_stop_metric_that_is_not_measured_is_refused() -> None:
    raw = {"run": {"stop": {"metric": "pass_at_8", "target": 1}}, "evaluate": {"num_attempts": 4, "pass_at": [1, 8]}}
    with pytest.raises(ConfigError, match="pass_at_8 is not measured; accepted: greedy_accuracy, pass_at_1, mean_completion_tokens"):
        params.section(Config, raw, "evaluate")


def evaluate(policy: Path, before: Path, folder: Path, config: Config = CONFIG) -> Report:
    tasks.save(folder.parent / "tasks.jsonl", seven_tasks())
    folder.mkdir(exist_ok=True)
    report = run(config, policy=policy, tasks=folder.parent / "tasks.jsonl", evaluation_in=before, evaluation=folder, round_index=1)
    artifact.write_manifest(folder, outcome=report.outcome)
    return report


def test_the_step_writes_the_same_bytes_twice(policies: list[Path], tmp_path: Path) -> None:
    evaluation(CONFIG, tmp_path / "0", measured(*[False] * 7, version=0), None, 0)
    artifact.write_manifest(tmp_path / "0")
    report = evaluate(policies[1], tmp_path / "0", tmp_path / "a")
    evaluate(policies[1], tmp_path / "0", tmp_path / "b")
    assert artifact.fingerprint(tmp_path / "a") == artifact.fingerprint(tmp_path / "b")
    content = json.loads((tmp_path / "a" / "evaluation.json").read_text())
    assert content["policy_fingerprint"] == artifact.read_manifest(policies[1])["fingerprint"]
    assert set(content["pass_at"]) == {"1", "3"}
    assert report.numbers["policy_version"] == 1
    assert report.numbers["num_eval_tasks"] == 7


@pytest.mark.parametrize("num_written", [0, 1, 2, 3])
def test_a_killed_evaluation_goes_on_after_the_tasks_it_finished(
    policies: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_written: int
) -> None:
    evaluation(CONFIG, tmp_path / "0", measured(*[False] * 7, version=0), None, 0)
    artifact.write_manifest(tmp_path / "0")
    evaluate(policies[1], tmp_path / "0", tmp_path / "whole")
    written: list[str] = []
    write = chunks.write

    def killed(path: Path, rows: Iterable[Trajectory]) -> None:
        if len(written) == num_written:
            raise KeyboardInterrupt
        written.append(f"{path.parent.name}/{path.stem}")
        write(path, rows)

    monkeypatch.setattr(chunks, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate(policies[1], tmp_path / "0", tmp_path / "killed")
    num_written = 4
    evaluate(policies[1], tmp_path / "0", tmp_path / "killed")
    assert written == ["greedy/chunk-00000", "greedy/chunk-00001", "sampled/chunk-00000", "sampled/chunk-00001"]
    assert artifact.fingerprint(tmp_path / "killed") == artifact.fingerprint(tmp_path / "whole")


def test_once_the_goal_is_met_the_evaluation_is_passed_on(policies: list[Path], tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"run": Run(stop=Stop(target=0.5))})
    evaluation(config, tmp_path / "0", measured(*[True] * 7, version=0), None, 0)
    artifact.write_manifest(tmp_path / "0")
    report = evaluate(policies[1], tmp_path / "0", tmp_path / "1", config)
    assert report.outcome == "stopped"
    assert report.numbers["greedy_accuracy"] == 1.0
    assert artifact.fingerprint(tmp_path / "1") == artifact.fingerprint(tmp_path / "0")
