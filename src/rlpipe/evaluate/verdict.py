"""The evaluation artifact: results, the decision against the champion, and whether the run has reached its goal."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe import artifact
from rlpipe.errors import ArtifactError
from rlpipe.evaluate import results as result_files
from rlpipe.evaluate.gate import Decision, Pair
from rlpipe.evaluate.measuring import Measurement
from rlpipe.evaluate.results import CHAMPION, RESULTS, TaskResult
from rlpipe.evaluate.section import Config

EVALUATION = "evaluation.json"


@dataclass(frozen=True, slots=True)
class Before:
    """The evaluation of the round before: what `evaluation.json` says, and the champion's results."""

    content: dict[str, Any]
    champion: tuple[TaskResult, ...]


def read(folder: Path) -> dict[str, Any]:
    """`evaluation.json` of an evaluation.

    Raises:
        ArtifactError: it is missing or damaged.
    """
    path = folder / EVALUATION
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read", got=str(error), do="run evaluate again") from error
    return dict(content)


def read_before(folder: Path) -> Before:
    """What the next evaluation needs of this one."""
    return Before(read(folder), tuple(result_files.read(folder / CHAMPION)))


def write(config: Config, folder: Path, measured: Measurement, fingerprint: str, before: Before | None, round_index: int) -> dict[str, Any]:
    """Write an evaluation; returns the content of `evaluation.json`. Without one before it, the policy is its own champion."""
    found = result_files.metrics(measured.results, config.pass_at)
    decision = decide(config, measured, fingerprint, before)
    promoted = before is None or decision.decision == "promote"
    itself = {"policy_version": measured.policy_version, "fingerprint": fingerprint, "greedy_accuracy": found["greedy_accuracy"]}
    content = {
        "round": round_index,
        "policy_version": measured.policy_version,
        "policy_fingerprint": fingerprint,
        **{name: value for name, value in found.items() if not name.startswith("pass_at_")},
        "pass_at": {name.removeprefix("pass_at_"): value for name, value in found.items() if name.startswith("pass_at_")},
        "decision": decision.decision,
        "reason": decision.reason,
        "looked_at": [one._asdict() for one in config.gate.looked_at(_pairs(measured, before))] if before is not None else [],
        "champion": itself if before is None or promoted else before.content["champion"],
        "stop": stop(config, found, [] if before is None else before.content["stop"]["course"], round_index),
    }
    artifact.write_json(folder / EVALUATION, content)
    result_files.write(folder / RESULTS, measured.results)
    result_files.write(folder / CHAMPION, measured.results if before is None or promoted else before.champion)
    return content


def decide(config: Config, measured: Measurement, fingerprint: str, before: Before | None) -> Decision:
    """Promote or hold the measured policy, or say that there is too little to decide."""
    if before is None:
        return Decision("promote", "the start policy is the first champion")
    if fingerprint == before.content["champion"]["fingerprint"]:
        return Decision("hold", "the policy is the champion, byte for byte")
    return config.gate(_pairs(measured, before))


def _pairs(measured: Measurement, before: Before) -> list[Pair]:
    champion = {row.task_id: row for row in before.champion}
    return [Pair(row, champion[row.task_id], measured.metadata[row.task_id]) for row in measured.results if row.task_id in champion]


def stop(config: Config, metrics: dict[str, float | int | None], course: list[list[Any]], round_index: int) -> dict[str, Any]:
    """The metric's course so far and whether it has stood at the target for `patience` rounds in a row; without a target never."""
    goal = config.run.stop
    if goal is None:
        return {"metric": None, "target": None, "patience": None, "course": course, "met": False}
    course = [*course, [round_index, metrics.get(goal.metric)]]
    last = [value for _, value in course[-goal.patience :]]
    met = len(last) == goal.patience and all(value is not None and value >= goal.target for value in last)
    return {"metric": goal.metric, "target": goal.target, "patience": goal.patience, "course": course, "met": met}


def numbers(content: dict[str, Any]) -> dict[str, float | int | None]:
    """The report numbers of an evaluation."""
    plain = ("greedy_accuracy", "num_eval_tasks", "num_unscored", "mean_completion_tokens", "policy_version")
    passed = {f"pass_at_{k}": value for k, value in content["pass_at"].items()}
    decision = content["decision"]
    return {**{name: content[name] for name in plain}, **passed, "promoted": int(decision == "promote"), "decided": int(decision != "not_enough")}
