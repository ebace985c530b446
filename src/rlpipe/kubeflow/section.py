"""Section `kubeflow` of params.yaml: images, resources, secrets, caches and time limits of every task. No secret's value is ever in it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_serializer, field_validator, model_validator

from rlpipe.errors import ConfigError
from rlpipe.params import Section

TaskName = Literal[
    "preflight",
    "start",
    "start_from",
    "snapshot_start",
    "decide",
    "rollout",
    "gather",
    "filter",
    "reward",
    "train",
    "evaluate",
    "promote",
    "snapshot",
    "finish",
]
"""Every task of a pipeline, by the name of its component."""
TASKS: tuple[str, ...] = get_args(TaskName)
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|K|Ki|M|Mi|G|Gi|T|Ti)?$", coerce_numbers_to_str=True)]
"""A Kubernetes quantity, such as `500m`, `2` or `16Gi`."""
DnsName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
"""The name of a Kubernetes object."""
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
OWN_ENV = "RLPIPE_"
"""How the variables begin that rlpipe itself gives to its tasks."""


def check_url(url: str) -> None:
    """Refuse a repository URL that carries a password or token, without repeating it.

    Raises:
        ConfigError: it does, or it reads as an option of git.
    """
    scheme, _, rest = url.partition("://")
    web = scheme.lower() in ("http", "https")
    user, at, _ = rest.split("/", 1)[0].rpartition("@")
    carried = "a user or password" if at and (web or ":" in user) else "a query, where a token may stand" if web and "?" in rest else None
    if carried:
        do = "take it out, and give it to the task in a secret as GIT_USERNAME and GIT_PASSWORD; what was written down should be revoked"
        raise ConfigError(f"kubeflow.snapshot.repository carries {carried}", accepted="a URL without user, password and query", do=do)
    if url.startswith("-"):
        raise ConfigError("kubeflow.snapshot.repository is not a URL", got=url)


class Images(Section):
    """Where the images come from; replaces the literals of `components/` when a pipeline is compiled."""

    prefix: str | None = Field(None, min_length=1)
    """Registry and folder, such as `registry.example/team`; None keeps the literal's."""
    tag: str | None = Field(None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")
    """None keeps the literal's, which is rlpipe's version; `latest` is refused."""
    digests: dict[str, Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]] = Field(default_factory=dict)
    """`sha256:…` by image name (`rollout`, `train`, `reward`, …); a digest wins over the tag."""

    @model_validator(mode="after")
    def _not_latest(self) -> Images:
        if self.tag == "latest":
            raise ValueError("tag latest names another image tomorrow; give a version")
        return self


class Accelerator(Section):
    """GPUs or other devices of one task."""

    type: str = "nvidia.com/gpu"
    """The resource name that the cluster's device plugin offers."""
    count: int = Field(1, ge=1)


class Toleration(Section):
    """A Kubernetes toleration."""

    key: str | None = None
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str | None = None
    effect: Literal["NoExecute", "NoSchedule", "PreferNoSchedule"] | None = None
    toleration_seconds: int | None = Field(None, ge=0)


class Retries(Section):
    """How often a task that failed is started again. Steps are safe to repeat: an unfinished artifact is never believed."""

    num: int = Field(2, ge=0)
    backoff_seconds: int = Field(30, ge=0)
    backoff_factor: float = Field(2.0, ge=1)
    max_backoff_seconds: int = Field(600, ge=0)


class Resources(Section):
    """What one task gets. In `kubeflow.resources`, keys given for a task win over those of `default`."""

    cpu: Quantity | None = None
    memory: Quantity | None = None
    accelerator: Accelerator | None = None
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    timeout_seconds: int = Field(14_400, ge=1)
    """The task is ended after this time, by Kubernetes and by the task itself, whichever comes first."""
    retries: Retries = Retries()
    shared_memory: Quantity | None = None
    """Size of /dev/shm, which vLLM and NCCL use between processes; None leaves the cluster's 64 MB."""


