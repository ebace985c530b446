"""Component `train`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/rlpipe/train:0.1.0", install_kfp_package=False)
def train(
    scored: dsl.Input[dsl.Dataset],
    policy_in: dsl.Input[dsl.Model],
    evaluation_in: dsl.Input[dsl.Artifact],
    policy: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
    config: dict,
    tracking: dict,
    round_index: int,
    run_key: str,
    run_id: str,
):
    """Update the policy on scored trajectories.

    Args:
        scored: The scored groups that can teach.
        policy_in: The policy of the round before.
        evaluation_in: Evaluation of the round before.
        policy: The policy.
        metrics: The step's numbers; its file holds the run record.
        report: A page with plots and readable examples.
        config: Section `train` of params.yaml, filled, or a reference to it.
        tracking: Section `tracking` of params.yaml.
        round_index: The round, from 1.
        run_key: What `start` returned: which MLflow run this belongs to.
        run_id: Kubeflow's id of the run.
    """
    from rlpipe.kubeflow.task import Task

    Task("train", round_index, tracking, run_key, run_id).run(
        config, {"scored": scored, "policy_in": policy_in, "evaluation_in": evaluation_in}, {"policy": policy}, metrics, report=report
    )


if __name__ == "__main__":
    from kfp import compiler

    compiler.Compiler().compile(train, package_path=__file__.replace(".py", ".yaml"))
