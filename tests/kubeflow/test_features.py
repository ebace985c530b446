"""The declared list of DSL features: what is on it is all that the pipelines use, and what is not is caught."""

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import json_format
from kfp import dsl

from rlpipe.errors import ConfigError
from rlpipe.kubeflow import compile as pipelines
from rlpipe.kubeflow import features
from tests.kubeflow.specs import EVERYTHING, ROOT, everything, plain, raw


@dsl.component(base_image="example/image:1", install_kfp_package=False)
def make(made: dsl.Output[dsl.Dataset], number: int = 1) -> bool:
    return True


@dsl.component(base_image="example/image:1", install_kfp_package=False)
def look(found: dsl.Input[dsl.Dataset]):
    pass


@dsl.component(base_image="example/image:1", install_kfp_package=False)
def may_look(found: dsl.Input[dsl.Dataset] = None):
    pass


@dsl.component(base_image="example/image:1", install_kfp_package=False)
def numbers() -> list[int]:
    return [1, 2]


@dsl.pipeline
def one_of() -> dsl.Dataset:
    first = make()
    with dsl.If(first.outputs["Output"] == True):  # noqa: E712
        yes = make()
    with dsl.Else():
        no = make()
    return dsl.OneOf(yes.outputs["made"], no.outputs["made"])


@dsl.pipeline
def importer_in_a_loop():
    with dsl.ParallelFor(["a", "b"]) as uri:
        look(found=dsl.importer(artifact_uri=uri, artifact_class=dsl.Dataset).output)


@dsl.pipeline
def importer_deep_in_a_loop():
    with dsl.ParallelFor(["a", "b"]) as uri, dsl.If(uri == "a"):
        look(found=dsl.importer(artifact_uri=uri, artifact_class=dsl.Dataset).output)


@dsl.pipeline
def loop_at_run_time():
    with dsl.ParallelFor(numbers().output) as number:
        make(number=number)


@dsl.pipeline
def optional_artifact():
    may_look()


@dsl.pipeline
def image_at_run_time(image: str):
    make().set_container_image(image)


def documents(pipeline: Any) -> tuple[dict, dict]:
    return json_format.MessageToDict(pipeline.pipeline_spec), json_format.MessageToDict(pipeline.platform_spec)


@pytest.mark.parametrize(
    ("pipeline", "feature"),
    [
        (one_of, "one of several outputs"),
        (importer_in_a_loop, "importer in a loop"),
        (importer_deep_in_a_loop, "importer in a loop"),
        (loop_at_run_time, "loop over a list known at run time"),
        (optional_artifact, "optional artifacts"),
        (image_at_run_time, "image known at run time"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_what_a_backend_need_not_run_is_caught(pipeline: Any, feature: str) -> None:
    """Cases B12, B23 and B10: they compile, and are refused by their name."""
    spec, platform = documents(pipeline)
    assert feature in features.used(spec, platform)
    with pytest.raises(ConfigError, match=f"features that a backend need not have.*{feature}"):
        features.check(spec, platform)


def test_what_kubernetes_need_not_know_is_caught() -> None:
    """Case B12: an option of kfp-kubernetes that is not on the list."""
    from kfp import kubernetes

    @dsl.pipeline
    def with_field() -> None:
        kubernetes.use_field_path_as_env(make(), env_name="NODE", field_path="spec.nodeName")

    with pytest.raises(ConfigError, match="kubernetes fieldPathAsEnv"):
        features.check(*documents(with_field))


@pytest.mark.parametrize("pipeline", pipelines.PIPELINES)
@pytest.mark.parametrize("config", sorted(path.relative_to(ROOT).as_posix() for path in [*(ROOT / "configs").glob("*.yaml"), ROOT / "params.yaml"]))
def test_every_shipped_config_with_every_option_stays_on_the_list(config: str, pipeline: str) -> None:
    """Case B12."""
    made = pipelines.compile(raw(config, rounds=2, shards=2, **EVERYTHING), pipeline)
    assert made.least_backend == "2.5"


def test_nothing_stands_on_the_list_that_no_pipeline_uses() -> None:
    found = set()
    for spec, executors in (everything(), everything("retraining"), plain()):
        found |= features.used(spec, {"platforms": {"kubernetes": {"deploymentSpec": {"executors": executors}}}})
    assert found == set(features.ALLOWED)


def test_without_shards_an_older_backend_will_do() -> None:
    assert pipelines.compile(raw()).least_backend == "2.1"


@pytest.mark.parametrize("build", [plain, everything])
def test_no_optional_artifact_anywhere(build: Callable[[], tuple[dict, dict]]) -> None:
    """Case B10: kfp's local runner refuses one that is not given."""
    spec, _ = build()
    definitions = [entry for component in spec["components"].values() for entry in component.get("inputDefinitions", {}).get("artifacts", {}).values()]
    assert definitions
    assert not [entry for entry in definitions if entry.get("isOptional")]