class Secret(Section):
    """A Kubernetes secret, by reference, as environment variables or as files."""

    name: DnsName
    env: dict[str, EnvName] = Field(default_factory=dict)
    """Environment variable by the secret's key: `{token: HF_TOKEN}`."""
    folder: str | None = Field(None, pattern=r"^/.+")
    """Where its keys are mounted as files."""
    tasks: tuple[TaskName, ...] = ()
    """The tasks that get it; empty is all."""

    @model_validator(mode="after")
    def _used(self) -> Secret:
        if not self.env and self.folder is None:
            raise ValueError("a secret needs env, a folder, or both")
        return self


class ModelCache(Section):
    """A volume that keeps fetched models from one run to the next, for the tasks that load models."""

    claim: DnsName
    """The PersistentVolumeClaim."""
    folder: str = Field("/cache/rlpipe", pattern=r"^/.+")
    """Where it is mounted; `RLPIPE_CACHE` of the task."""


class Snapshot(Section):
    """Where each round's artifacts are recorded with DVC: a clone of this repository, pushed as a branch of its own."""

    repository: str = Field(min_length=1)
    """URL of the git repository with `dvc.yaml`, without user, password or query.

    Those come from a secret as `GIT_USERNAME` and `GIT_PASSWORD`, or as an ssh key in a file that `GIT_SSH_KEY` names.
    """
    commit: str = Field(pattern=r"^[0-9a-f]{7,40}$")
    """The commit whose `dvc.yaml` and code this run is of; its artifacts go into a clone of it."""
    folder: str = "."
    """The folder with `dvc.yaml` inside the repository."""
    remote: str | None = None
    """The DVC remote to push to; None is the repository's default."""
    branch_prefix: str = Field("runs/", min_length=1)

    @field_validator("repository")
    @classmethod
    def _without_credentials(cls, repository: str) -> str:
        check_url(repository)
        return repository


class KubeflowConfig(Section):
    """Section `kubeflow`."""

    experiment: str = Field("rlpipe", min_length=1)
    images: Images = Images()
    resources: dict[Literal["default"] | TaskName, Resources] = Field(default_factory=dict)
    """What each task gets, by its name or `default`."""
    secrets: tuple[Secret, ...] = ()
    env: dict[EnvName, str] = Field(default_factory=dict)
    """Plain environment variables of every task, such as `MLFLOW_TRACKING_URI`. Never a secret: the pipeline shows them. `RLPIPE_…` are rlpipe's own."""
    model_cache: ModelCache | None = None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: tuple[DnsName, ...] = ()
    service_account: DnsName | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of every pod."""
    caching: bool = False
    """Whether Kubeflow may take a task's outputs from its cache.

    It does not look whether they still exist; the next step does, and refuses one that is damaged or missing.
    """
    snapshot: Snapshot | None = None
    params_store: str | None = Field(None, min_length=1)
    """A folder or bucket (`s3://…`, `gs://…`, `file://…`) that tasks can read.

    A section over 10,000 characters, which Kubeflow refuses as a parameter, is put there and sent by reference.
    """
    run_timeout_seconds: int = Field(172_800, ge=1)
    """How long a whole run may take: `submit --wait` ends it then, and so does a run on a local runner."""
    max_spec_kb: int = Field(900, ge=1)
    """A compiled pipeline larger than this is refused: Kubeflow must hold it in one Kubernetes object."""

    @field_validator("env")
    @classmethod
    def _not_our_own(cls, env: dict[str, str]) -> dict[str, str]:
        if own := [name for name in env if name.startswith(OWN_ENV)]:
            raise ValueError(f"variables that begin with {OWN_ENV} are rlpipe's own and set by it: {', '.join(own)}")
        return env

    @field_serializer("resources")
    def _as_given(self, resources: dict[str, Resources]) -> dict[str, Any]:
        # a default that is written out would read back as given for the task, and win over the key of `default`
        return {name: given.model_dump(mode="json", exclude_unset=True) for name, given in resources.items()}

    def of(self, task: str) -> Resources:
        """What `task` gets: its own keys over those of `default`."""
        values: dict[str, Any] = {}
        for name in ("default", task):
            if name in self.resources:
                given = self.resources[name]
                values |= {key: getattr(given, key) for key in given.model_fields_set}
        return Resources(**values)

    def secrets_of(self, task: str) -> tuple[Secret, ...]:
        """The secrets that `task` gets."""
        return tuple(secret for secret in self.secrets if not secret.tasks or task in secret.tasks)
