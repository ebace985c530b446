"""The compiled specification: equal parts once, so that rounds do not multiply it, and the features of the DSL it uses.

kfp writes a nested pipeline anew each time it is used. Here equal components and executors are merged, bottom up,
which changes nothing but their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from google.protobuf import json_format

Spec = dict[str, Any]


def documents(component: Any) -> tuple[Spec, Spec]:
    """A pipeline's specification, and Kubernetes' part of it, equal parts once."""
    return merged(json_format.MessageToDict(component.pipeline_spec), json_format.MessageToDict(component.platform_spec))


def text(spec: Spec, platform: Spec) -> str:
    """The YAML that Kubeflow takes; one document, or two where there is a part for Kubernetes."""
    return yaml.dump_all([spec, *([platform] if platform else [])], Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=True, width=200)


def merged(spec: Spec, platform: Spec) -> tuple[Spec, Spec]:
    """The same pipeline with equal executors and equal components written once."""
    spec, platform = json.loads(json.dumps(spec)), json.loads(json.dumps(platform))
    executors = spec.get("deploymentSpec", {}).get("executors", {})
    configs = platform.get("platforms", {}).get("kubernetes", {}).get("deploymentSpec", {}).get("executors", {})
    kept = _first_of_each(executors, lambda name: [executors[name], configs.get(name)])
    for component in spec["components"].values():
        if "executorLabel" in component:
            component["executorLabel"] = kept[component["executorLabel"]]
    for name in [name for name in executors if kept[name] != name]:
        del executors[name]
        configs.pop(name, None)
    _merge_components(spec)
    return spec, platform


def _merge_components(spec: Spec) -> None:
    """Until nothing more is equal: a component counts as equal once the components inside it are the same ones."""
    components = spec["components"]
    while True:
        kept = _first_of_each(components, lambda name: components[name])
        gone = [name for name in components if kept[name] != name]
        if not gone:
            return
        for tasks in _task_lists(spec):
            for task in tasks.values():
                task["componentRef"]["name"] = kept[task["componentRef"]["name"]]
        for name in gone:
            del components[name]


def _first_of_each(parts: Mapping[str, Any], content: Any) -> dict[str, str]:
    """By name, the name of the first part with the same content."""
    seen: dict[str, str] = {}
    return {name: seen.setdefault(json.dumps(content(name), sort_keys=True), name) for name in sorted(parts, key=lambda name: (len(name), name))}


def _task_lists(spec: Spec) -> Iterator[Spec]:
    """The tasks of the pipeline and of every pipeline in it."""
    for graph in (spec["root"], *spec["components"].values()):
        yield graph.get("dag", {}).get("tasks", {})
