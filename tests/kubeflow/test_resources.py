"""Every option of section `kubeflow` on the tasks it is for, as the compiled documents say it."""

import re
from typing import Any

import pytest

from rlpipe.kubeflow import compile as pipelines
from rlpipe.kubeflow.resources import GRACE_SECONDS, LOADS_MODELS, NEVER_CACHED, image_of
from rlpipe.kubeflow.section import TASKS, Images
from tests.kubeflow.specs import DIGEST, EVERYTHING, containers, environment, everything, graphs, plain, raw, task_of


def by_task(pipeline: str = "post_training") -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The container and Kubernetes' part of each task, of a pipeline with every option."""
    spec, platform = everything(pipeline)
    return {task_of(name): (container, platform[name]) for name, container in containers(spec).items()}


def test_the_pipelines_have_every_task() -> None:
    assert set(by_task()) | set(by_task("retraining")) == set(TASKS)


@pytest.mark.parametrize("pipeline", pipelines.PIPELINES)
def test_every_task_has_a_time_limit(pipeline: str) -> None:
    """Case B14: by Kubernetes, and a little sooner by the task itself."""
    for container, platform in by_task(pipeline).values():
        assert environment(container)["RLPIPE_TIMEOUT_SECONDS"] == "600"
        assert int(platform["activeDeadlineSeconds"]) == 600 + GRACE_SECONDS
    spec, platform = plain(pipeline)
    for name, container in containers(spec).items():
        assert environment(container)["RLPIPE_TIMEOUT_SECONDS"] == "14400"
        assert int(platform[name]["activeDeadlineSeconds"]) == 14_400 + GRACE_SECONDS


def test_images_are_replaced() -> None:
    """Case B25: prefix and tag, and a digest where there is one."""
    found = {name: container["image"] for name, (container, _) in by_task().items()}
    assert found["train"] == f"registry.example/team/train@{DIGEST}"
    assert found["rollout"] == "registry.example/team/rollout:1.2.3"
    assert found["snapshot_start"] == "registry.example/team/snapshot:1.2.3"
    assert environment(by_task()["train"][0])["RLPIPE_IMAGE"] == found["train"]


@pytest.mark.parametrize("pipeline", pipelines.PIPELINES)
def test_every_image_has_a_version_and_nothing_is_installed(pipeline: str) -> None:
    """Case B25."""
    for raw_params in (raw(), raw(rounds=2, shards=2, **EVERYTHING)):
        text = pipelines.compile(raw_params, pipeline).text
        images = re.findall(r"image: (\S+)", text)
        assert len(images) >= 9
        assert all(re.fullmatch(r"[a-z./]+(:[0-9.]+|@sha256:[0-9a-f]{64})", image) for image in images)
        assert "pip install" not in text
        assert "pip3 install" not in text


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (Images(), "ghcr.io/rlpipe/train:0.1.0"),
        (Images(prefix="localhost:5000/team/"), "localhost:5000/team/train:0.1.0"),
        (Images(tag="9"), "ghcr.io/rlpipe/train:9"),
        (Images(tag="9", digests={"train": DIGEST}), f"ghcr.io/rlpipe/train@{DIGEST}"),
        (Images(digests={"rollout": DIGEST}), "ghcr.io/rlpipe/train:0.1.0"),
    ],
)
def test_image_of(images: Images, expected: str) -> None:
    assert image_of("ghcr.io/rlpipe/train:0.1.0", images) == expected


