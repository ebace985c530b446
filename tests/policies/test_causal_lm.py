"""A policy folder: what is written, how it loads, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlpipe import artifact
from rlpipe.errors import ArtifactError, ConfigError
from rlpipe.policies import causal_lm, fitness
from rlpipe.policies.packing import ScoredSequence, collate, pack
from tests.factories import tiny_model


def saved(tmp_path: Path, family: str = "llama", **arguments) -> Path:
    source = tiny_model(tmp_path / "a-folder-of-mine", family)
    causal_lm.save(tmp_path / "policy", causal_lm.load_module(source), source, {"policy_version": 3}, **arguments)
    return tmp_path / "policy"


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_plain_transformers_loads_what_was_saved(tmp_path, family):
    policy = saved(tmp_path, family)
    folder = policy / "modules" / "policy"
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    before = causal_lm.load_module(tmp_path / "a-folder-of-mine")(ids).logits
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert plain.dtype == torch.float32
    torch.testing.assert_close(plain(ids).logits, before)
    assert AutoTokenizer.from_pretrained(folder)("a1").input_ids == causal_lm.load_tokenizer(tmp_path / "a-folder-of-mine")("a1").input_ids
    assert causal_lm.policy_version(policy) == 3


def test_equal_weights_give_equal_bytes_wherever_they_lie(tmp_path):
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    assert artifact.folder_fingerprint(one) == artifact.folder_fingerprint(two)
    for file in artifact.files_of(one):
        assert str(tmp_path).encode() not in file.read_bytes()
        assert b"a-folder-of-mine" not in file.read_bytes()
        assert b"transformers_version" not in file.read_bytes()


def test_saving_what_was_saved_changes_no_byte(tmp_path):
    policy = saved(tmp_path)
    folder = policy / causal_lm.POLICY_MODULE
    causal_lm.save(tmp_path / "again", causal_lm.load_module(folder), folder, {"policy_version": 3})
    assert artifact.folder_fingerprint(tmp_path / "again") == artifact.folder_fingerprint(policy)


def test_tied_weights_are_stored_once(tmp_path):
    assert "lm_head.weight" not in load_file(saved(tmp_path / "tied") / causal_lm.POLICY_MODULE / "model.safetensors")
    assert "lm_head.weight" in load_file(saved(tmp_path / "untied", "qwen2") / causal_lm.POLICY_MODULE / "model.safetensors")


def test_a_narrower_precision_is_used_only_where_it_is_exact(tmp_path):
    source = tiny_model(tmp_path / "model")
    module = causal_lm.load_module(source)
    with torch.no_grad():
        module.model.norm.weight.copy_(module.model.norm.weight.to(torch.bfloat16))
    narrow = {"model.norm.weight": torch.bfloat16, "model.embed_tokens.weight": torch.bfloat16}
    causal_lm.save(tmp_path / "policy", module, source, {"policy_version": 0}, narrow)
    stored = causal_lm.stored_dtypes(tmp_path / "policy" / causal_lm.POLICY_MODULE)
    assert stored["model.norm.weight"] == torch.bfloat16
    assert stored["model.embed_tokens.weight"] == torch.float32


def test_folders_that_are_no_model_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"without config\.json"):
        causal_lm.load_module(tmp_path)
    source = tiny_model(tmp_path / "model")
    (source / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"without tokenizer_config\.json"):
        causal_lm.load_tokenizer(source)
    (source / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no causal language model"):
        causal_lm.load_module(source)


@pytest.mark.parametrize("state", [None, "{", "{}", '{"policy_version": "x"}'])
def test_a_policy_without_readable_state_is_refused(tmp_path, state):
    if state is not None:
        (tmp_path / "trainer").mkdir()
        (tmp_path / "trainer/state.json").write_text(state)
    with pytest.raises(ArtifactError):
        causal_lm.policy_version(tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mistral"])
@pytest.mark.parametrize("shared", [True, False])
def test_evaluation_agrees_with_the_families_own_forward(tmp_path, family, shared):
    fitness.check_evaluation(causal_lm.load_module(tiny_model(tmp_path, family)), shared)


def test_a_family_that_changes_its_logits_is_refused(tmp_path):
    module = causal_lm.load_module(tiny_model(tmp_path))
    module.lm_head.register_forward_hook(lambda part, inputs, output: output)
    forward = module.forward

    def softened(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = 5 * torch.tanh(output.logits / 5)
        return output

    module.forward = softened
    with pytest.raises(ConfigError, match="model family llama cannot be evaluated"):
        fitness.check_evaluation(module, shared=False)


def test_packed_rows_past_a_sliding_window_are_refused(tmp_path):
    module = causal_lm.load_module(tiny_model(tmp_path, "mistral"))
    fitness.check_window(module, 8, shared=True)
    fitness.check_window(module, 9, shared=False)
    with pytest.raises(ConfigError, match="packing: none"):
        fitness.check_window(module, 9, shared=True)
    with pytest.raises(ConfigError, match="at most 128"):
        fitness.check_window(module, 129, shared=False)


def test_entropy_and_hidden_states_on_request(tmp_path):
    module = causal_lm.load_module(tiny_model(tmp_path))
    ids = np.array([1, 2, 3, 4])
    batch = collate(pack([ScoredSequence(ids, np.array([False, True, True, True]), np.full(4, 0.5))], 10))
    with torch.no_grad():
        got = causal_lm.evaluate(module, batch, ("logprobs", "entropy", "hidden"))
        output = module(torch.from_numpy(ids)[None], output_hidden_states=True)
    logprobs = torch.log_softmax(output.logits[0, :-1] / 0.5, -1)
    torch.testing.assert_close(got.logprobs, logprobs.gather(-1, torch.from_numpy(ids[1:, None]))[:, 0])
    torch.testing.assert_close(got.entropy, -(logprobs.exp() * logprobs).sum(-1))
    torch.testing.assert_close(got.hidden, output.hidden_states[-1][0, :-1])
    assert causal_lm.evaluate(module, batch).entropy is None


def test_configs_hold_no_path_of_the_source(tmp_path):
    source = tiny_model(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "_name_or_path": "/home/me/model"}))
    causal_lm.save(tmp_path / "policy", causal_lm.load_module(source), source, {"policy_version": 0})
    assert "/home/me" not in (tmp_path / "policy" / causal_lm.POLICY_MODULE / "config.json").read_text()
