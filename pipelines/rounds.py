"""Pipeline `rl_round`: rollout, filter, reward, train, evaluate, and what follows from the decision."""

from typing import Any, NamedTuple

from kfp import dsl

from ..components.evaluate import evaluate as evaluate_task
from ..components.filter import filter as filter_task
from ..components.gather import gather as gather_task
from ..components.promote import promote as promote_task
from ..components.reward import reward as reward_task
from ..components.rollout import rollout as rollout_task
from ..components.snapshot import snapshot as snapshot_task
from ..components.train import train as train_task

STATE = [("policy", dsl.Model), ("progress", dsl.Artifact), ("history", dsl.Artifact), ("evaluation", dsl.Artifact)]
WRITERS = {"policy": "train", "progress": "rollout", "history": "reward", "evaluation": "evaluate"}
"""The step that writes each."""
Round = NamedTuple("Round", STATE)
"""What a round hands to the next one."""
RecordedRound = NamedTuple("RecordedRound", [*STATE, ("commit", str)])
"""The same, and the commit it was recorded in."""


def build_round(plan: Any) -> Any:
    """One round as a pipeline, for a plan's shards, resources and snapshot; rounds are this, one after the other.

    Args:
        plan: What is fixed when the pipeline is compiled, an `rlpipe.kubeflow.compile.Plan`.
    """

    @dsl.pipeline(name="rl-round", description="One round: rollout, filter, reward, train, evaluate.")
    def rl_round(
        params: dsl.Input[dsl.Artifact],
        train_tasks: dsl.Input[dsl.Dataset],
        eval_tasks: dsl.Input[dsl.Dataset],
        policy: dsl.Input[dsl.Model],
        progress: dsl.Input[dsl.Artifact],
        history: dsl.Input[dsl.Artifact],
        evaluation: dsl.Input[dsl.Artifact],
        rollout: dict,
        filter: dict,
        reward: dict,
        train: dict,
        evaluate: dict,
        tracking: dict,
        snapshot: dict,
        round_index: int,
        run_key: str,
        run_id: str,
        expect: str,
    ) -> plan.round_outputs:
        """One round, from the state of the one before."""
        common = {"tracking": tracking, "round_index": round_index, "run_key": run_key, "run_id": run_id}
        state = {"policy": policy, "tasks": train_tasks, "progress_in": progress, "history_in": history, "evaluation_in": evaluation}
        attempts = _rollouts(plan, {**state, **common, "config": rollout})
        kept = plan.task("filter", filter_task(trajectories=attempts["trajectories"], config=filter, **common))
        scored = plan.task("reward", reward_task(kept=kept.outputs["kept"], tasks=train_tasks, history_in=history, config=reward, **common))
        trained = plan.task("train", train_task(scored=scored.outputs["scored"], policy_in=policy, evaluation_in=evaluation, config=train, **common))
        measured = plan.task("evaluate", evaluate_task(policy=trained.outputs["policy"], tasks=eval_tasks, evaluation_in=evaluation, config=evaluate, **common))
        with dsl.If(measured.outputs["Output"] == True, name="promoted"):  # noqa: E712 (kfp reads the comparison)
            plan.task("promote", promote_task(evaluation=measured.outputs["evaluation"], **common))
        outputs = {"filter": kept.outputs, "reward": scored.outputs, "train": trained.outputs, "evaluate": measured.outputs, "rollout": attempts}
        made = {name: outputs[step][name] for name, step in WRITERS.items()}
        if not plan.recorded:
            return plan.round_outputs(**made)
        commit = _recorded(plan, outputs, made, params=params, config=snapshot, run_id=run_id, round_index=round_index, expect=expect)
        return plan.round_outputs(**made, commit=commit)

    return rl_round


def _recorded(plan: Any, outputs: dict[str, Any], made: dict[str, Any], **arguments: Any) -> Any:
    """The commit of the snapshot of a round, from the outputs of its steps and the state it hands on."""
    datasets = {"trajectories": outputs["rollout"]["trajectories"], "kept": outputs["filter"]["kept"], "scored": outputs["reward"]["scored"]}
    metrics = {f"{step}_metrics": found["metrics"] for step, found in outputs.items()}
    return plan.task("snapshot", snapshot_task(**datasets, **made, **metrics, **arguments)).outputs["Output"]


def _rollouts(plan: Any, arguments: dict[str, Any]) -> Any:
    """The outputs of one rollout task, or of several shards joined."""
    if plan.shards == 1:
        return plan.task("rollout", rollout_task(**arguments)).outputs
    with dsl.ParallelFor(list(range(plan.shards)), name="shards") as shard:
        made = plan.task("rollout", rollout_task(**arguments, shard_index=shard))
    joined = gather_task(
        shards=dsl.Collected(made.outputs["trajectories"]),
        progress_shards=dsl.Collected(made.outputs["progress"]),
        metrics_shards=dsl.Collected(made.outputs["metrics"]),
        **{name: arguments[name] for name in ("tracking", "round_index", "run_key", "run_id")},
    )
    return plan.task("gather", joined).outputs


def chain(plan: Any, rl_round: Any, state: dict[str, Any], fixed: dict[str, Any], commit: Any) -> None:
    """The plan's rounds, each taking the state of the one before.

    Args:
        plan: What is fixed when the pipeline is compiled.
        rl_round: The pipeline of one round, built before any other is under way.
        state: Policy, progress, history and evaluation of round 00.
        fixed: What every round is given alike.
        commit: The commit of the snapshot of round 00; an empty text without snapshots.
    """
    for index in range(1, plan.num_rounds + 1):
        done = rl_round(**state, **fixed, round_index=index, expect=commit)
        done.set_display_name(f"round {index}")
        state = {name: done.outputs[name] for name, _ in STATE}
        commit = done.outputs["commit"] if plan.recorded else ""
