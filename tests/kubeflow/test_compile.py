"""The compiled pipelines: their size, their shape, and that merging equal parts changes nothing but names."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from kfp import dsl
from ruamel.yaml import YAML

from rlpipe import params
from rlpipe.errors import ConfigError
from rlpipe.kubeflow import compile as pipelines
from rlpipe.kubeflow.section import KubeflowConfig
from rlpipe.workspace import shipped
from tests.kubeflow.specs import EVERYTHING, documents, everything, plain, raw

BUDGET_OF_TEN_ROUNDS = 256_000


def size(rounds: int, **kubeflow: Any) -> int:
    return pipelines.compile(raw(rounds=rounds, **kubeflow)).num_bytes


def test_ten_rounds_stay_within_the_budget() -> None:
    """Case B03."""
    assert size(10) < BUDGET_OF_TEN_ROUNDS / 2
    assert pipelines.compile(raw(rounds=10, shards=2, **EVERYTHING)).num_bytes < BUDGET_OF_TEN_ROUNDS


def test_a_round_adds_little_and_always_the_same() -> None:
    """Case B03: what a round does stands in the specification once."""
    sizes = [size(rounds) for rounds in (2, 3, 4, 5)]
    steps = {after - before for before, after in itertools.pairwise(sizes)}
    assert len(steps) == 1
    assert steps.pop() < 3_000
    assert size(1) < 70_000


def test_a_hundred_rounds_fit() -> None:
    """Case B03."""
    assert size(100) < 320_000


def test_five_hundred_rounds_are_refused_with_their_size() -> None:
    """Case B03: at once, not after the minutes that kfp would take."""
    with pytest.raises(ConfigError, match=r"500 rounds is larger than Kubeflow can be expected to hold; got 1\d\d\d KB; accepted: 900 KB"):
        size(500)


def test_the_limit_is_a_knob() -> None:
    with pytest.raises(ConfigError, match=r"of 2 rounds is larger.*got \d\d KB; accepted: 50 KB \(kubeflow\.max_spec_kb\)"):
        size(2, max_spec_kb=50)


def meaning(graph: dict[str, Any], spec: dict[str, Any], configs: dict[str, Any]) -> Any:
    """A component with everything it refers to in place of the names, which merging changes."""
    executor = graph.get("executorLabel")
    content = {key: value for key, value in graph.items() if key not in ("dag", "executorLabel")}
    if executor:
        content["executor"] = (spec["deploymentSpec"]["executors"][executor], configs.get(executor))
    if "dag" in graph:
        tasks = graph["dag"]["tasks"]
        content["dag"] = {key: value for key, value in graph["dag"].items() if key != "tasks"}
        content["tasks"] = {
            name: {**task, "componentRef": meaning(spec["components"][task["componentRef"]["name"]], spec, configs)} for name, task in tasks.items()
        }
    return content


@pytest.mark.parametrize("pipeline", pipelines.PIPELINES)
def test_merging_changes_nothing_but_names(pipeline: str) -> None:
    """Case B03: the specification as kfp makes it, and as rlpipe sends it, expanded, are one."""
    given = raw(rounds=3, shards=2, **{**EVERYTHING, "params_store": None})
    made = pipelines.build(pipeline, pipelines.plan(given, pipeline))
    whole, platform = json_format.MessageToDict(made.pipeline_spec), json_format.MessageToDict(made.platform_spec)
    spec, configs = documents(pipelines.compile(given, pipeline).text)
    assert len(spec["components"]) < len(whole["components"]) / 2
    before = meaning(whole["root"], whole, platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"])
    assert meaning(spec["root"], spec, configs) == before


def test_the_same_params_compile_to_the_same_bytes() -> None:
    first, second = (pipelines.compile(raw(rounds=2, **EVERYTHING)) for _ in range(2))
    assert first.text == second.text
    assert re.fullmatch("[0-9a-f]{12}", first.version)
    assert first.version == second.version
    assert pipelines.compile(raw(rounds=3, **EVERYTHING)).version != first.version


def test_a_number_of_rounds_known_at_run_time_is_refused() -> None:
    """Case B16."""

    def training(rounds: int):
        pipelines.Plan(rounds, 1, {}, KubeflowConfig(), {})

    with pytest.raises(ConfigError, match=r"the number of rounds is fixed when a pipeline is compiled.*set rounds in params\.yaml"):
        dsl.pipeline(training)


def inner_tasks(spec: dict[str, Any]) -> dict[str, Any]:
    """The tasks inside of the exit handler."""
    (run,) = [name for name in spec["root"]["dag"]["tasks"] if name.startswith("exit-handler")]
    return spec["components"][spec["root"]["dag"]["tasks"][run]["componentRef"]["name"]]["dag"]["tasks"]


def artifact_from(task: dict[str, Any], name: str) -> str:
    return task["inputs"]["artifacts"][name]["taskOutputArtifact"]["producerTask"]


def test_three_rounds_are_a_chain() -> None:
    """Case B16: each takes the state of the one before."""
    spec, _ = plain(rounds=3)
    tasks = inner_tasks(spec)
    rounds = ["rl-round", "rl-round-2", "rl-round-3"]
    assert [name for name in tasks if name.startswith("rl-round")] == rounds
    for before, name in zip(["start", *rounds], rounds, strict=False):
        assert {artifact_from(tasks[name], state) for state in ("policy", "progress", "history", "evaluation")} == {before}
        assert before in tasks[name]["dependentTasks"]
        assert {artifact_from(tasks[name], made) for made in ("train_tasks", "eval_tasks")} == {"start"}
    assert [tasks[name]["inputs"]["parameters"]["round_index"]["runtimeValue"]["constant"] for name in rounds] == [1.0, 2.0, 3.0]
    assert [tasks[name]["taskInfo"]["name"] for name in rounds] == ["round 1", "round 2", "round 3"]


def test_the_first_round_is_the_same_component_as_the_others() -> None:
    """Case B10."""
    tasks = inner_tasks(plain(rounds=3)[0])
    assert len({tasks[name]["componentRef"]["name"] for name in ("rl-round", "rl-round-2", "rl-round-3")}) == 1


def test_preflight_comes_before_everything() -> None:
    tasks = inner_tasks(plain()[0])
    assert not tasks["preflight"].get("dependentTasks")
    assert tasks["start"]["dependentTasks"] == ["preflight"]


@pytest.mark.parametrize("pipeline", pipelines.PIPELINES)
def test_the_summary_is_written_whatever_happens(pipeline: str) -> None:
    tasks = plain(pipeline)[0]["root"]["dag"]["tasks"]
    assert tasks["finish"]["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"
    assert tasks["finish"]["dependentTasks"] == ["exit-handler-1"]


def test_only_what_was_promoted_is_promoted() -> None:
    spec, _ = plain()
    tasks = spec["components"]["comp-rl-round"]["dag"]["tasks"]
    (condition,) = [task for task in tasks.values() if "condition" in task.get("triggerPolicy", {})]
    assert condition["triggerPolicy"]["condition"] == "inputs.parameter_values['pipelinechannel--evaluate-Output'] == true"
    assert list(spec["components"][condition["componentRef"]["name"]]["dag"]["tasks"]) == ["promote"]


def test_shards_run_beside_each_other_and_are_joined() -> None:
    """Case B12: over a fixed list, gathered once."""
    spec, _ = everything()
    tasks = spec["components"]["comp-rl-round"]["dag"]["tasks"]
    (loop,) = [task for task in tasks.values() if "parameterIterator" in task]
    assert loop["parameterIterator"]["items"] == {"raw": "[0, 1]"}
    assert "filter" in tasks
    assert artifact_from(tasks["filter"], "trajectories") == "gather"
    assert "gather" not in plain()[0]["components"]["comp-rl-round"]["dag"]["tasks"]


def test_each_round_is_recorded_after_the_one_before() -> None:
    spec, _ = everything()
    tasks = inner_tasks(spec)
    expected = [tasks[name]["inputs"]["parameters"]["expect"]["taskOutputParameter"] for name in ("rl-round", "rl-round-2")]
    assert [entry["producerTask"] for entry in expected] == ["snapshot-start", "rl-round"]
    assert "snapshot-start" not in inner_tasks(plain()[0])


def test_retraining_measures_the_champion_first_and_trains_only_if_it_is_worth_it() -> None:
    spec, _ = plain("retraining")
    tasks = inner_tasks(spec)
    (condition,) = set(tasks) - {"preflight", "importer", "start-from", "decide"}
    assert tasks["importer"]["dependentTasks"] == ["preflight"]
    assert artifact_from(tasks["start-from"], "champion") == "importer"
    assert artifact_from(tasks["decide"], "evaluation") == "start-from"
    worth = tasks[condition]
    assert worth["triggerPolicy"]["condition"] == "inputs.parameter_values['pipelinechannel--decide-Output'] == true"
    assert list(spec["components"][worth["componentRef"]["name"]]["dag"]["tasks"]) == ["rl-round"]


def test_every_section_is_one_parameter() -> None:
    compiled = pipelines.compile(raw())
    spec, _ = documents(compiled.text)
    assert set(spec["root"]["inputDefinitions"]["parameters"]) == set(compiled.arguments)
    assert {entry["parameterType"] for entry in spec["root"]["inputDefinitions"]["parameters"].values()} == {"STRUCT"}


def test_an_unknown_pipeline_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such pipeline; got training; accepted: post_training, retraining"):
        pipelines.compile(raw(), "training")


def test_the_example_of_the_readme_compiles() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(kubeflow:.*?)```", text, re.DOTALL)
    given = YAML(typ="safe", pure=True).load(example)
    compiled = pipelines.compile({**params.read_yaml(shipped("configs/tiny.yaml")), **given})
    assert compiled.least_backend == "2.4"
    assert compiled.config.of("train").timeout_seconds == 14400
    assert compiled.config.of("train").node_selector == {"pool": "gpu"}
    assert compiled.config.of("filter").timeout_seconds == 3600
