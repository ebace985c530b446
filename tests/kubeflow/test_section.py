"""Section `kubeflow`: what it refuses, and what one task gets of it."""

import pytest

from rlpipe import params, steps
from rlpipe.errors import ConfigError
from rlpipe.kubeflow.section import TASKS, KubeflowConfig
from tests.kubeflow.specs import EVERYTHING, raw


def config(**values) -> KubeflowConfig:
    return params.validated(KubeflowConfig, values, "kubeflow")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"images": {"tag": "latest"}}, "tag latest names another image tomorrow"),
        ({"images": {"digests": {"train": "sha256:12"}}}, "kubeflow.images.digests.train"),
        ({"secrets": [{"name": "hub"}]}, "a secret needs env, a folder, or both"),
        ({"secrets": [{"name": "Hub", "env": {"token": "HF_TOKEN"}}]}, "kubeflow.secrets.0.name"),
        ({"secrets": [{"name": "hub", "env": {"token": "HF-TOKEN"}}]}, "kubeflow.secrets.0.env.token"),
        ({"secrets": [{"name": "hub", "folder": "relative"}]}, "kubeflow.secrets.0.folder"),
        ({"secrets": [{"name": "hub", "env": {"token": "HF_TOKEN"}, "tasks": ["rolout"]}]}, "kubeflow.secrets.0.tasks.0"),
        ({"resources": {"rolout": {"cpu": "1"}}}, "kubeflow.resources.rolout"),
        ({"resources": {"rollout": {"memory": "4 GB"}}}, "kubeflow.resources.rollout.memory"),
        ({"resources": {"rollout": {"timeout_seconds": 0}}}, "kubeflow.resources.rollout.timeout_seconds"),
        ({"snapshot": {"repository": "https://git.example/a.git", "commit": "main"}}, "kubeflow.snapshot.commit"),
        ({"image_pull_policy": "Sometimes"}, "kubeflow.image_pull_policy"),
        ({"env": {"A": "1", "RLPIPE_RUN": "x", "RLPIPE_CACHE": "/c"}}, "begin with RLPIPE_ are rlpipe's own and set by it: RLPIPE_RUN, RLPIPE_CACHE$"),
        ({"time_limit": 3}, "unknown key kubeflow.time_limit"),
    ],
)
def test_what_cannot_work_is_refused_by_its_name(values: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(**values)


def test_a_quantity_may_be_written_as_a_number() -> None:
    assert config(resources={"default": {"cpu": 2}}).of("train").cpu == "2"


def test_a_tasks_own_keys_win_over_the_default() -> None:
    made = config(resources={"default": {"cpu": "2", "memory": "4Gi"}, "rollout": {"cpu": "8"}})
    assert (made.of("rollout").cpu, made.of("rollout").memory) == ("8", "4Gi")
    assert (made.of("train").cpu, made.of("train").memory) == ("2", "4Gi")


def test_a_key_at_its_default_wins_too_where_it_is_written() -> None:
    made = config(resources={"default": {"timeout_seconds": 60}, "rollout": {"timeout_seconds": 14_400}})
    assert made.of("rollout").timeout_seconds == 14_400


def test_written_out_and_read_back_a_task_gets_the_same() -> None:
    """Keys that were not given for a task stay so, and `default`'s stand for them."""
    once = raw(resources={"default": {"timeout_seconds": 3600}, "rollout": {"cpu": 8}})
    written = steps.resolved(once)
    assert written["kubeflow"]["resources"] == {"default": {"timeout_seconds": 3600}, "rollout": {"cpu": "8"}}
    back = steps.configs(written)["kubeflow"]
    assert (back.of("rollout").cpu, back.of("rollout").timeout_seconds) == ("8", 3600)
    assert back.of("rollout") == steps.configs(once)["kubeflow"].of("rollout")


def test_every_task_has_a_time_limit_without_being_told() -> None:
    assert {config().of(task).timeout_seconds for task in TASKS} == {14_400}


def test_a_secret_goes_to_the_tasks_it_names() -> None:
    made = config(**EVERYTHING)
    assert [secret.name for secret in made.secrets_of("rollout")] == ["hub", "mlflow"]
    assert [secret.name for secret in made.secrets_of("filter")] == ["mlflow"]


def test_the_section_with_every_key_is_accepted_and_survives_being_written_out() -> None:
    """Of what is read back, every key is as it was given."""
    found = steps.configs(raw(**EVERYTHING))["kubeflow"]
    assert params.validated(KubeflowConfig, params.resolved(found), "kubeflow") == found
    assert set(EVERYTHING) | {"run_timeout_seconds", "max_spec_kb"} == set(KubeflowConfig.model_fields)
