"""The evaluate step: what the policy can do on held-out tasks, and whether it replaces the champion."""

from __future__ import annotations

from rlpipe import artifact
from rlpipe import tasks as task_files
from rlpipe.evaluate.section import Config
from rlpipe.step import In, Out, Report


def run(config: Config, *, policy: In, tasks: In, evaluation_in: In, evaluation: Out, round_index: int) -> Report:
    """Measure the policy on held-out tasks, decide whether it replaces the champion, and whether the run has reached its goal."""
    from rlpipe.evaluate import verdict
    from rlpipe.evaluate.measuring import measure

    before = verdict.read_before(evaluation_in)
    if before.content["stop"]["met"]:
        artifact.copy_contents(evaluation_in, evaluation)
        return Report(numbers=verdict.numbers(before.content), outcome="stopped")
    asked = task_files.load(tasks)
    config.gate.check_slices([task.metadata for task in asked])
    measured = measure(config, policy, asked, round_index, evaluation)
    content = verdict.write(config, evaluation, measured, artifact.content_key(policy), before, round_index)
    return Report(numbers=verdict.numbers(content), facts={"policy_version": measured.policy_version, "decision": content["decision"]})
