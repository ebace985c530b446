"""What section `kubeflow` says of a task, put on the task: image, resources, secrets by reference, volumes, limits of time and tries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kfp import kubernetes

from rlpipe.kubeflow.pod import IMAGE, TIMEOUT
from rlpipe.kubeflow.section import Images, KubeflowConfig, Resources

LOADS_MODELS = ("preflight", "start", "start_from", "rollout", "train", "evaluate")
"""Tasks that get the model cache."""
GRACE_SECONDS = 60
"""Kubernetes ends a task this much later than the task ends itself, so that the reason is said first."""
NEVER_CACHED = ("preflight", "decide", "promote", "snapshot_start", "snapshot", "finish")
"""Tasks that look at or change something outside of their inputs and outputs."""


def apply(task: Any, name: str, config: KubeflowConfig, launcher: Mapping[str, Any], *, retried: bool) -> Any:
    """Put everything on one task; returns it.

    Args:
        name: the task's component, one of `TASKS`.
        launcher: `train.launcher`; a TrainJob shares a volume with the task `train`.
        retried: with the retries of the section; a local runner does without.
    """
    resources = config.of(name)
    image = image_of(task.container_spec.image, config.images)
    task.set_container_image(image)
    task.set_caching_options(config.caching and name not in NEVER_CACHED)
    if retried and resources.retries.num and name != "finish":
        tries = resources.retries
        task.set_retry(tries.num, f"{tries.backoff_seconds}s", tries.backoff_factor, f"{tries.max_backoff_seconds}s")
    kubernetes.set_timeout(task, resources.timeout_seconds + GRACE_SECONDS)
    _environment(task, name, config, resources, image)
    _machine(task, resources)
    if name == "train" and launcher.get("shared_claim"):
        kubernetes.mount_pvc(task, launcher["shared_claim"], launcher["shared_folder"])
    _secrets(task, name, config)
    _pod(task, config)
    return task


def image_of(literal: str, images: Images) -> str:
    """The image to run: the literal of the component with prefix, tag or digest replaced."""
    place, _, tag = literal.rpartition(":")
    prefix, _, name = place.rpartition("/")
    place = f"{images.prefix.rstrip('/') if images.prefix else prefix}/{name}"
    return f"{place}@{images.digests[name]}" if name in images.digests else f"{place}:{images.tag or tag}"


def _environment(task: Any, name: str, config: KubeflowConfig, resources: Resources, image: str) -> None:
    task.set_env_variable(TIMEOUT, str(resources.timeout_seconds))
    task.set_env_variable(IMAGE, image)
    for variable, value in config.env.items():
        task.set_env_variable(variable, value)
    if config.model_cache and name in LOADS_MODELS:
        task.set_env_variable("RLPIPE_CACHE", config.model_cache.folder)
        kubernetes.mount_pvc(task, config.model_cache.claim, config.model_cache.folder)


def _machine(task: Any, resources: Resources) -> None:
    if resources.cpu:
        task.set_cpu_request(resources.cpu).set_cpu_limit(resources.cpu)
    if resources.memory:
        task.set_memory_request(resources.memory).set_memory_limit(resources.memory)
    if resources.accelerator:
        task.set_accelerator_type(resources.accelerator.type).set_accelerator_limit(resources.accelerator.count)
    if resources.shared_memory:
        kubernetes.empty_dir_mount(task, "shared-memory", "/dev/shm", medium="Memory", size_limit=resources.shared_memory)
    for key, value in resources.node_selector.items():
        kubernetes.add_node_selector(task, key, value)
    for toleration in resources.tolerations:
        kubernetes.add_toleration(task, **toleration.model_dump())


def _secrets(task: Any, name: str, config: KubeflowConfig) -> None:
    """Preflight gets every secret, to see that it is there."""
    for secret in config.secrets if name == "preflight" else config.secrets_of(name):
        if secret.env:
            kubernetes.use_secret_as_env(task, secret.name, dict(secret.env))
        if secret.folder:
            kubernetes.use_secret_as_volume(task, secret.name, secret.folder)


def _pod(task: Any, config: KubeflowConfig) -> None:
    if config.image_pull_policy:
        kubernetes.set_image_pull_policy(task, config.image_pull_policy)
    if config.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(config.image_pull_secrets))
    for key, value in config.labels.items():
        kubernetes.add_pod_label(task, key, value)
