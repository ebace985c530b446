"""Component `snapshot_start`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/rlpipe/snapshot:0.1.0", install_kfp_package=False)
def snapshot_start(
    params: dsl.Input[dsl.Artifact],
    model: dsl.Input[dsl.Model],
    train_tasks: dsl.Input[dsl.Dataset],
    eval_tasks: dsl.Input[dsl.Dataset],
    policy: dsl.Input[dsl.Model],
    progress: dsl.Input[dsl.Artifact],
    history: dsl.Input[dsl.Artifact],
    evaluation: dsl.Input[dsl.Artifact],
    metrics: dsl.Input[dsl.Metrics],
    config: dict,
    run_id: str,
) -> str:
    """Record the model, the tasks and round 00 with DVC on the run's own branch.

    Args:
        params: The resolved params.yaml of the run.
        model: The model's Hugging Face folder.
        train_tasks: The tasks to train on.
        eval_tasks: The held-out tasks.
        policy: The start policy.
        progress: Progress of round 00.
        history: History of round 00.
        evaluation: Evaluation of round 00.
        metrics: The run records of `start`.
        config: `kubeflow.snapshot` of params.yaml.
        run_id: Kubeflow's id of the run, which names the branch.

    Returns:
        The commit that was pushed.
    """
    from rlpipe.kubeflow.recording import record_round

    tasks = {"model": model, "train_tasks": train_tasks, "eval_tasks": eval_tasks}
    made = {"policy": policy, "progress": progress, "history": history, "evaluation": evaluation}
    return record_round(config, run_id, 0, params, tasks | made, [metrics], None)


if __name__ == "__main__":
    from kfp import compiler

    compiler.Compiler().compile(snapshot_start, package_path=__file__.replace(".py", ".yaml"))
