"""Component `promote`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/rlpipe/promote:0.1.0", install_kfp_package=False)
def promote(
    evaluation: dsl.Input[dsl.Artifact],
    summary: dsl.Output[dsl.Markdown],
    tracking: dict,
    round_index: int,
    run_key: str,
    run_id: str,
) -> str:
    """Point MLflow's alias `champion` at the policy that an evaluation promoted.

    Args:
        evaluation: The evaluation whose decision is to promote.
        summary: What was promoted, and why.
        tracking: Section `tracking` of params.yaml.
        round_index: The round, from 1.
        run_key: What `start` returned: which MLflow run this belongs to.
        run_id: Kubeflow's id of the run.

    Returns:
        The registered version, or an empty text where nothing is tracked.
    """
    from rlpipe.kubeflow.task import Task

    return Task("evaluate", round_index, tracking, run_key, run_id).promote(evaluation, summary)


if __name__ == "__main__":
    from kfp import compiler

    compiler.Compiler().compile(promote, package_path=__file__.replace(".py", ".yaml"))
