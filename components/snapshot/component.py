"""Component `snapshot`."""

from kfp import dsl


@dsl.component(base_image="ghcr.io/rlpipe/snapshot:0.1.0", install_kfp_package=False)
def snapshot(
    params: dsl.Input[dsl.Artifact],
    trajectories: dsl.Input[dsl.Dataset],
    progress: dsl.Input[dsl.Artifact],
    kept: dsl.Input[dsl.Dataset],
    scored: dsl.Input[dsl.Dataset],
    history: dsl.Input[dsl.Artifact],
    policy: dsl.Input[dsl.Model],
    evaluation: dsl.Input[dsl.Artifact],
    rollout_metrics: dsl.Input[dsl.Metrics],
    filter_metrics: dsl.Input[dsl.Metrics],
    reward_metrics: dsl.Input[dsl.Metrics],
    train_metrics: dsl.Input[dsl.Metrics],
    evaluate_metrics: dsl.Input[dsl.Metrics],
    config: dict,
    run_id: str,
    round_index: int,
    expect: str,
) -> str:
    """Record a round's artifacts with DVC on the run's own branch.

    Args:
        params: The resolved params.yaml of the run.
        trajectories: The trajectory dataset.
        progress: Progress after the round.
        kept: The trajectories that should be scored.
        scored: The scored groups.
        history: History after the round.
        policy: The policy of the round.
        evaluation: Its evaluation.
        rollout_metrics: The run record of `rollout`.
        filter_metrics: The run record of `filter`.
        reward_metrics: The run record of `reward`.
        train_metrics: The run record of `train`.
        evaluate_metrics: The run record of `evaluate`.
        config: `kubeflow.snapshot` of params.yaml.
        run_id: Kubeflow's id of the run, which names the branch.
        round_index: The round, from 1.
        expect: The commit of the snapshot before.

    Returns:
        The commit that was pushed.
    """
    from rlpipe.kubeflow.recording import record_round

    made = {"trajectories": trajectories, "progress": progress, "kept": kept, "scored": scored}
    made |= {"history": history, "policy": policy, "evaluation": evaluation}
    metrics = [rollout_metrics, filter_metrics, reward_metrics, train_metrics, evaluate_metrics]
    return record_round(config, run_id, round_index, params, made, metrics, expect)


if __name__ == "__main__":
    from kfp import compiler

    compiler.Compiler().compile(snapshot, package_path=__file__.replace(".py", ".yaml"))
