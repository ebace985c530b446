"""The step `train`: scored trajectories and a policy in, the next policy out."""

from __future__ import annotations

from rlpipe import artifact
from rlpipe.step import In, Out, Report
from rlpipe.train.job import Job
from rlpipe.train.lineage import check_moments
from rlpipe.train.section import Config


def run(config: Config, *, scored: In, policy_in: In, evaluation_in: In, policy: Out, round_index: int) -> Report:
    """Improve the policy on scored trajectories.

    Without anything to learn from (`scored` empty or stopped, or all advantages zero) the policy goes on byte for byte.

    Raises:
        ClusterError: with `launcher` trainjob, the cluster refused or cannot be reached.
        ConfigError: the config does not fit the model or the data.
        DeadlineError: the ranks of a launcher took longer than it allows.
        EngineError: the backend is not installed, or a rank died.
        NoSignalError: nothing to learn from and `run.no_signal` is `stop`.
        TrainingError: a loss, gradient or advantage is not finite.
    """
    outcome = artifact.outcome(scored)
    if outcome == "stopped":
        from rlpipe.train.fit import pass_on

        return pass_on(policy_in, policy, outcome, {"num_groups": 0})
    if config.optimizer_state == "keep":
        check_moments(policy_in, config.launcher.num_ranks)
    return config.launcher.run(Job(config, scored, policy_in, evaluation_in, policy, round_index))
