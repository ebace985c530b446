"""Component `start_from`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/rlpipe/start:0.1.0", install_kfp_package=False)
def start_from(
    champion: dsl.Input[dsl.Model],
    train_tasks: dsl.Output[dsl.Dataset],
    eval_tasks: dsl.Output[dsl.Dataset],
    policy: dsl.Output[dsl.Model],
    progress: dsl.Output[dsl.Artifact],
    history: dsl.Output[dsl.Artifact],
    evaluation: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
    config: dict,
    tasks_config: dict,
    tracking: dict,
    params_key: str,
    run_id: str,
) -> str:
    """Make new tasks, and round 00 from a champion of an earlier run, measured on them.

    Args:
        champion: A policy of an earlier run.
        train_tasks: The tasks to train on.
        eval_tasks: The held-out tasks.
        policy: The champion as start policy, version 0.
        progress: An empty progress.
        history: An empty history.
        evaluation: What the champion can do on the new tasks.
        metrics: The step's numbers; its file holds the run records.
        report: A page with what was measured.
        config: Section `evaluate` of params.yaml, filled, or a reference to it.
        tasks_config: Section `tasks` of params.yaml.
        tracking: Section `tracking` of params.yaml.
        params_key: What `preflight` returned.
        run_id: Kubeflow's id of the run.

    Returns:
        The key of the run: a hash of its params, start policy and tasks.
    """
    from rlpipe.kubeflow.starting import Start

    outputs = {"train_tasks": train_tasks, "eval_tasks": eval_tasks, "policy": policy, "progress": progress, "history": history, "evaluation": evaluation}
    return Start(config, tasks_config, tracking, params_key, run_id).with_champion(champion, outputs, metrics, report)


if __name__ == "__main__":
    from kfp import compiler

    compiler.Compiler().compile(start_from, package_path=__file__.replace(".py", ".yaml"))
