"""The signature is the definition: the CLI and `dvc.yaml` are held against it."""

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe import __version__, cli, layout, params, steps
from rlpipe.kubeflow import section
from rlpipe.workspace import shipped

STAGES = params.read_yaml(shipped("dvc.yaml"))["stages"]
STEPS = ("start", *layout.ROUND_STEPS)


def stage(name: str) -> dict:
    """The stage of one step in round 1, or `start`, with its templates filled."""
    body = STAGES[name].get("do", STAGES[name])

    def fill(value):
        if isinstance(value, list):
            return [fill(entry) for entry in value]
        if isinstance(value, dict):
            return {fill(key): fill(entry) for key, entry in value.items()}
        return value.replace("${item.round}", "01").replace("${item.previous}", "00") if isinstance(value, str) else value

    return fill(body)


def options(command: str) -> dict[str, str]:
    words = shlex.split(command)
    return {words[i][2:].replace("-", "_"): words[i + 1] for i in range(2, len(words), 2)}


@pytest.mark.parametrize("name", STEPS)
def test_dvc_command_names_every_artifact_at_its_place(name: str) -> None:
    found = options(stage(name)["cmd"])
    step = steps.load(name)
    index = int(found.pop("round_index", 0))
    assert {key: Path(value) for key, value in found.items()} == step.signature_paths(index)


@pytest.mark.parametrize("name", STEPS)
def test_dvc_deps_and_outs_are_the_signature(name: str) -> None:
    body, step = stage(name), steps.load(name)
    index = 0 if name == "start" else 1
    places = step.signature_paths(index)
    deps = {dep for dep in body["deps"] if not dep.startswith("src/")}
    assert deps == {places[key].as_posix() for key in step.signature.inputs}
    assert set(body["outs"]) == {places[key].as_posix() for key in step.signature.outputs}


@pytest.mark.parametrize("name", [*STEPS, "model", "tasks"])
def test_dvc_depends_on_the_code_that_decides(name: str) -> None:
    deps = {dep for dep in stage(name)["deps"] if dep.startswith("src/")}
    assert deps == {f"src/rlpipe/{part}" for part in (*layout.CORE, *layout.CODE[name])}


@pytest.mark.parametrize("name", STEPS)
def test_dvc_params_are_the_sections_the_config_uses(name: str) -> None:
    config = steps.load(name).signature.config
    own = "evaluate" if name == "start" else name
    assert set(stage(name)["params"]) == {own, *(shared for shared in params.SHARED if shared in config.model_fields)}


@pytest.mark.parametrize("name", STEPS)
def test_help_names_each_artifact(name: str) -> None:
    text = subprocess.run([sys.executable, "-m", "rlpipe.cli", name, "--help"], capture_output=True, text=True, check=True).stdout
    found = steps.load(name).signature
    for parameter in (*found.inputs, *found.outputs):
        assert re.search(rf"--{parameter.replace('_', '-')} PATH", text)
    for scalar in found.scalars:
        assert re.search(rf"--{scalar.replace('_', '-')} [RN]", text)


def test_stages_are_the_steps() -> None:
    assert list(STAGES) == ["model", "tasks", "start", *layout.ROUND_STEPS]
    assert all(STAGES[name]["foreach"] == "${rounds}" for name in layout.ROUND_STEPS)


def test_scalars_have_the_defaults_of_the_signature_and_dvc_leaves_them_there() -> None:
    assert {name: steps.load(name).signature.options for name in STEPS if steps.load(name).signature.options} == {"rollout": {"shard_index": -1}}
    assert all("shard" not in stage(name)["cmd"] for name in STEPS)
    parser = argparse.ArgumentParser()
    cli._add_step(parser, "rollout")
    assert parser.parse_args([]).shard_index == -1
    assert parser.parse_args(["--shard-index", "2"]).shard_index == 2


PAGES = {"rollout": {"report"}, "reward": {"report"}, "train": {"report"}, "evaluate": {"report", "summary"}, "start": {"report"}}
"""What a person reads of each step on Kubeflow."""


def component(name: str):
    return getattr(importlib.import_module(f"rlpipe.kubeflow.components.{name}"), name).component_spec


def artifacts(ports: dict) -> dict[str, str]:
    """The artifacts among a component's inputs or outputs, with their types."""
    return {name: port.type for name, port in ports.items() if port.type.startswith("system.")}


@pytest.mark.parametrize("name", layout.ROUND_STEPS)
def test_component_artifacts_are_the_signature(name: str) -> None:
    spec, found = component(name), steps.load(name).signature
    assert tuple(artifacts(spec.inputs)) == found.inputs
    assert set(artifacts(spec.outputs)) == {*found.outputs, "metrics", *PAGES.get(name, ())}


def test_component_start_makes_what_the_step_start_takes() -> None:
    spec, found = component("start"), steps.load("start").signature
    assert artifacts(spec.inputs) == {}
    assert set(artifacts(spec.outputs)) == {*found.inputs, *found.outputs, "metrics", "report"}
    champion = component("start_from")
    assert set(artifacts(champion.inputs)) == {"champion"}
    assert set(artifacts(champion.outputs)) == {*artifacts(spec.outputs)} - {"model"}


@pytest.mark.parametrize("name", layout.ROUND_STEPS)
def test_component_parameters_are_the_section_and_the_scalars(name: str) -> None:
    spec, found = component(name), steps.load(name).signature
    parameters = {key: port for key, port in spec.inputs.items() if key not in artifacts(spec.inputs)}
    assert set(parameters) == {"config", "tracking", "round_index", "run_key", "run_id", *found.options}
    assert (parameters["config"].type, parameters["tracking"].type, parameters["round_index"].type) == ("Dict", "Dict", "Integer")
    assert {key: parameters[key].default for key in found.options} == found.options


def test_an_artifact_has_one_type_wherever_it_goes() -> None:
    names = {"tasks": "train_tasks", "policy_in": "policy", "progress_in": "progress", "history_in": "history", "evaluation_in": "evaluation"}
    types: dict[str, set[str]] = {}
    for task in section.TASKS:
        spec = component(task)
        for key, kind in {**artifacts(spec.inputs), **artifacts(spec.outputs)}.items():
            types.setdefault(names.get(key, key), set()).add(kind)
    assert {key: kinds for key, kinds in types.items() if len(kinds) > 1} == {}
    assert types["policy"] == {"system.Model@0.0.1"}
    assert types["trajectories"] == {"system.Dataset@0.0.1"}


@pytest.mark.parametrize("name", section.TASKS)
def test_component_images_carry_this_version(name: str) -> None:
    assert component(name).implementation.container.image.endswith(f":{__version__}")
