"""The signature is the definition: the CLI and `dvc.yaml` are held against it."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe import layout, params, steps
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


def test_stages_are_the_steps() -> None:
    assert list(STAGES) == ["model", "tasks", "start", *layout.ROUND_STEPS]
    assert all(STAGES[name]["foreach"] == "${rounds}" for name in layout.ROUND_STEPS)
