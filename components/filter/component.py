"""Component `filter`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/rlpipe/filter:0.1.0", install_kfp_package=False)
def filter(
    trajectories: dsl.Input[dsl.Dataset],
    kept: dsl.Output[dsl.Dataset],
    metrics: dsl.Output[dsl.Metrics],
    config: dict,
    tracking: dict,
    round_index: int,
    run_key: str,
    run_id: str,
):
    """Drop trajectories that should not be scored.

    Args:
        trajectories: The trajectory dataset.
        kept: The trajectories that should be scored.
        metrics: The step's numbers; its file holds the run record.
        config: Section `filter` of params.yaml, filled, or a reference to it.
        tracking: Section `tracking` of params.yaml.
        round_index: The round, from 1.
        run_key: What `start` returned: which MLflow run this belongs to.
        run_id: Kubeflow's id of the run.
    """
    from rlpipe.kubeflow.task import Task

    Task("filter", round_index, tracking, run_key, run_id).run(config, {"trajectories": trajectories}, {"kept": kept}, metrics)


if __name__ == "__main__":
    from kfp import compiler

    compiler.Compiler().compile(filter, package_path=__file__.replace(".py", ".yaml"))
