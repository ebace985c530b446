"""Pipeline `post_training`: preflight, start, and rounds until the last one of params.yaml."""

from typing import Any

from kfp import dsl

from ..components.finish import finish
from ..components.preflight import preflight as preflight_task
from ..components.snapshot_start import snapshot_start
from ..components.start import start as start_task
from .rounds import build_round, chain


def build(plan: Any) -> Any:
    """The pipeline for a plan.

    Args:
        plan: What is fixed when the pipeline is compiled, an `rlpipe.kubeflow.compile.Plan`.
    """
    given, rl_round = plan.sections, build_round(plan)

    @dsl.pipeline(name="rlpipe-post-training", description="Reinforcement-learning post-training: rounds of rollout, filter, reward, train, evaluate.")
    def post_training(
        model: dict = given["model"],
        tasks: dict = given["tasks"],
        start: dict = given["start"],
        rollout: dict = given["rollout"],
        filter: dict = given["filter"],
        reward: dict = given["reward"],
        train: dict = given["train"],
        evaluate: dict = given["evaluate"],
        tracking: dict = given["tracking"],
        kubeflow: dict = given["kubeflow"],
        snapshot: dict = given["snapshot"],
    ):
        """Check, start, and run the rounds; the summary is written whatever happens.

        Args:
            model: Section `model` of params.yaml, filled.
            tasks: Section `tasks`, filled.
            start: Section `evaluate`, filled, for the start policy.
            rollout: Section `rollout`, filled.
            filter: Section `filter`, filled.
            reward: Section `reward`, filled.
            train: Section `train`, filled.
            evaluate: Section `evaluate`, filled.
            tracking: Section `tracking`, filled.
            kubeflow: Section `kubeflow`, filled; what of it shapes tasks is fixed when the pipeline is compiled.
            snapshot: `kubeflow.snapshot`; empty without snapshots.
        """
        run_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
        sections = {"rollout": rollout, "filter": filter, "reward": reward, "train": train, "evaluate": evaluate, "tracking": tracking}
        with dsl.ExitHandler(plan.task("finish", finish(tracking=tracking, run_id=run_id)), name="run"):
            checked = preflight_task(model=model, tasks=tasks, start=start, **sections, kubeflow=kubeflow, num_rounds=plan.num_rounds)
            checked = plan.task("preflight", checked)
            key = checked.outputs["Output"]
            began = start_task(config=start, model_config=model, tasks_config=tasks, tracking=tracking, params_key=key, run_id=run_id)
            began = plan.task("start", began)
            state = {name: began.outputs[name] for name in ("policy", "progress", "history", "evaluation")}
            made = {name: began.outputs[name] for name in ("train_tasks", "eval_tasks")}
            commit = ""
            if plan.recorded:
                kept = {"model": began.outputs["model"], "metrics": began.outputs["metrics"], "params": checked.outputs["params"]}
                commit = plan.task("snapshot_start", snapshot_start(**kept, **made, **state, config=snapshot, run_id=run_id)).outputs["Output"]
            fixed = {**sections, **made, "params": checked.outputs["params"], "snapshot": snapshot, "run_key": began.outputs["Output"], "run_id": run_id}
            chain(plan, rl_round, state, fixed, commit)

    return post_training
