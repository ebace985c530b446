"""LoRA adapters: the base never changes, one adapter goes on from round to round, and whoever loads the policy gets it with the adapter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlpipe import artifact
from rlpipe.engines import Torch
from rlpipe.errors import ConfigError, EngineError
from rlpipe.policies import adapters, causal_lm
from rlpipe.train.section import Config
from rlpipe.train.trainable import Lora, load_trainable
from tests.factories import tiny_model, tiny_policy
from tests.train.factories import config, evaluation_artifact, random_groups
from tests.train.test_fit import WEIGHTS, contents, train

pytest.importorskip("peft")
MOMENTS = Path("trainer/optimizer.safetensors")
LINEAR = re.compile(r"(_proj|\.c_attn|\.c_fc)\.weight$")
APART, MERGED = Path("modules/policy/adapter"), Path("modules/base/adapter")
IDS = [np.array([5, 6, 7, 8, 9, 10, 11, 12], dtype=np.int32), np.array([3, 1, 4, 1, 5], dtype=np.int32)]


@pytest.fixture(scope="module")
def policy_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("start") / "policy")


def lora(serve: str = "apart", **changes: Any) -> Config:
    trainable = {"type": "lora", "rank": 4, "alpha": 8, "serve": serve, **changes.pop("trainable", {})}
    return config(**{"groups_per_step": 3, "learning_rate": 1e-2, "trainable": trainable, **changes})


def scores(module: Any) -> list[np.ndarray]:
    """Log-probs of `IDS` by the module's own forward, NaN at 0."""
    found = []
    for ids in IDS:
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(module(tokens, use_cache=False).logits[0, :-1].float(), dim=-1).gather(-1, tokens[0, 1:, None])[:, 0]
        found.append(np.concatenate([[np.nan], logprobs.numpy()]).astype(np.float32))
    return found


