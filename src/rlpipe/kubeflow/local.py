"""`rlpipe run --on kfp-local` and `--on kfp-docker`: the compiled pipeline on kfp's local runners, its artifacts put where `rlpipe run` puts them."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlpipe import artifact, layout, params, records
from rlpipe.errors import ConfigError, DeadlineError, RlpipeError, RunFailedError
from rlpipe.kubeflow import compile as pipelines
from rlpipe.kubeflow import wire
from rlpipe.kubeflow.collecting import check_whole, collect
from rlpipe.kubeflow.pod import FAILURE, FINISHED, MODULES, PARENT, RUN_ENDS
from rlpipe.kubeflow.streaming import Lines
from rlpipe.session import Session
from rlpipe.tracking_place import URI, tracking_uri

log = logging.getLogger("rlpipe")

RUNNERS = ("kfp-local", "kfp-docker")
FOLDER = Path(".rlpipe/kfp")
"""Where kfp's runners keep what tasks write, in the working folder; so that artifacts reach their places by renaming."""


def run(session: Session, runner: str, docker: Mapping[str, Any]) -> dict[str, Any]:
    """Run the pipeline of a session's params; returns the content of `reports/run.json`.

    Args:
        runner: one of `RUNNERS`.
        docker: arguments of docker's `containers.run` for every container, over the defaults.

    Raises:
        DeadlineError: a task or the whole run took too long.
        RunFailedError: a task failed in a way that rlpipe does not explain itself.
        RlpipeError: a task failed in a way that it does, as the type it has in process.
    """
    folder = session.workdir / FOLDER
    # what a killed run left finished
    collect(session.workdir, folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plan = pipelines.plan(session.raw, local=True)
    # kfp puts what a task is given on a command line, which the system bounds too
    sections, files = wire.shortened(plan.sections, str(folder / "params"))
    wire.put(files)
    plan = replace(plan, sections=sections)
    with _environment(session, folder, runner, plan.config.run_timeout_seconds):
        try:
            _execute(pipelines.build("post_training", plan), session.workdir, folder, runner, docker)
        finally:
            # what is finished stays so: the next run goes on from it
            collected = collect(session.workdir, folder)
            shutil.rmtree(folder)
    check_whole(collected, len(session.rounds))
    return _record(session)


def _execute(pipeline: Any, workdir: Path, folder: Path, runner: str, docker: Mapping[str, Any]) -> None:
    from kfp import local

    began = time.monotonic()
    local.init(runner=_runner(runner, workdir, docker), pipeline_root=str(folder), raise_on_error=True, enable_caching=False)
    with Lines(workdir / ".rlpipe" / f"{runner}.log") as lines, redirect_stdout(lines), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the images are not used by the subprocess runner
        try:
            pipeline()
        except (RuntimeError, ValueError) as error:
            # kfp's own words for a task that failed, and for one that left no output
            raise _failure(folder, error, lines.path) from error
    log.info("pipeline=%s runner=%s state=done seconds=%.1f log=%s", pipeline.name, runner, time.monotonic() - began, layout.relative(lines.path, workdir))


def _runner(runner: str, workdir: Path, docker: Mapping[str, Any]) -> Any:
    from kfp import local

    if runner == "kfp-local":
        return local.SubprocessRunner(use_venv=False)
    try:
        from docker.types import Mount

        defaults: dict[str, Any] = {
            "user": f"{os.getuid()}:{os.getgid()}",
            "read_only": True,
            "tmpfs": {"/tmp": "exec"},
            "mounts": [Mount(str(workdir), str(workdir), type="bind")],
            "environment": {name: os.environ[name] for name in (URI, FAILURE, FINISHED, RUN_ENDS, MODULES) if name in os.environ},
            "working_dir": str(workdir),
        }
        own = docker.get("environment", {})
        if not isinstance(own, Mapping):
            raise ConfigError("--docker environment needs a mapping", got=own, accepted="environment={NAME: value}")
        environment = {**defaults["environment"], **own}
        return local.DockerRunner(**{**defaults, **docker, "environment": environment})
    except ImportError as error:
        raise ConfigError("kfp's DockerRunner needs the package docker", got=str(error), do="pip install docker") from error
    except ValueError as error:
        raise ConfigError("docker's containers.run takes no such argument", got=str(error)) from error


@contextmanager
def _environment(session: Session, folder: Path, runner: str, seconds: int) -> Iterator[None]:
    """What tasks find: where to track, where to say why they failed, what is finished, the folder's own modules, when to end, whom not to outlive."""
    values = {URI: tracking_uri(session.workdir), FAILURE: str(folder / "failure.json"), RUN_ENDS: str(time.time() + seconds)}
    values |= {MODULES: os.pathsep.join(dict.fromkeys([str(session.workdir), os.getcwd()]))}
    values |= {} if session.fresh else {FINISHED: str(session.workdir)}
    values |= {PARENT: str(os.getpid())} if runner == "kfp-local" else {}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _failure(folder: Path, error: Exception, output: Path) -> RlpipeError:
    """The failure as the task explained it, of the type it has in process; else where to read on."""
    try:
        said = json.loads((folder / "failure.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return RunFailedError("a task failed on kfp's local runner", got=str(error), do=f"see {output}")
    kinds = {kind.__name__: kind for kind in _kinds(RlpipeError)}
    kind = kinds.get(said["type"], RunFailedError)
    return kind(f"{said['task']}: {said['message']}", got=f"state {said['state']}" if kind is DeadlineError else None)


def _kinds(kind: type[RlpipeError]) -> Iterator[type[RlpipeError]]:
    yield kind
    for inner in kind.__subclasses__():
        yield from _kinds(inner)


def _record(session: Session) -> dict[str, Any]:
    """Record every stage with DVC, as `rlpipe run` does, and tell MLflow the hashes of the policies."""
    from rlpipe import versioning

    for index in range(len(session.rounds) + 1):
        session.commit(index, [f"{step}@{index - 1}" for step in layout.ROUND_STEPS] if index else ["model", "tasks", "start"], changed=True)
        policy = session.workdir / layout.artifact_path("policy", index)
        session.tracker.tag_policy(artifact.read_manifest(policy)["fingerprint"], "dvc", versioning.dvc_hash(policy))
    return records.write_run(session.workdir, len(session.rounds))


def parsed(assignments: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` arguments for docker, the values read as YAML.

    Raises:
        ConfigError: an argument without `=`.
    """
    found = {}
    for assignment in assignments:
        key, separator, text = assignment.partition("=")
        if not separator:
            raise ConfigError("--docker needs KEY=VALUE", got=assignment)
        found[key] = params.parse_scalar(text)
    return found
