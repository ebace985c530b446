"""The step over folders: what it writes, passes on, refuses and reports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlpipe import artifact
from rlpipe.errors import ArtifactError, ConfigError, NoSignalError, TrainingError
from rlpipe.policies import causal_lm
from rlpipe.policies.packing import collate, pack
from rlpipe.train.batching import sequence_of
from rlpipe.train.step import Config, run
from rlpipe.trajectory import Group
from tests.factories import tiny_policy
from tests.train.factories import attempt, config, evaluation_artifact, group, random_groups, scored_dataset

WEIGHTS = Path("modules/policy/model.safetensors")


@pytest.fixture(scope="module")
def policy_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("start") / "policy")


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    return evaluation_artifact(tmp_path / "evaluation")


def train(
    tmp_path: Path,
    settings: Config,
    groups: list[Group],
    policy_in: Path,
    name: str = "policy",
    round_index: int = 1,
    evaluation: Path | None = None,
    **artifacts,
):
    scored = scored_dataset(tmp_path / f"scored-{name}", groups, **artifacts)
    policy = tmp_path / name
    policy.mkdir()
    report = run(
        settings,
        scored=scored,
        policy_in=policy_in,
        evaluation_in=evaluation or evaluation_artifact(tmp_path / f"evaluation-{name}"),
        policy=policy,
        round_index=round_index,
    )
    artifact.write_manifest(policy, outcome=report.outcome)
    return report, policy


def contents(folder: Path) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): artifact.sha256(file) for file in artifact.files_of(folder)}


def sampled_by(policy_in: Path, groups: list[Group]) -> list[Group]:
    """The groups with the log-probs that the policy really gives their tokens."""
    module = causal_lm.load_module(policy_in / causal_lm.POLICY_MODULE)
    for row in (row for each in groups for row in each):
        with torch.no_grad():
            row.logprobs[row.mask] = causal_lm.evaluate(module, collate(pack([sequence_of(row)], 1000))).logprobs.numpy()
    return groups


def test_a_round_steps_the_version_and_reports(tmp_path, policy_in):
    groups = sampled_by(policy_in, random_groups(5, temperatures=(0.7, 1.3)))
    report, policy = train(tmp_path, config(groups_per_step=2, learning_rate=1e-3), groups, policy_in)
    numbers = report.numbers
    assert report.outcome is None
    assert numbers["optimizer_steps"] == 3
    assert numbers["policy_version"] == causal_lm.policy_version(policy) == 3
    assert numbers["num_groups"] == numbers["num_groups_with_signal"] == 5
    assert numbers["num_tokens_trained"] == sum(row.num_sampled_tokens for each in groups for row in each)
    assert 0 <= numbers["logprob_gap_p95"] <= numbers["logprob_gap_max"] < 1e-5
    assert numbers["kl"] is None
    for name in ("loss", "approx_kl", "clip_fraction", "entropy", "grad_norm", "seconds_per_optimizer_step"):
        assert np.isfinite(numbers[name])
    assert contents(policy)[WEIGHTS.as_posix()] != contents(policy_in)[WEIGHTS.as_posix()]


def test_the_ratio_at_the_first_step_is_one(tmp_path, policy_in):
    report, _ = train(tmp_path, config(groups_per_step=5), sampled_by(policy_in, random_groups(5, temperatures=(0.5, 2.0))), policy_in)
    assert report.numbers["approx_kl"] < 1e-9
    assert report.numbers["clip_fraction"] == 0


def test_the_gap_is_unknown_for_tokens_of_another_version(tmp_path, policy_in):
    groups = [
        Group(each.group_id, tuple(replace(row, spans=tuple(replace(span, policy_version=7) for span in row.spans)) for row in each))
        for each in random_groups(3)
    ]
    report, _ = train(tmp_path, config(), groups, policy_in)
    assert report.numbers["logprob_gap_max"] is None


def test_equal_input_gives_equal_bytes(tmp_path, policy_in):
    first = train(tmp_path, config(groups_per_step=2), random_groups(4), policy_in, "first")[1]
    second = train(tmp_path, config(groups_per_step=2), random_groups(4)[::-1], policy_in, "second")[1]
    assert contents(first) == contents(second)


def test_unscored_attempts_change_nothing(tmp_path, policy_in):
    scored = [group("g", ([9, 10], 1.0), ([9, 11], 1.0), ([12], 0.0))]
    more = [Group("g", (*scored[0].trajectories, attempt([13, 14, 15], None, index=3)))]
    first = train(tmp_path, config(), scored, policy_in, "first")[1]
    report, second = train(tmp_path, config(), more, policy_in, "second")
    assert contents(first) == contents(second)
    assert report.reasons["unscored"] == 1


def test_groups_without_spread_change_nothing(tmp_path, policy_in):
    useful = group("g", ([9, 10], 1.0), ([9, 11], 0.0))
    first = train(tmp_path, config(), [useful], policy_in, "first")[1]
    report, second = train(tmp_path, config(), [useful, group("h", ([9, 10], 1.0), ([9, 11], 1.0))], policy_in, "second")
    assert contents(first) == contents(second)
    assert report.reasons["zero_advantage"] == 1


@pytest.mark.parametrize("groups", [[], [group("g", ([9], 1.0), ([10], 1.0))], [group("g", ([9], None), ([10], None))]])
def test_no_signal_passes_the_policy_on_byte_for_byte(tmp_path, policy_in, groups):
    report, policy = train(tmp_path, config(), groups, policy_in)
    assert report.outcome == "no_signal"
    assert contents(policy) == contents(policy_in)
    assert report.numbers["optimizer_steps"] == 0
    assert report.numbers["policy_version"] == 0
    if groups:
        assert report.numbers["completion_tokens_min"] == 1


def test_a18_all_attempts_masked_is_no_signal_with_their_true_lengths(tmp_path, policy_in):
    masked = [
        Group(
            "g", tuple(replace(row, spans=tuple(replace(span, trained=False) for span in row.spans)) for row in group("g", ([9, 10, 11], 1.0), ([9, 10], 0.0)))
        )
    ]
    report, policy = train(tmp_path, config(), masked, policy_in)
    assert (report.outcome, report.reasons["no_trained_tokens"], report.numbers["completion_tokens_min"]) == ("no_signal", 2, 2)
    assert contents(policy) == contents(policy_in)


def test_no_signal_can_stop_the_run(tmp_path, policy_in):
    with pytest.raises(NoSignalError, match="no group can teach"):
        train(tmp_path, config(run={"no_signal": "stop"}), [], policy_in)


def test_a_stopped_round_passes_the_policy_on(tmp_path, policy_in):
    report, policy = train(tmp_path, config(run={"no_signal": "stop"}), [], policy_in, outcome="stopped")
    assert report.outcome == "stopped"
    assert contents(policy) == contents(policy_in)


def test_a_smaller_last_step_is_dropped_on_request_and_counted(tmp_path, policy_in):
    report, _ = train(tmp_path, config(groups_per_step=4, drop_last=True), random_groups(5), policy_in)
    assert report.numbers["optimizer_steps"] == 1
    assert report.facts["num_groups_dropped"] == 1
    alone, _ = train(tmp_path, config(groups_per_step=8, drop_last=True), random_groups(5), policy_in, "alone")
    assert (alone.outcome, alone.numbers["num_groups_dropped"]) == ("no_signal", 5)


def test_kept_optimizer_state_goes_on_exactly(tmp_path, policy_in):
    groups = random_groups(3)
    settings = config(groups_per_step=3, learning_rate=1e-3, epochs=2, run={"seed": 5})
    whole = train(tmp_path, settings, groups, policy_in, "whole")[1]
    once = config(groups_per_step=3, learning_rate=1e-3, run={"seed": 5})
    half = train(tmp_path, once, groups, policy_in, "half")[1]
    assert json.loads((half / "trainer/state.json").read_text()) == {"optimizer_steps": 1, "policy_version": 1}
    resumed = train(tmp_path, once, groups, half, "resumed")[1]
    for name in (WEIGHTS, "trainer/optimizer.safetensors"):
        first, second = load_file(whole / name), load_file(resumed / name)
        assert all(torch.equal(first[key], second[key]) for key in first)
    anew = train(tmp_path, config(groups_per_step=3, learning_rate=1e-3, optimizer_state="reset"), groups, half, "anew")[1]
    assert not (anew / "trainer/optimizer.safetensors").exists()
    assert contents(anew)[WEIGHTS.as_posix()] != contents(resumed)[WEIGHTS.as_posix()]


def test_kept_state_of_other_layers_is_refused(tmp_path, policy_in):
    half = train(tmp_path, config(), random_groups(2), policy_in, "half")[1]
    with pytest.raises(ConfigError, match="optimizer_state"):
        train(tmp_path, config(trainable={"type": "last_layers", "num": 1}), random_groups(2), half)


def test_frozen_layers_keep_their_bytes_and_precision(tmp_path, policy_in):
    start = tmp_path / "start"
    shutil.copytree(policy_in, start)
    module = causal_lm.load_module(start / causal_lm.POLICY_MODULE).to(torch.bfloat16)
    causal_lm.save(start, module, start / causal_lm.POLICY_MODULE, {"policy_version": 0})
    artifact.write_manifest(start)
    settings = config(backend={"type": "torch", "dtype": "bfloat16"}, trainable={"type": "last_layers", "num": 1})
    for name, each in (("mixed", settings), ("single", config(trainable={"type": "last_layers", "num": 1}))):
        _, policy = train(tmp_path, each, random_groups(2), start, name)
        before, after = load_file(start / WEIGHTS), load_file(policy / WEIGHTS)
        trained = {key for key in after if after[key].dtype == torch.float32}
        assert trained == {key for key in after if ".layers.1." in key} | {"model.norm.weight"}
        assert all(torch.equal(before[key], after[key]) for key in after.keys() - trained)
        assert json.loads((policy / "modules/policy/config.json").read_text())["dtype"] == "float32"


def test_embeddings_can_stay_frozen(tmp_path, policy_in):
    _, policy = train(tmp_path, config(trainable={"type": "all", "embeddings": False}), random_groups(2), policy_in)
    before, after = load_file(policy_in / WEIGHTS), load_file(policy / WEIGHTS)
    assert [key for key in after if torch.equal(before[key], after[key])] == ["model.embed_tokens.weight"]


def test_more_layers_than_there_are_is_refused(tmp_path, policy_in):
    with pytest.raises(ConfigError, match="accepted: 1 to 2"):
        train(tmp_path, config(trainable={"type": "last_layers", "num": 3}), random_groups(2), policy_in)


def test_an_infinite_loss_stops_naming_step_and_groups(tmp_path, policy_in):
    with pytest.raises(TrainingError, match=r"the loss is not finite.*optimizer step 1.*groups bad"):
        train(tmp_path, config(), [group("bad", ([9], 1.0), ([10], 0.0), logprob=-200.0)], policy_in)


def test_a_trajectory_longer_than_the_model_is_refused(tmp_path, policy_in):
    with pytest.raises(ConfigError, match="longer than the model"):
        train(tmp_path, config(), [group("g", ([9] * 130, 1.0), ([10], 0.0))], policy_in)


def test_kl_to_the_start_policy_is_kept_over_rounds(tmp_path, policy_in):
    settings = config(kl={"coefficient": 0.5, "estimator": "k3"}, learning_rate=1e-2)
    groups = sampled_by(policy_in, random_groups(2))
    first, one = train(tmp_path, settings, groups, policy_in, "one")
    assert first.numbers["kl"] == pytest.approx(0, abs=1e-9)
    second, two = train(tmp_path, settings, groups, one, "two", round_index=2)
    assert second.numbers["kl"] > 1e-4
    start = artifact.sha256(policy_in / WEIGHTS)
    assert artifact.sha256(one / "modules/reference/model.safetensors") == artifact.sha256(two / "modules/reference/model.safetensors") == start
    without = train(tmp_path, config(), groups, policy_in, "without")[1]
    with pytest.raises(ArtifactError, match="does not hold the start policy"):
        train(tmp_path, settings, groups, without, "late")


def test_kl_in_the_reward_changes_what_is_learned(tmp_path, policy_in):
    groups = sampled_by(policy_in, random_groups(2))
    one = train(tmp_path, config(learning_rate=1e-2, kl={"coefficient": 0.1}), groups, policy_in, "one")[1]
    groups = sampled_by(one, groups)
    weights = [
        contents(train(tmp_path, config(kl=kl, groups_per_step=1), groups, one, name)[1])[WEIGHTS.as_posix()]
        for name, kl in (
            ("none", None),
            ("reward", {"coefficient": 0.5, "estimator": "k1", "placement": "reward"}),
            ("incoming", {"coefficient": 0.5, "reference": "incoming"}),
        )
    ]
    assert len(set(weights)) == 3


def test_training_goes_back_to_the_champion_while_the_challenger_is_held(tmp_path, policy_in):
    settings = config(start_from="champion", learning_rate=1e-3)
    _, one = train(tmp_path, settings, random_groups(2), policy_in, "one", evaluation=evaluation_artifact(tmp_path / "e0", champion=0))
    start = artifact.sha256(policy_in / WEIGHTS)
    assert artifact.sha256(one / "modules/champion/model.safetensors") == start
    report, held = train(tmp_path, settings, random_groups(2), one, "held", evaluation=evaluation_artifact(tmp_path / "e1", champion=0))
    assert artifact.sha256(held / "modules/champion/model.safetensors") == start
    assert (report.numbers["policy_version"], causal_lm.read_state(held)["champion_version"]) == (2, 0)
    assert report.numbers["logprob_gap_max"] is None
    assert load_file(held / WEIGHTS).keys() == load_file(one / WEIGHTS).keys()
    _, promoted = train(tmp_path, settings, random_groups(2), one, "promoted", evaluation=evaluation_artifact(tmp_path / "e2", champion=1))
    assert artifact.sha256(promoted / "modules/champion/model.safetensors") == artifact.sha256(one / WEIGHTS)
    with pytest.raises(ArtifactError, match="not in the policy folder"):
        train(tmp_path, settings, random_groups(2), one, "lost", evaluation=evaluation_artifact(tmp_path / "e3", champion=9))


def test_the_step_module_imports_without_torch():
    loaded = "import sys, rlpipe.train.step; print(sorted({'torch', 'transformers', 'pyarrow', 'deepspeed', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout.strip() == "[]"