def gap(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return max(float(np.nanmax(np.abs(a - b))) for a, b in zip(one, other, strict=True))


def trained(policy: Path, serve: str = "apart") -> Any:
    """The module as the trainer has it, adapter beside the weights."""
    return load_trainable(policy / ("modules/base" if serve == "merged" else "modules/policy"), Lora(rank=4, alpha=8), seed=0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("serve", ["apart", "merged"])
def test_the_engine_has_the_trainers_logprobs(tmp_path: Path, family: str, serve: str) -> None:
    start = tiny_policy(tmp_path / "start", family)
    _, policy = train(tmp_path, lora(serve), random_groups(3), start)
    module = trained(policy, serve)
    with Torch(dtype="float32").open(policy, threads=1) as engine:
        assert gap(engine.logprobs(IDS), scores(module)) < 1e-4
    assert gap(scores(module), scores(causal_lm.load_module(start / "modules/policy"))) > 1e-2
    assert load_file(policy / WEIGHTS).keys() == load_file(start / WEIGHTS).keys()
    body = {name.rpartition(".")[0] for name in dict(causal_lm.load_module(start / "modules/policy").named_parameters()) if LINEAR.search(name)}
    assert {name for name, _ in adapters.layers(module)} == body


def test_the_base_never_changes_and_both_ways_to_serve_train_alike(tmp_path: Path, policy_in: Path) -> None:
    groups = random_groups(3)
    apart, merged = (train(tmp_path, lora(serve), groups, policy_in, serve)[1] for serve in ("apart", "merged"))
    start, one, other = contents(policy_in), contents(apart), contents(merged)
    assert one[WEIGHTS.as_posix()] == other["modules/base/model.safetensors"] == start[WEIGHTS.as_posix()]
    for name in (adapters.CONFIG, adapters.WEIGHTS):
        assert one[(APART / name).as_posix()] == other[(MERGED / name).as_posix()]
    assert one[MOMENTS.as_posix()] == other[MOMENTS.as_posix()]
    plain, added = load_file(merged / WEIGHTS), dict(causal_lm.load_module(apart / "modules/policy").named_parameters())
    assert plain.keys() == added.keys()
    assert all(torch.equal(plain[name], added[name]) for name in plain)
    assert sum(value.numel() for value in load_file(apart / MOMENTS).values()) == 2 * sum(
        v.numel() for v in load_file(apart / APART / adapters.WEIGHTS).values()
    )


@pytest.mark.parametrize("serve", ["apart", "merged"])
def test_a_round_goes_on_exactly_from_the_last_ones_adapter(tmp_path: Path, policy_in: Path, serve: str) -> None:
    groups = random_groups(3)
    whole = train(tmp_path, lora(serve, epochs=2), groups, policy_in, "whole")[1]
    half = train(tmp_path, lora(serve), groups, policy_in, "half")[1]
    before = contents(half)
    resumed = train(tmp_path, lora(serve), groups, half, "resumed")[1]
    assert contents(half) == before  # files are shared between rounds by hard links
    assert contents(resumed) == contents(whole)
    no_signal = train(tmp_path, lora(serve), [], half, "none")[1]
    assert contents(no_signal) == before


def test_the_seed_decides_the_first_weights_and_nothing_else_does(tmp_path: Path, policy_in: Path) -> None:
    groups = random_groups(2)
    torch.manual_seed(1)
    one = train(tmp_path, lora(), groups, policy_in, "one")[1]
    torch.manual_seed(2)
    same = train(tmp_path, lora(), groups, policy_in, "same")[1]
    other = train(tmp_path, lora(run={"seed": 1}), groups, policy_in, "other")[1]
    assert contents(one) == contents(same)
    assert contents(one)[(APART / adapters.WEIGHTS).as_posix()] != contents(other)[(APART / adapters.WEIGHTS).as_posix()]


def test_what_is_written_is_peft_s_own_form_without_paths_and_versions(tmp_path: Path, policy_in: Path) -> None:
    from peft import PeftModel

    policy = train(tmp_path, lora(trainable={"targets": ["v_proj", "q_proj"]}), random_groups(2), policy_in)[1]
    kept = json.loads((policy / APART / adapters.CONFIG).read_text())
    assert (kept["r"], kept["lora_alpha"], kept["target_modules"], kept["base_model_name_or_path"]) == (4, 8, ["q_proj", "v_proj"], None)
    assert "peft_version" not in kept
    assert len(load_file(policy / APART / adapters.WEIGHTS)) == 2 * 2 * 2  # two layers, two targets, two factors
    own = PeftModel.from_pretrained(causal_lm.load_module(policy / "modules/policy", adapter=False), policy / APART)
    assert gap(scores(own), scores(causal_lm.load_module(policy / "modules/policy"))) < 1e-4


def test_frozen_weights_keep_their_precision(tmp_path: Path, policy_in: Path) -> None:
    start = tmp_path / "start"
    causal_lm.save(start, causal_lm.load_module(policy_in / "modules/policy").to(torch.bfloat16), policy_in / "modules/policy", {"policy_version": 0})
    artifact.write_manifest(start)
    for serve, place in (("apart", WEIGHTS), ("merged", Path("modules/base/model.safetensors"))):
        policy = train(tmp_path, lora(serve, backend={"type": "torch", "dtype": "bfloat16"}), random_groups(3), start, serve)[1]
        assert artifact.sha256(policy / place) == artifact.sha256(start / WEIGHTS)
    kinds = {name: value.dtype for name, value in load_file(tmp_path / "merged" / WEIGHTS).items()}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == {name for name in kinds if "_proj" in name}


def test_all_weights_can_be_trained_after_an_adapter_was(tmp_path: Path, policy_in: Path) -> None:
    for serve in ("apart", "merged"):
        adapted = train(tmp_path, lora(serve), random_groups(2), policy_in, serve)[1]
        settings = config(optimizer_state="reset", learning_rate=1e-9)
        report, policy = train(tmp_path, settings, random_groups(2), adapted, f"{serve}-all")
        assert report.numbers["policy_version"] == 2
        assert not (policy / APART).exists()
        assert not (policy / "modules/base").exists()
        assert gap(scores(causal_lm.load_module(policy / "modules/policy")), scores(trained(adapted, serve))) < 1e-4


@pytest.mark.parametrize("serve", ["apart", "merged"])
def test_training_goes_back_to_the_champions_adapter(tmp_path: Path, policy_in: Path, serve: str) -> None:
    settings = lora(serve, start_from="champion")
    start = evaluation_artifact(tmp_path / "e0", champion=0)
    one = train(tmp_path, settings, random_groups(2), policy_in, "one", evaluation=start)[1]
    two = train(tmp_path, settings, random_groups(2, seed=1), one, "two", evaluation=evaluation_artifact(tmp_path / "e1", champion=1))[1]
    adapter = (MERGED if serve == "merged" else APART) / adapters.WEIGHTS
    assert artifact.sha256(two / "modules/champion/adapter" / adapters.WEIGHTS) == artifact.sha256(one / adapter)
    held = train(tmp_path, settings, random_groups(2), two, "held", evaluation=evaluation_artifact(tmp_path / "e2", champion=1))[1]
    assert artifact.sha256(held / "modules/champion/adapter" / adapters.WEIGHTS) == artifact.sha256(one / adapter)


def test_the_kl_is_to_the_start_without_adapter(tmp_path: Path, policy_in: Path) -> None:
    settings = lora(kl={"coefficient": 0.1})
    one = train(tmp_path, settings, random_groups(2), policy_in, "one")[1]
    report, two = train(tmp_path, settings, random_groups(2), one, "two", round_index=2)
    assert report.numbers["kl"] > 1e-4
    assert not (two / "modules/reference/adapter").exists()


def test_another_rank_is_refused_and_named(tmp_path: Path, policy_in: Path) -> None:
    policy = train(tmp_path, lora(), random_groups(2), policy_in)[1]
    with pytest.raises(ConfigError, match=r"train.trainable.rank is not that of the policy's adapter; got 8; accepted: 4; do: "):
        train(tmp_path, lora(trainable={"rank": 8}), random_groups(2), policy, "other")


def test_a_target_that_is_no_linear_layer_is_refused(tmp_path: Path, policy_in: Path) -> None:
    with pytest.raises(ConfigError, match=r"names no linear layer of the model; got query; accepted: down_proj, gate_proj, k_proj"):
        train(tmp_path, lora(trainable={"targets": ["query"]}), random_groups(2), policy_in)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path, policy_in: Path) -> None:
    policy = train(tmp_path, lora(), random_groups(2), policy_in)[1]
    larger = tiny_model(tmp_path / "larger", intermediate_size=256)
    adapters.carry(policy / "modules/policy", larger)
    with pytest.raises(ConfigError, match="belongs to another model"):
        causal_lm.load_module(larger)


def test_without_peft_only_adapters_are_refused(tmp_path: Path, policy_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case F11 for peft."""
    adapted = train(tmp_path, lora(), random_groups(2), policy_in)[1]
    monkeypatch.setitem(sys.modules, "peft", None)
    assert train(tmp_path, config(), random_groups(2), policy_in, "plain")[0].outcome is None
    for wrong in (lambda: train(tmp_path, lora(), random_groups(2), policy_in, "new"), lambda: causal_lm.load_module(adapted / "modules/policy")):
        with pytest.raises(EngineError, match=r"^LoRA adapters cannot be used; got ModuleNotFoundError: .*; do: pip install 'rlpipe\[lora\]'.*$"):
            wrong()


def test_nothing_imports_peft_before_an_adapter_is_there() -> None:
    loaded = "import sys, rlpipe.train.fit, rlpipe.policies.adapters, torch; print('peft' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout.strip() == "False"


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("serve", ["apart", "merged"])
def test_deepspeed_trains_the_adapter_as_torch_does(tmp_path: Path, policy_in: Path, serve: str) -> None:
    groups, zero = random_groups(3), {"type": "deepspeed", "dtype": "float32", "zero_stage": 1}
    one = train(tmp_path, lora(serve), groups, policy_in, "one")[1]
    other = train(tmp_path, lora(serve, backend=zero), groups, one, "of-zero")[1]
    same = train(tmp_path, lora(serve), groups, one, "of-torch")[1]
    for name in (WEIGHTS, MOMENTS, (APART if serve == "apart" else MERGED) / adapters.WEIGHTS):
        first, second = load_file(other / name), load_file(same / name)
        assert first.keys() == second.keys()
        for key in first:
            torch.testing.assert_close(first[key], second[key], rtol=0, atol=1e-4)
