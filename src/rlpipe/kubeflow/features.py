"""Which features of the pipeline language rlpipe allows itself: what compiles need not run on a cluster's backend.

Kubeflow's SDK compiles more than every backend runs. A pipeline that uses anything else than this list is refused when it is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlpipe.errors import ConfigError

ALLOWED = {
    "nested pipeline": "2.0",
    "parameters of pipelines": "2.0",
    "outputs of nested pipelines": "2.0",
    "condition": "2.0",
    "importer": "2.0",
    "exit handler": "2.0",
    "status of an exit task": "2.0",
    "retries": "2.0",
    "caching switch": "2.0",
    "resources": "2.0",
    "environment": "2.0",
    "loop over a fixed list": "2.5",
    "collected artifacts": "2.5",
    "kubernetes activeDeadlineSeconds": "2.1",
    "kubernetes emptyDirMounts": "2.4",
    "kubernetes imagePullPolicy": "2.1",
    "kubernetes imagePullSecret": "2.1",
    "kubernetes nodeSelector": "2.0",
    "kubernetes podMetadata": "2.1",
    "kubernetes pvcMount": "2.0",
    "kubernetes secretAsEnv": "2.0",
    "kubernetes secretAsVolume": "2.0",
    "kubernetes tolerations": "2.1",
}
"""The least backend version that runs each; loops with collected artifacts are used only with `rollout.shards` above 1."""

Spec = Mapping[str, Any]


def check(spec: Spec, platform: Spec) -> None:
    """Refuse a compiled pipeline that uses a feature not on the list.

    Raises:
        ConfigError: names the features.
    """
    if unknown := sorted(used(spec, platform) - ALLOWED.keys()):
        raise ConfigError("the pipeline uses features that a backend need not have", got=", ".join(unknown), accepted=", ".join(ALLOWED))


def least_backend(spec: Spec, platform: Spec) -> str:
    """The least backend version that runs a compiled pipeline."""
    return max((ALLOWED[feature] for feature in used(spec, platform)), key=lambda version: [int(part) for part in version.split(".")])


def used(spec: Spec, platform: Spec) -> set[str]:
    """The features that a compiled pipeline uses."""
    found = {feature for component in (spec["root"], *spec["components"].values()) for feature in _of_component(component, spec)}
    for executor in spec.get("deploymentSpec", {}).get("executors", {}).values():
        found |= set(_of_executor(executor))
    for config in platform.get("platforms", {}).get("kubernetes", {}).get("deploymentSpec", {}).get("executors", {}).values():
        found |= {f"kubernetes {name}" for name in config}
    return found


def _of_component(component: Spec, spec: Spec) -> Iterator[str]:
    inputs = component.get("inputDefinitions", {})
    if any(entry.get("isArtifactList") for entry in inputs.get("artifacts", {}).values()):
        yield "collected artifacts"
    if any(entry.get("isOptional") for entry in inputs.get("artifacts", {}).values()):
        yield "optional artifacts"
    if any(entry.get("parameterType") == "TASK_FINAL_STATUS" for entry in inputs.get("parameters", {}).values()):
        yield "status of an exit task"
    if component is spec["root"] and inputs.get("parameters"):
        yield "parameters of pipelines"
    graph = component.get("dag", {})
    yield from _of_outputs(graph.get("outputs", {}))
    for task in graph.get("tasks", {}).values():
        yield from _of_task(task, spec)


def _of_outputs(outputs: Spec) -> Iterator[str]:
    for entry in outputs.get("artifacts", {}).values():
        yield "outputs of nested pipelines" if len(entry.get("artifactSelectors", ())) == 1 else "one of several outputs"
    for entry in outputs.get("parameters", {}).values():
        yield "outputs of nested pipelines" if "valueFromParameter" in entry else "one of several outputs"


def _of_task(task: Spec, spec: Spec) -> Iterator[str]:
    inner = spec["components"][task["componentRef"]["name"]]
    if "dag" in inner:
        yield "nested pipeline"
    loops = [name for name in ("parameterIterator", "artifactIterator") if name in task]
    for name in loops:
        yield "loop over a fixed list" if "raw" in task[name].get("items", {}) else "loop over a list known at run time"
    if loops and any(_is_importer(one, spec) for one in _below(inner, spec)):
        yield "importer in a loop"
    trigger = task.get("triggerPolicy", {})
    if "condition" in trigger:
        yield "condition"
    if trigger.get("strategy") == "ALL_UPSTREAM_TASKS_COMPLETED":
        yield "exit handler"
    if "retryPolicy" in task:
        yield "retries"
    if "cachingOptions" in task:
        yield "caching switch"


def _below(component: Spec, spec: Spec) -> Iterator[Spec]:
    yield component
    for task in component.get("dag", {}).get("tasks", {}).values():
        yield from _below(spec["components"][task["componentRef"]["name"]], spec)


def _is_importer(component: Spec, spec: Spec) -> bool:
    return "importer" in spec.get("deploymentSpec", {}).get("executors", {}).get(component.get("executorLabel", ""), {})


def _of_executor(executor: Spec) -> Iterator[str]:
    if "importer" in executor:
        yield "importer"
        return
    container = executor["container"]
    if "{{" in container.get("image", ""):
        yield "image known at run time"
    if "resources" in container:
        yield "resources"
    if "env" in container:
        yield "environment"
