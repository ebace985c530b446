"""Component `preflight`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/rlpipe/preflight:0.1.0", install_kfp_package=False)
def preflight(
    params: dsl.Output[dsl.Artifact],
    summary: dsl.Output[dsl.Markdown],
    model: dict,
    tasks: dict,
    start: dict,
    rollout: dict,
    filter: dict,
    reward: dict,
    train: dict,
    evaluate: dict,
    tracking: dict,
    kubeflow: dict,
    num_rounds: int,
) -> str:
    """Check that everything the run needs is there, before anything costs time.

    The params are validated together, endpoints must answer, secrets must exist, the model must be reachable, and there must be space.

    Args:
        params: The resolved params.yaml of the run.
        summary: What was checked and found.
        model: Section `model` of params.yaml.
        tasks: Section `tasks` of params.yaml.
        start: Section `evaluate` of params.yaml as `start` uses it.
        rollout: Section `rollout` of params.yaml.
        filter: Section `filter` of params.yaml.
        reward: Section `reward` of params.yaml.
        train: Section `train` of params.yaml.
        evaluate: Section `evaluate` of params.yaml.
        tracking: Section `tracking` of params.yaml.
        kubeflow: Section `kubeflow` of params.yaml.
        num_rounds: The number of rounds this pipeline was compiled for.

    Returns:
        The sha256 of the resolved params.
    """
    from rlpipe.kubeflow.gates import preflight as check

    sections = {"model": model, "tasks": tasks, "start": start, "rollout": rollout, "filter": filter, "reward": reward, "train": train}
    return check(sections | {"evaluate": evaluate, "tracking": tracking, "kubeflow": kubeflow}, num_rounds, params, summary)


if __name__ == "__main__":
    from kfp import compiler

    compiler.Compiler().compile(preflight, package_path=__file__.replace(".py", ".yaml"))
