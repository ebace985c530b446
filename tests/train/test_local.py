"""Ranks on one machine, for real: they give what one process gives, and they never outlive the step."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlpipe import artifact
from rlpipe.errors import ArtifactError, ConfigError, DeadlineError, EngineError, TrainingError
from rlpipe.policies import causal_lm
from rlpipe.step import Report
from tests.factories import tiny_model, tiny_policy
from tests.reward.test_sandbox import marked
from tests.train.factories import config, group, random_groups
from tests.train.processes import ranks_below, wait_for
from tests.train.test_fit import WEIGHTS, train

ROOT = Path(__file__).parents[2]
MOMENTS = Path("trainer/optimizer.safetensors")
TWO = {"type": "local", "num_processes": 2}
SETTINGS = {"groups_per_step": 2, "micro_batch": 2, "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.1}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policy_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("start") / "policy")


@pytest.fixture
def jobs_below(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the jobs of this test lie."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def assert_close(one: Path, other: Path) -> None:
    for name in (WEIGHTS, MOMENTS):
        first, second = load_file(one / name), load_file(other / name)
        assert first.keys() == second.keys()
        for key in first:
            torch.testing.assert_close(first[key], second[key], rtol=0, atol=1e-5)


def test_two_ranks_give_what_one_gives_and_go_on_from_each_others_state(tmp_path: Path, policy_in: Path) -> None:
    """Case F02: moments of one rank are loaded by two, and those of two by one. The last optimizer step of each round leaves a rank without rows."""
    settings, groups = {**SETTINGS, "kl": {"coefficient": 0.1}}, random_groups(5)
    alone, chain = {}, policy_in
    for name in ("first", "second", "third"):
        alone[name], chain = train(tmp_path, config(**settings), groups, chain, name)
    report, two = train(tmp_path, config(**settings, launcher=TWO), groups, tmp_path / "first", "of-two")
    assert_close(two, tmp_path / "second")
    assert_close(train(tmp_path, config(**settings), groups, two, "of-one-again")[1], tmp_path / "third")
    assert (report.reasons, report.facts, report.outcome) == (alone["second"].reasons, alone["second"].facts, None)
    for name in ("loss", "grad_norm", "entropy", "kl", "clip_fraction", "num_tokens_trained", "optimizer_steps", "policy_version"):
        assert report.numbers[name] == pytest.approx(alone["second"].numbers[name], rel=1e-5, abs=1e-5), name
    assert causal_lm.read_state(two) == causal_lm.read_state(tmp_path / "second") == {"policy_version": 6, "optimizer_steps": 6}


def test_what_one_rank_finds_wrong_is_raised_here_with_its_type(tmp_path: Path, policy_in: Path, jobs_below: Path) -> None:
    bad = [group("fine", ([9, 10, 11, 12, 13], 1.0), ([9, 11, 12, 13], 0.0)), group("bad", ([9], 1.0), ([10], 0.0), logprob=-200.0)]
    with pytest.raises(TrainingError, match=r"the loss is not finite.*optimizer step 1.*groups bad"):
        train(tmp_path, config(launcher=TWO), bad, policy_in)
    assert ranks_below(jobs_below) == {}
    assert list(jobs_below.glob("rlpipe-train-*")) == []


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path, policy_in: Path, jobs_below: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlpipe")

    def kill() -> None:
        wait_for(lambda: "rank=1 num_ranks=2 state=joined" in caplog.text)
        os.kill(ranks_below(jobs_below)[1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(EngineError, match=r"(?s)the training failed.*exit code 1.*rank +: 1.*Signal 9"):
        train(tmp_path, config(launcher=TWO, epochs=20_000), random_groups(3), policy_in)
    killer.join()
    assert ranks_below(jobs_below) == {}


def test_a_training_that_takes_too_long_is_ended(tmp_path: Path, policy_in: Path, jobs_below: Path) -> None:
    with pytest.raises(DeadlineError, match=r"past its time limit; got 4 s; 2 ranks at work"):
        train(tmp_path, config(launcher={**TWO, "timeout_seconds": 4}, epochs=20_000), random_groups(3), policy_in)
    assert ranks_below(jobs_below) == {}


COORDINATOR = """
import sys
from pathlib import Path
from tests.train.factories import config, random_groups
from tests.train.test_fit import train
launcher = {"type": "local", "num_processes": 2, "starter": sys.argv[3]}
train(Path(sys.argv[1]), config(launcher=launcher, epochs=20_000), random_groups(3), Path(sys.argv[2]))
"""


@pytest.mark.parametrize("starter", ["torchrun", pytest.param("deepspeed", marks=pytest.mark.deepspeed)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_do_not_outlive_the_step(tmp_path: Path, policy_in: Path, number: signal.Signals, starter: str) -> None:
    """Case F04."""
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    step = subprocess.Popen([sys.executable, "-c", COORDINATOR, str(tmp_path), str(policy_in), starter], env=environ, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(ranks_below(tmp_path)) == 2)
    step.send_signal(number)
    assert step.wait(60) == (143 if number == signal.SIGTERM else -9)
    if number == signal.SIGTERM:
        assert ranks_below(tmp_path) == {}
        assert list(tmp_path.glob("rlpipe-train-*")) == []
    wait_for(lambda: not marked(tmp_path), seconds=15)  # what started the ranks too: its command names the job


def test_d14_many_ranks_register_one_version(tmp_path: Path) -> None:
    """Case D14: four ranks, and the whole run twice."""
    from mlflow import MlflowClient

    from tests.integration.conftest import run

    launcher = "train.launcher={type: local, num_processes: 4}"
    assert run(tmp_path, "--set", launcher) == 0
    assert run(tmp_path, "--fresh", "--set", launcher) == 0
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    fingerprint = artifact.read_manifest(tmp_path / "rounds/01/policy")["fingerprint"]
    versions = client.search_model_versions("name='rlpipe-policy'")
    assert sorted(version.tags["round"] for version in versions) == ["0", "1"]
    assert [version.tags["sha256"] for version in versions].count(fingerprint) == 1
    assert len([version for version in versions if "champion" in client.get_model_version("rlpipe-policy", version.version).aliases]) == 1


LONG = {**SETTINGS, "micro_batch": 1, "epochs": 7}
"""Three optimizer steps a pass, of up to two micro-batches a rank."""


@pytest.fixture(scope="module")
def three_rounds(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Report]:
    """The policies of three rounds in one torch process, and the second's report; matrices are large enough for ZeRO 3 to part them."""
    folder = tmp_path_factory.mktemp("rounds")
    policy_in = folder / "start"
    tiny_model(policy_in / "modules/policy", intermediate_size=2048)
    artifact.write_json(policy_in / "trainer/state.json", {"policy_version": 0})
    artifact.write_manifest(policy_in)
    policies, reports = [policy_in], []
    for name in ("first", "second", "third"):
        report, policy = train(folder, config(**LONG), random_groups(5), policies[-1], name)
        policies.append(policy)
        reports.append(report)
    return policies[1:], reports[1]