def test_machines() -> None:
    rollout, train = by_task()["rollout"], by_task()["train"]
    assert rollout[0]["resources"] == {
        "resourceCpuLimit": "500m",
        "resourceCpuRequest": "500m",
        "cpuLimit": 0.5,
        "cpuRequest": 0.5,
        "memoryLimit": pytest.approx(4.294967296),
        "memoryRequest": pytest.approx(4.294967296),
        "resourceMemoryLimit": "4Gi",
        "resourceMemoryRequest": "4Gi",
        "accelerator": {"count": "4", "resourceCount": "4", "resourceType": "amd.com/gpu", "type": "amd.com/gpu"},
    }
    assert rollout[1]["nodeSelector"] == {"labels": {"kubernetes.io/arch": "amd64"}}
    assert rollout[1]["tolerations"] == [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": "5"}]
    (shared,) = rollout[1]["emptyDirMounts"]
    assert (shared["mountPath"], shared["medium"], shared["sizeLimit"]) == ("/dev/shm", "Memory", "8Gi")
    assert train[0]["resources"]["resourceCpuLimit"] == "2"
    assert "accelerator" not in train[0]["resources"]
    assert not {"nodeSelector", "tolerations", "emptyDirMounts"} & set(train[1])


def test_secrets_go_by_reference_to_the_tasks_they_are_for() -> None:
    """Case B07. Preflight gets all of them, to see that they are there."""
    found = {
        name: {entry["secretName"] for entry in [*platform.get("secretAsEnv", []), *platform.get("secretAsVolume", [])]}
        for name, (_, platform) in by_task().items()
    }
    assert found["preflight"] == {"hub", "git-key", "mlflow"}
    assert found["rollout"] == {"hub", "mlflow"}
    assert found["snapshot"] == {"git-key", "mlflow"}
    assert {name: names for name, names in found.items() if name not in ("preflight", "rollout", "snapshot")} == {
        name: {"mlflow"} for name in found if name not in ("preflight", "rollout", "snapshot")
    }
    (hub,) = [entry for entry in by_task()["rollout"][1]["secretAsEnv"] if entry["secretName"] == "hub"]
    assert hub["keyToEnv"] == [{"secretKey": "token", "envVar": "HF_TOKEN"}]
    (key,) = by_task()["snapshot"][1]["secretAsVolume"]
    assert key["mountPath"] == "/secrets/git"


def test_a_marker_in_the_environment_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case B07: secrets that the compiling machine has."""
    marker = "marker-of-a-secret-51c9"
    for name in ("HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "GIT_PASSWORD", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, marker if name != "MLFLOW_TRACKING_URI" else f"http://user:{marker}@mlflow.example")
    for pipeline in pipelines.PIPELINES:
        compiled = pipelines.compile(raw(rounds=2, shards=2, **EVERYTHING), pipeline)
        assert marker not in compiled.text
        assert marker not in repr(compiled)
        assert "HF_TOKEN" in compiled.text


def test_the_cache_is_mounted_where_models_are_loaded() -> None:
    mounted = {name for name, (_, platform) in {**by_task(), **by_task("retraining")}.items() if "pvcMount" in platform}
    assert mounted == set(LOADS_MODELS)
    container, platform = by_task()["rollout"]
    assert environment(container)["RLPIPE_CACHE"] == "/cache"
    (mount,) = platform["pvcMount"]
    assert (mount["constant"], mount["mountPath"]) == ("models", "/cache")


def test_plain_environment_variables_are_everywhere() -> None:
    assert {environment(container)["MLFLOW_TRACKING_URI"] for container, _ in by_task().values()} == {"http://mlflow.example"}


def test_pods() -> None:
    for _, platform in by_task().values():
        assert platform["imagePullPolicy"] == "IfNotPresent"
        assert [entry["secretName"] for entry in platform["imagePullSecret"]] == ["registry"]
        assert platform["podMetadata"]["labels"] == {"team": "rl"}


def tasks(pipeline: str = "post_training") -> dict[str, list[dict[str, Any]]]:
    """Every use of each component."""
    found: dict[str, list[dict[str, Any]]] = {}
    for graph in graphs(everything(pipeline)[0]):
        for task in graph.values():
            found.setdefault(task["componentRef"]["name"].removeprefix("comp-").rstrip("0123456789").rstrip("-").replace("-", "_"), []).append(task)
    return found


def test_every_task_but_the_last_is_tried_again() -> None:
    """Case B13: with a pause that grows."""
    wanted = {"maxRetryCount": 3, "backoffDuration": "10s", "backoffFactor": 3.0, "backoffMaxDuration": "90s"}
    found = tasks()
    for name in set(TASKS) - {"start_from", "decide"}:
        for task in found[name]:
            assert task.get("retryPolicy") == (None if name == "finish" else wanted), name


def test_a_local_run_is_not_tried_again() -> None:
    from google.protobuf import json_format

    pipeline = pipelines.build("post_training", pipelines.plan(raw(), local=True))
    assert "retryPolicy" not in json_format.MessageToJson(pipeline.pipeline_spec)


def test_what_looks_outside_is_never_cached() -> None:
    for name, uses in tasks().items():
        for task in uses if name in TASKS else ():
            assert task.get("cachingOptions", {}).get("enableCache", False) is (name not in NEVER_CACHED), name


def test_caching_is_off_unless_asked_for() -> None:
    """Case B01: Kubeflow's cache does not look whether an output still exists."""
    spec, _ = plain()
    found = [task for graph in graphs(spec) for task in graph.values() if "executorLabel" in spec["components"][task["componentRef"]["name"]]]
    assert len(found) == 9
    assert not [task for task in found if task.get("cachingOptions", {}).get("enableCache")]


def test_the_service_account_is_at_hand_for_the_run() -> None:
    assert pipelines.compile(raw(**EVERYTHING)).config.service_account == "runner"
