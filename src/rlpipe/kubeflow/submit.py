"""Submit a compiled pipeline: its experiment, its version if one is to be kept on the server, and exactly one run."""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kfp_server_api
import yaml

from rlpipe.errors import ConfigError
from rlpipe.kubeflow.answers import not_the_api
from rlpipe.kubeflow.client import Server

log = logging.getLogger("rlpipe")


@dataclass(frozen=True)
class Package:
    """What is submitted: a compiled pipeline and the arguments of its parameters."""

    name: str
    version: str
    """Of its content: the same text has the same version."""
    text: str
    """The YAML that kfp's compiler writes, in one or two documents."""
    arguments: Mapping[str, Any]


def submit(
    server: Server,
    package: Package,
    *,
    experiment: str,
    run_name: str | None = None,
    service_account: str | None = None,
    ensured: bool = False,
) -> Any:
    """Create one run, and one only, however often the request has to be sent; returns it.

    Args:
        ensured: whether it runs a version that is kept on the server (see `ensure_version`) instead of carrying its own spec.

    Raises:
        ClusterError: the server refused, or cannot be reached.
    """
    source = run_source(server, package, ensured=ensured)
    experiment_id = ensure_experiment(server, experiment)
    marker = new_marker(package)
    name = run_name or f"{package.name} {datetime.now(UTC):%Y-%m-%d %H-%M-%S} {marker[-6:]}"
    body = kfp_server_api.V2beta1Run(experiment_id=experiment_id, display_name=name, description=marker, service_account=service_account, **source)
    listed = server.runs.run_service_list_runs
    find = _finder(server, "list runs", listed, "runs", {"display_name": name}, lambda run: run.description == marker, experiment_id=experiment_id)
    run = server.create(f"create run {name}", find, server.runs.run_service_create_run, run=body)
    return whole(run, "run_id", "create run")


def run_source(server: Server, package: Package, *, ensured: bool) -> dict[str, Any]:
    """The fields of a run or recurring run that say what is to be run."""
    config = kfp_server_api.V2beta1RuntimeConfig(parameters=dict(package.arguments))
    if not ensured:
        return {"pipeline_spec": pipeline_spec(package.text), "runtime_config": config}
    pipeline_id, version_id = ensure_version(server, package)
    reference = kfp_server_api.V2beta1PipelineVersionReference(pipeline_id=pipeline_id, pipeline_version_id=version_id)
    return {"pipeline_version_reference": reference, "runtime_config": config}


def new_marker(package: Package) -> str:
    """A description that no other submission has, so that what a lost answer was about can be found again."""
    return f"rlpipe {package.name} {package.version} submission {uuid.uuid4().hex}"


def pipeline_spec(text: str) -> dict[str, Any]:
    """The spec as the API takes it, with the platform's part where the YAML has a second document.

    Raises:
        ConfigError: the text is not what kfp's compiler writes.
    """
    try:
        documents = list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise ConfigError("the compiled pipeline is not YAML", got=" ".join(str(error).split())[:300]) from error
    if len(documents) not in (1, 2) or not all(isinstance(document, dict) for document in documents) or "root" not in documents[0]:
        raise ConfigError("this is no compiled pipeline", got=f"{len(documents)} YAML documents", do="make one with `rlpipe compile`")
    return documents[0] if len(documents) == 1 else {"pipeline_spec": documents[0], "platform_spec": documents[1]}


def ensure_experiment(server: Server, name: str) -> str:
    """The id of the experiment of this name, made where there is none."""
    listed = server.experiments.experiment_service_list_experiments
    find = _finder(server, "list experiments", listed, "experiments", {"display_name": name}, lambda one: one.display_name == name, **server.in_namespace)
    found = find()
    if found is None:
        body = kfp_server_api.V2beta1Experiment(display_name=name, namespace=server.namespace)
        found = server.create(f"create experiment {name}", find, server.experiments.experiment_service_create_experiment, experiment=body)
    return str(whole(found, "experiment_id", "create experiment").experiment_id)


def ensure_version(server: Server, package: Package) -> tuple[str, str]:
    """The ids of the pipeline and of the version with this content, made where there are none.

    The pipeline is made empty first: one uploaded at once would give its first version the pipeline's name.

    Raises:
        ClusterError: the server refused, or cannot be reached.
    """
    find = _finder(
        server, "list pipelines", server.pipelines.pipeline_service_list_pipelines, "pipelines", {"display_name": package.name},
        lambda one: one.display_name == package.name, **server.in_namespace,
    )  # fmt: skip
    pipeline = find()
    if pipeline is None:
        body = kfp_server_api.V2beta1Pipeline(display_name=package.name, name=package.name, namespace=server.namespace)
        pipeline = server.create(f"create pipeline {package.name}", find, server.pipelines.pipeline_service_create_pipeline, pipeline=body)
    pipeline_id = str(whole(pipeline, "pipeline_id", "create pipeline").pipeline_id)
    find_version = _finder(
        server, "list pipeline versions", server.pipelines.pipeline_service_list_pipeline_versions, "pipeline_versions", {"display_name": package.version},
        lambda one: one.display_name == package.version, pipeline_id=pipeline_id,
    )  # fmt: skip
    version = find_version()
    if version is None:
        version = _upload(server, package, pipeline_id, find_version)
    version_id = str(whole(version, "pipeline_version_id", "upload pipeline version").pipeline_version_id)
    log.info("pipeline=%s version=%s pipeline_id=%s version_id=%s", package.name, package.version, pipeline_id, version_id)
    return pipeline_id, version_id


def whole(made: Any, identity: str, what: str) -> Any:
    """`made`, which must have its id, a text.

    Raises:
        ClusterError: it has none: something else than the API answered.
    """
    found = getattr(made, identity, None)
    if not isinstance(found, str) or not found:
        raise not_the_api(what, f"JSON without {identity}")
    return made


def _upload(server: Server, package: Package, pipeline_id: str, find: Callable[[], Any | None]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pipeline.yaml"
        file.write_text(package.text, encoding="utf-8")
        what = f"upload version {package.version} of pipeline {package.name}"
        return server.create(what, find, server.uploads.upload_pipeline_version, str(file), name=package.version, pipelineid=pipeline_id)


def _finder(
    server: Server, what: str, call: Callable[..., Any], field: str, matching: Mapping[str, str], same: Callable[[Any], bool], **options: Any
) -> Callable[[], Any | None]:
    """A look-up of the one thing that `same` recognises; the server's filter only shortens the list."""

    def find() -> Any | None:
        return next((one for one in server.everything(what, call, field, matching=matching, **options) if same(one)), None)

    return find
