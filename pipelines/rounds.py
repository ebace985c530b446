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
        made = {
            "policy": trained.outputs["policy"],
            "progress": attempts["progress"],
            "history": scored.outputs["history"],
            "evaluation": measured.outputs["evaluation"],
        }
        if not plan.recorded:
            return plan.round_outputs(**made)
        recorded = snapshot_task(
            params=params,
            trajectories=attempts["trajectories"],
            kept=kept.outputs["kept"],
            scored=scored.outputs["scored"],
            **made,
            rollout_metrics=attempts["metrics"],
            filter_metrics=kept.outputs["metrics"],
            reward_metrics=scored.outputs["metrics"],
            train_metrics=trained.outputs["metrics"],
            evaluate_metrics=measured.outputs["metrics"],
            config=snapshot,
            run_id=run_id,
            round_index=round_index,
            expect=expect,
        )
        return plan.round_outputs(**made, commit=plan.task("snapshot", recorded).outputs["Output"])

    return rl_round


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
