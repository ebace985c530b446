"""The step `train`: scored trajectories and a policy in, the next policy out."""

from __future__ import annotations

from rlpipe import artifact
from rlpipe.step import In, Out, Report
from rlpipe.train.section import Config


def run(config: Config, *, scored: In, policy_in: In, evaluation_in: In, policy: Out, round_index: int) -> Report:
    """Improve the policy on scored trajectories.

    Without anything to learn from (`scored` empty or stopped, or all advantages zero) the policy goes on byte for byte.

    Raises:
        ConfigError: the config does not fit the model or the data.
        EngineError: the backend is not installed.
        NoSignalError: nothing to learn from and `run.no_signal` is `stop`.
        TrainingError: a loss, gradient or advantage is not finite.
    """
    from rlpipe import dataset
    from rlpipe.train.fit import fit, pass_on

    outcome = artifact.outcome(scored)
    if outcome == "stopped":
        return pass_on(policy_in, policy, outcome, {"num_groups": 0})
    dropped = artifact.read_manifest(scored).get("facts", {}).get("dropped", {})
    groups = dataset.read_groups(scored)
    return fit(config, groups, policy_in=policy_in, evaluation_in=evaluation_in, policy=policy, round_index=round_index, dropped=dropped)