@pytest.mark.deepspeed
@pytest.mark.recipes
@pytest.mark.parametrize(
    ("starter", "zero"), [("torchrun", {"zero_stage": 2, "offload": "optimizer"}), ("deepspeed", {"zero_stage": 3, "offload": "all"})], ids=str
)
def test_deepspeed_ranks_give_what_torch_gives_alone_and_save_whole_state(
    tmp_path: Path, three_rounds: tuple[list[Path], Report], monkeypatch: pytest.MonkeyPatch, starter: str, zero: dict[str, Any]
) -> None:
    """Cases F01 and F02: whole moments of one torch process are loaded in parts, and saved whole; one torch process goes on from them.

    Nothing is compiled: there is no compiler, and no extension afterwards.
    """
    (first, second, third), expected = three_rounds
    extensions = tmp_path / "extensions"
    extensions.mkdir()
    monkeypatch.setenv("PATH", str(extensions))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    backend, launcher = {"type": "deepspeed", "dtype": "float32", **zero}, {**TWO, "starter": starter}
    report, two = train(tmp_path, config(**LONG, backend=backend, launcher=launcher), random_groups(5), first, "of-two")
    assert list(extensions.iterdir()) == []
    assert report.numbers["optimizer_steps"] == 21
    for name in ("loss", "grad_norm", "entropy"):
        assert report.numbers[name] == pytest.approx(expected.numbers[name], rel=1e-4), name
    assert_close(two, second)
    assert_close(train(tmp_path, config(**LONG), random_groups(5), two, "of-one-again")[1], third)


@pytest.fixture
def trained(tmp_path: Path, policy_in: Path) -> Path:
    return train(tmp_path, config(**SETTINGS), random_groups(2), policy_in, "trained")[1]


def test_f02_moments_in_parts_are_refused_before_a_rank_starts(tmp_path: Path, trained: Path) -> None:
    """Case F02: parts of eight ranks, and two that should load them."""
    for rank in range(8):
        (trained / f"trainer/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"in parts.*got 8 parts such as zero_pp_rank_0.*2 ranks.*optimizer_state: reset"):
        train(tmp_path, config(launcher=TWO), random_groups(2), trained)
    report, _ = train(tmp_path, config(optimizer_state="reset"), random_groups(2), trained, "anew")
    assert report.numbers["optimizer_steps"] == 1


def test_f01_moments_that_are_not_whole_are_refused_before_a_rank_starts(tmp_path: Path, trained: Path) -> None:
    """Case F01: a placeholder in place of a tensor."""
    moments = load_file(trained / MOMENTS)
    name = "exp_avg/model.norm.weight"
    save_file({**moments, name: torch.empty(0)}, trained / MOMENTS)
    with pytest.raises(ConfigError, match=r"exp_avg/model.norm.weight of shape \[0\] for a weight of shape \[64\]"):
        train(tmp_path, config(launcher=TWO), random_groups(2), trained)
    (trained / MOMENTS).write_bytes(b"{}")
    with pytest.raises(ArtifactError, match=r"optimizer.safetensors is damaged"):
        train(tmp_path, config(launcher=TWO), random_groups(2), trained, "damaged")
