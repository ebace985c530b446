"""The start step: round 00 out of a model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpipe import artifact, tasks
from rlpipe.engines import Torch
from rlpipe.errors import CheckError, ConfigError
from rlpipe.params import Run
from rlpipe.policies import causal_lm
from rlpipe.reward import history
from rlpipe.start import Config, run
from rlpipe.step import Report
from rlpipe.tasks import Task
from tests.factories import tiny_model

CONFIG = Config(run=Run(threads=1), engine=Torch(dtype="float32"), num_attempts=0, max_new_tokens=4)
OUTPUTS = ("policy", "progress", "history", "evaluation")


def begin(root: Path, model: Path, eval_prompt: str = "max(1, 2) =") -> Report:
    tasks.save(root / "train.jsonl", [Task(task_id="train-0", prompt="max(3, 4) =", reference="4")])
    tasks.save(root / "eval.jsonl", [Task(task_id="eval-0", prompt=eval_prompt, reference="2")])
    for name in OUTPUTS:
        (root / name).mkdir(parents=True)
    outputs = {name: root / name for name in OUTPUTS}
    return run(CONFIG, model=model, train_tasks=root / "train.jsonl", eval_tasks=root / "eval.jsonl", round_index=0, **outputs)


def test_round_zero_is_whole_and_names_the_start_policy_as_champion(tmp_path: Path) -> None:
    report = begin(tmp_path / "run", tiny_model(tmp_path / "model"))
    policy = tmp_path / "run" / "policy"
    assert causal_lm.policy_version(policy) == 0
    assert (policy / "modules" / "policy" / "model.safetensors").read_bytes() == (tmp_path / "model" / "model.safetensors").read_bytes()
    assert history.read(tmp_path / "run" / "history") == {}
    assert json.loads((tmp_path / "run" / "progress" / "progress.json").read_text()) == {"round": 0, "selector": None}
    content = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())
    fingerprint = artifact.write_manifest(policy)["fingerprint"]
    assert content["champion"] == {"policy_version": 0, "fingerprint": fingerprint, "greedy_accuracy": content["greedy_accuracy"]}
    assert content["stop"]["met"] is False
    assert report.numbers["num_eval_tasks"] == 1


def test_two_starts_give_equal_bytes(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    for name in ("a", "b"):
        begin(tmp_path / name, model)
    for name in OUTPUTS:
        assert artifact.folder_fingerprint(tmp_path / "a" / name) == artifact.folder_fingerprint(tmp_path / "b" / name)


def test_a_held_out_task_that_is_trained_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="eval row 1"):
        begin(tmp_path / "run", tiny_model(tmp_path / "model"), eval_prompt="MAX(3,  4) =")


@pytest.mark.parametrize(("gone", "named"), [("config.json", "config.json"), ("model.safetensors", "safetensors weights"), ("tokenizer*", "tokenizer")])
def test_a_model_folder_that_lacks_something_is_refused(tmp_path: Path, gone: str, named: str) -> None:
    model = tiny_model(tmp_path / "model")
    for path in model.glob(gone):
        path.unlink()
    with pytest.raises(ConfigError, match=named):
        begin(tmp_path / "run", model)
