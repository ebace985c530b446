"""Component `reward`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/rlpipe/reward:0.1.0", install_kfp_package=False)
def reward(
    kept: dsl.Input[dsl.Dataset],
    tasks: dsl.Input[dsl.Dataset],
    history_in: dsl.Input[dsl.Artifact],
    scored: dsl.Output[dsl.Dataset],
    history: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
    config: dict,
    tracking: dict,
    round_index: int,
    run_key: str,
    run_id: str,
):
    """Score trajectories and keep the groups that can teach.

    Args:
        kept: The trajectories that should be scored.
        tasks: The task file.
        history_in: History of the round before.
        scored: The scored groups that can teach.
        history: Per-task statistics after this round.
        metrics: The step's numbers; its file holds the run record.
        report: A page with plots and readable examples.
        config: Section `reward` of params.yaml, filled, or a reference to it.
        tracking: Section `tracking` of params.yaml.
        round_index: The round, from 1.
        run_key: What `start` returned: which MLflow run this belongs to.
        run_id: Kubeflow's id of the run.
    """
    from rlpipe.kubeflow.task import Task

    Task("reward", round_index, tracking, run_key, run_id).run(
        config, {"kept": kept, "tasks": tasks, "history_in": history_in}, {"scored": scored, "history": history}, metrics, report=report
    )


if __name__ == "__main__":
    from kfp import compiler

    compiler.Compiler().compile(reward, package_path=__file__.replace(".py", ".yaml"))
