"""Component `evaluate`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/rlpipe/evaluate:0.1.0", install_kfp_package=False)
def evaluate(
    policy: dsl.Input[dsl.Model],
    tasks: dsl.Input[dsl.Dataset],
    evaluation_in: dsl.Input[dsl.Artifact],
    evaluation: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
    config: dict,
    tracking: dict,
    round_index: int,
    run_key: str,
    run_id: str,
) -> bool:
    """Measure the policy on held-out tasks and decide whether it replaces the champion.

    Args:
        policy: The policy.
        tasks: The task file.
        evaluation_in: Evaluation of the round before.
        evaluation: What the policy can do, and the decision to promote or hold it.
        metrics: The step's numbers; its file holds the run record.
        report: A page with plots and readable examples.
        summary: The numbers as Markdown.
        config: Section `evaluate` of params.yaml, filled, or a reference to it.
        tracking: Section `tracking` of params.yaml.
        round_index: The round, from 1.
        run_key: What `start` returned: which MLflow run this belongs to.
        run_id: Kubeflow's id of the run.

    Returns:
        Whether the policy was promoted.
    """
    from rlpipe.kubeflow.task import Task

    record = Task("evaluate", round_index, tracking, run_key, run_id).run(
        config, {"policy": policy, "tasks": tasks, "evaluation_in": evaluation_in}, {"evaluation": evaluation}, metrics, report=report, summary=summary
    )
    return bool(record["numbers"]["promoted"])


if __name__ == "__main__":
    from kfp import compiler

    compiler.Compiler().compile(evaluate, package_path=__file__.replace(".py", ".yaml"))
