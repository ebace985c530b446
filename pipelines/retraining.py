"""Pipeline `retraining`: measure a champion on new tasks, and train it further only if it does worse than it should."""

from typing import Any

from kfp import dsl

from ..components.decide import decide
from ..components.finish import finish
from ..components.preflight import preflight as preflight_task
from ..components.start_from import start_from
from .rounds import build_round, chain


def build(plan: Any) -> Any:
    """The pipeline for a plan.

    Args:
        plan: What is fixed when the pipeline is compiled, an `rlpipe.kubeflow.compile.Plan`.
    """
    given, rl_round = plan.sections, build_round(plan)

    @dsl.pipeline(name="rlpipe-retraining", description="Measure a champion on new tasks; retrain it where it is worth it.")
    def retraining(
        champion_uri: str,
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
        metric: str = "greedy_accuracy",
        retrain_below: float = 0.9,
    ):
        """Import the champion once, measure it, decide, and run the rounds if they are worth it.

        Args:
            champion_uri: Where the policy artifact of an earlier run lies, as its registered version says.
            model: Section `model` of params.yaml, filled; the champion stands in for it.
            tasks: Section `tasks`, filled: the new tasks.
            start: Section `evaluate`, filled, for the champion.
            rollout: Section `rollout`, filled.
            filter: Section `filter`, filled.
            reward: Section `reward`, filled.
            train: Section `train`, filled.
            evaluate: Section `evaluate`, filled.
            tracking: Section `tracking`, filled.
            kubeflow: Section `kubeflow`, filled.
            snapshot: `kubeflow.snapshot`; retraining makes none, since its model is no stage of `dvc.yaml`.
            metric: The metric that decides.
            retrain_below: Retrain where the champion's metric is below this.
        """
        run_id = dsl.PIPELINE_JOB_ID_PLACEHOLDER
        sections = {"rollout": rollout, "filter": filter, "reward": reward, "train": train, "evaluate": evaluate, "tracking": tracking}
        with dsl.ExitHandler(plan.task("finish", finish(tracking=tracking, run_id=run_id)), name="run"):
            checked = preflight_task(model=model, tasks=tasks, start=start, **sections, kubeflow=kubeflow, num_rounds=plan.num_rounds)
            checked = plan.task("preflight", checked)
            champion = dsl.importer(artifact_uri=champion_uri, artifact_class=dsl.Model, reimport=False).after(checked)
            key = checked.outputs["Output"]
            began = start_from(champion=champion.output, config=start, tasks_config=tasks, tracking=tracking, params_key=key, run_id=run_id)
            began = plan.task("start_from", began)
            worth = plan.task("decide", decide(evaluation=began.outputs["evaluation"], metric=metric, below=retrain_below))
            with dsl.If(worth.outputs["Output"] == True, name="worth it"):  # noqa: E712 (kfp reads the comparison)
                made = {name: began.outputs[name] for name in ("train_tasks", "eval_tasks")}
                state = {name: began.outputs[name] for name in ("policy", "progress", "history", "evaluation")}
                fixed = {**sections, **made, "params": checked.outputs["params"], "snapshot": snapshot, "run_key": began.outputs["Output"], "run_id": run_id}
                chain(plan, rl_round, state, fixed, "")

    return retraining
