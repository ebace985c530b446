"""The rollout step: the current policy attempts the next tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlpipe import artifact
from rlpipe import tasks as task_files
from rlpipe.errors import ConfigError
from rlpipe.rollout.section import Config
from rlpipe.rollout.selectors import Visit
from rlpipe.step import In, Out, Report

PROGRESS = "progress.json"


def run(
    config: Config,
    *,
    policy: In,
    tasks: In,
    progress_in: In,
    history_in: In,
    evaluation_in: In,
    trajectories: Out,
    progress: Out,
    round_index: int,
    shard_index: int = -1,
) -> Report:
    """Attempt the next tasks with the current policy; an interrupted call goes on after the last finished chunk.

    A shard selects what the whole round selects and attempts its own chunks of that; `rollout.gather` joins shards.
    """
    from rlpipe.rollout import attempts

    if stopped(evaluation_in):
        artifact.copy_contents(progress_in, progress)
        return Report(attempts.write_rows(trajectories, []).numbers(), outcome="stopped")
    known = {task.task_id: task for task in task_files.load(tasks)}
    visits, state = select(config, progress_in, list(known))
    with config.engine.open(policy, config.run.threads) as engine:
        rollout = attempts.Rollout(config, engine, policy, round_index)
        prompts, rejected = rollout.prompts([(known[visit.task_id], visit) for visit in visits])
        if not prompts:
            got = f"{len(rejected)} prompts, the first of {rejected[0]['num_tokens']} tokens"
            accepted = f"a prompt and rollout.max_new_tokens ({config.max_new_tokens}) within {engine.max_length} tokens together"
            raise ConfigError("no task of this round fits the model", got=got, accepted=accepted, do="lower rollout.max_new_tokens or shorten the prompts")
        chunks = attempts.chunks_of(len(prompts), config, shard_index)
        rollout.make(prompts, trajectories, chunks)
    counts = attempts.join(trajectories, chunks)
    artifact.write_json(progress / PROGRESS, {"round": round_index, "selector": {"type": config.selector.type, "state": state}})
    facts = {"policy_versions": {str(rollout.policy_version): artifact.content_key(policy)}, "rejected_prompts": rejected}
    outcome = None if chunks else "empty"
    return Report(counts.numbers(num_rejected=len(rejected)), counts.reasons(num_rejected=len(rejected)), outcome, facts)


def stopped(evaluation: Path) -> bool:
    """Whether an evaluation says that the run has reached its goal."""
    return bool(json.loads((evaluation / "evaluation.json").read_text(encoding="utf-8"))["stop"]["met"])


def initial_progress() -> dict[str, Any]:
    """Progress before the first round; the selector of that round begins its own state."""
    return {"round": 0, "selector": None}


def select(config: Config, progress_in: Path, task_ids: Sequence[str]) -> tuple[list[Visit], dict[str, Any]]:
    """This round's visits and the selector's state after them; another selector than the last round's begins anew."""
    before = json.loads((progress_in / PROGRESS).read_text(encoding="utf-8"))["selector"]
    state = before["state"] if before and before["type"] == config.selector.type else config.selector.init()
    return config.selector(state, task_ids, config.num_tasks, config.run.data_seed)
