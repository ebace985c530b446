"""The start step: round 00, made from a model folder, so that round 1 is like any other."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from rlpipe import artifact
from rlpipe import tasks as task_files
from rlpipe.errors import ConfigError
from rlpipe.evaluate.section import Config as EvaluateConfig
from rlpipe.reward import history as task_history
from rlpipe.rollout.step import PROGRESS, initial_progress
from rlpipe.step import In, Out, Report

log = logging.getLogger("rlpipe")


class Config(EvaluateConfig):
    """Section `evaluate`: the start policy is measured as every later one is."""


def run(config: Config, *, model: In, train_tasks: In, eval_tasks: In, policy: Out, progress: Out, history: Out, evaluation: Out, round_index: int) -> Report:
    """Make the start policy from a model folder, with empty progress and history, and measure it; it is the first champion."""
    from rlpipe.evaluate import verdict
    from rlpipe.evaluate.measuring import measure

    held_out = task_files.load(eval_tasks)
    training = task_files.load(train_tasks)
    task_files.check_overlap(training, held_out)
    for warning in task_files.overlap_warnings(training, held_out):
        log.warning("%s", warning)
    make_policy(model, policy)
    artifact.write_json(progress / PROGRESS, initial_progress())
    task_history.empty(history)
    measured = measure(config, policy, held_out, round_index, evaluation)
    content = verdict.write(config, evaluation, measured, artifact.folder_fingerprint(policy), None, round_index)
    return Report(numbers=verdict.numbers(content), facts={"policy_version": measured.policy_version})


def make_policy(model: Path, policy: Path) -> None:
    """Copy a Hugging Face folder into a policy of version 0; library versions and paths in its configs are left out.

    Raises:
        ConfigError: a config, weights or tokenizer are missing.
    """
    from rlpipe.policies import adapters, causal_lm

    weights = [path for path in sorted(model.iterdir()) if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")]
    for name, present in (("config.json", (model / "config.json").is_file()), ("safetensors weights", bool(weights))):
        if not present:
            raise ConfigError(f"model folder without {name}", got=str(model), accepted="a Hugging Face folder with config, safetensors and tokenizer")
    module = policy / causal_lm.POLICY_MODULE
    module.mkdir(parents=True, exist_ok=True)
    for path in [model / "config.json", *weights]:
        shutil.copyfile(path, module / path.name)
    causal_lm.copy_companions(model, module)
    adapters.carry(model, module)
    causal_lm.load_tokenizer(module)
    artifact.write_json(policy / causal_lm.STATE, {"policy_version": 0})
