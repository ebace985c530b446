"""Compiled pipelines for tests: params with every option of section `kubeflow`, and ways through the documents."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rlpipe import params, steps
from rlpipe.kubeflow import compile as pipelines

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + "ab" * 32
EVERYTHING = {
    "experiment": "nightly",
    "images": {"prefix": "registry.example/team", "tag": "1.2.3", "digests": {"train": DIGEST}},
    "resources": {
        "default": {
            "cpu": "2",
            "memory": "4Gi",
            "timeout_seconds": 600,
            "retries": {"num": 3, "backoff_seconds": 10, "backoff_factor": 3, "max_backoff_seconds": 90},
        },
        "rollout": {
            "cpu": "500m",
            "accelerator": {"type": "amd.com/gpu", "count": 4},
            "node_selector": {"kubernetes.io/arch": "amd64"},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule", "toleration_seconds": 5}],
            "shared_memory": "8Gi",
        },
    },
    "secrets": [
        {"name": "hub", "env": {"token": "HF_TOKEN"}, "tasks": ["rollout"]},
        {"name": "git-key", "folder": "/secrets/git", "tasks": ["snapshot"]},
        {"name": "mlflow", "env": {"password": "MLFLOW_TRACKING_PASSWORD"}},
    ],
    "env": {"MLFLOW_TRACKING_URI": "http://mlflow.example"},
    "model_cache": {"claim": "models", "folder": "/cache"},
    "image_pull_policy": "IfNotPresent",
    "image_pull_secrets": ["registry"],
    "service_account": "runner",
    "labels": {"team": "rl"},
    "caching": True,
    "snapshot": {"repository": "https://git.example/project.git", "commit": "abcdef1", "remote": "store"},
    "params_store": "s3://bucket/params",
}
"""Section `kubeflow` with every key set."""


def raw(config: str = "configs/micro.yaml", rounds: int = 1, shards: int = 1, **kubeflow: Any) -> dict[str, Any]:
    """Params of a shipped config, with these rounds, shards and keys of section `kubeflow`."""
    content = params.read_yaml(ROOT / config)
    return {**content, "rounds": steps.round_list(rounds), "rollout": {**content.get("rollout", {}), "shards": shards}, "kubeflow": kubeflow}


@cache
def everything(pipeline: str = "post_training") -> tuple[dict[str, Any], dict[str, Any]]:
    """Both documents of two rounds with two shards and every option."""
    return documents(pipelines.compile(raw(rounds=2, shards=2, **EVERYTHING), pipeline).text)


@cache
def plain(pipeline: str = "post_training", rounds: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both documents of a pipeline without any option."""
    return documents(pipelines.compile(raw(rounds=rounds), pipeline).text)


def documents(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The specification and Kubernetes' part of it."""
    spec, platform = yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return spec, platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def containers(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The containers by executor; an importer has none."""
    executors = spec["deploymentSpec"]["executors"]
    return {name: executor["container"] for name, executor in executors.items() if "container" in executor}


def task_of(executor: str) -> str:
    """`exec-snapshot-start-2` is of `snapshot_start`."""
    return executor.removeprefix("exec-").rstrip("0123456789").rstrip("-").replace("-", "_")


def graphs(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The tasks of the pipeline and of every pipeline in it."""
    for component in (spec["root"], *spec["components"].values()):
        if "dag" in component:
            yield component["dag"]["tasks"]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container.get("env", [])}
