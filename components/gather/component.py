"""Component `gather`."""

from typing import List  # noqa: UP035 (kfp reads this spelling)

from kfp import dsl


@dsl.component(base_image="ghcr.io/rlpipe/gather:0.1.0", install_kfp_package=False)
def gather(
    shards: dsl.Input[List[dsl.Dataset]],  # noqa: UP006
    progress_shards: dsl.Input[List[dsl.Artifact]],  # noqa: UP006
    metrics_shards: dsl.Input[List[dsl.Metrics]],  # noqa: UP006
    trajectories: dsl.Output[dsl.Dataset],
    progress: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
    tracking: dict,
    round_index: int,
    run_key: str,
    run_id: str,
):
    """Join the shards of a round's rollout into the dataset that one pod would have made.

    Args:
        shards: The trajectories of every shard, in any order.
        progress_shards: The progress of every shard; all are equal.
        metrics_shards: The run record of every shard.
        trajectories: The trajectory dataset of the round.
        progress: Task cursor and selector state after this round.
        metrics: The round's numbers; its file holds the run record.
        report: A page with plots and readable examples.
        tracking: Section `tracking` of params.yaml.
        round_index: The round, from 1.
        run_key: What `start` returned: which MLflow run this belongs to.
        run_id: Kubeflow's id of the run.
    """
    from rlpipe.kubeflow.task import Task

    outputs = {"trajectories": trajectories, "progress": progress}
    Task("rollout", round_index, tracking, run_key, run_id).gather(shards, progress_shards, metrics_shards, outputs, metrics, report)


if __name__ == "__main__":
    from kfp import compiler

    compiler.Compiler().compile(gather, package_path=__file__.replace(".py", ".yaml"))
