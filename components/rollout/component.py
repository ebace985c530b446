"""Component `rollout`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/rlpipe/rollout:0.1.0", install_kfp_package=False)
def rollout(
    policy: dsl.Input[dsl.Model],
    tasks: dsl.Input[dsl.Dataset],
    progress_in: dsl.Input[dsl.Artifact],
    history_in: dsl.Input[dsl.Artifact],
    evaluation_in: dsl.Input[dsl.Artifact],
    trajectories: dsl.Output[dsl.Dataset],
    progress: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
    config: dict,
    tracking: dict,
    round_index: int,
    run_key: str,
    run_id: str,
    shard_index: int = -1,
):
    """Generate a group of trajectories for each of the round's tasks.

    With `shard_index` 0 or above only that shard of the round is made; `gather` joins the shards.

    Args:
        policy: The policy.
        tasks: The task file.
        progress_in: Progress of the round before.
        history_in: History of the round before.
        evaluation_in: Evaluation of the round before.
        trajectories: The trajectory dataset.
        progress: Task cursor and selector state after this round.
        metrics: The step's numbers; its file holds the run record.
        report: A page with plots and readable examples.
        config: Section `rollout` of params.yaml, filled, or a reference to it.
        tracking: Section `tracking` of params.yaml.
        round_index: The round, from 1.
        run_key: What `start` returned: which MLflow run this belongs to.
        run_id: Kubeflow's id of the run.
        shard_index: The shard to make; -1 makes the whole round.
    """
    from rlpipe.kubeflow.task import Task

    Task("rollout", round_index, tracking, run_key, run_id).run(
        config,
        {"policy": policy, "tasks": tasks, "progress_in": progress_in, "history_in": history_in, "evaluation_in": evaluation_in},
        {"trajectories": trajectories, "progress": progress},
        metrics,
        report=report,
        shard_index=shard_index,
    )


if __name__ == "__main__":
    from kfp import compiler

    compiler.Compiler().compile(rollout, package_path=__file__.replace(".py", ".yaml"))
