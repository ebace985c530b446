"""Component `decide`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/rlpipe/preflight:0.1.0", install_kfp_package=False)
def decide(evaluation: dsl.Input[dsl.Artifact], summary: dsl.Output[dsl.Markdown], metric: str, below: float) -> bool:
    """Decide whether retraining is worth it: the champion does worse on the new tasks than it should.

    Args:
        evaluation: What the champion can do on the new tasks.
        summary: The decision and its reason.
        metric: The metric of the evaluation to look at.
        below: Retrain where the metric is below this.

    Returns:
        Whether to retrain.
    """
    from rlpipe.kubeflow.gates import worth_retraining

    return worth_retraining(evaluation, metric, below, summary)


if __name__ == "__main__":
    from kfp import compiler

    compiler.Compiler().compile(decide, package_path=__file__.replace(".py", ".yaml"))
