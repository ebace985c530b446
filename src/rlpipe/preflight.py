"""Whether what a run needs is there, before anything is spent on it. Nothing is changed and nothing downloaded.

Every check is one function that returns what it found. All of them run, at the same time, so that all problems are known
at once. Of a secret only its presence is looked at; no finding, log line or error holds a value of one.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlpipe import artifact, layout, params, probing, space, steps
from rlpipe.errors import ConfigError, EngineError, PreflightError, RlpipeError
from rlpipe.kubeflow.section import KubeflowConfig, Secret
from rlpipe.redaction import without_secrets

log = logging.getLogger("rlpipe")

CHECK_SECONDS = 20.0
"""How long all checks together may take; one without an answer by then has failed."""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        do: the next thing to try; None where nothing is wrong.
    """

    name: str
    ok: bool
    detail: str
    do: str | None = None


def findings(raw: Mapping[str, Any], *, workdir: Path, secrets: Sequence[Secret] = (), installed: bool = False) -> list[Finding]:
    """Every check on a run with these params.

    Args:
        raw: the params as read.
        workdir: where artifacts will lie; need not exist yet.
        secrets: those this process should have been given.
        installed: the steps run in this very environment, so the packages they need are checked too.
    """
    checks: dict[str, Callable[[], list[Finding]]] = {
        "params": partial(params_are_valid, raw),
        "secrets": partial(secrets_are_there, secrets),
        "tracking": partial(tracking_answers, raw, workdir),
        "model": partial(model_is_reachable, raw),
        "engine": partial(engine_answers, raw),
        "tasks": partial(tasks_are_there, raw, [workdir]),
        "rewards": partial(rewards_are_there, raw, workdir),
        "repository": partial(repository_answers, raw),
        "space": partial(space_is_free, raw, workdir),
        **({"packages": partial(packages_are_installed, raw)} if installed else {}),
    }
    running = {name: _started(check) for name, check in checks.items()}
    ends = time.monotonic() + CHECK_SECONDS
    found = [finding for name, future in running.items() for finding in _found(name, future, ends)]
    return [replace(finding, detail=without_secrets(finding.detail), do=finding.do and without_secrets(finding.do)) for finding in found]


def require(found: Sequence[Finding]) -> None:
    """Log one line a finding, and go on only if nothing failed.

    Raises:
        PreflightError: names every check that failed, and what to do.
    """
    for finding in found:
        log.info("check=%s state=%s detail=%s", finding.name.replace(" ", "_"), "ok" if finding.ok else "failed", finding.detail)
    failed = [finding for finding in found if not finding.ok]
    if failed:
        lines = [f"  {finding.name}: {finding.detail}" + (f"; do: {finding.do}" if finding.do else "") for finding in failed]
        raise PreflightError("\n".join([f"{len(failed)} of {len(found)} preflight checks failed", *lines]))


def _started(check: Callable[[], list[Finding]]) -> Future[list[Finding]]:
    """The check in a thread that nothing waits for at exit: what hangs in a name server or a file system cannot be called off."""
    future: Future[list[Finding]] = Future()

    def work() -> None:
        try:
            future.set_result(check())
        except Exception as error:  # handed on: it is raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def _found(name: str, future: Future[list[Finding]], ends: float) -> list[Finding]:
    try:
        return future.result(max(0.0, ends - time.monotonic()))
    except TimeoutError:
        return [Finding(name, False, f"no answer within {CHECK_SECONDS:g} s", "see what keeps it waiting: the network, a name server, a file system")]
    except ConfigError:
        # its section is wrong: the check of the params says how
        return [Finding(name, False, "not checked, since its section of the params is wrong", "mend the params")]


def _failed(name: str, error: RlpipeError) -> Finding:
    detail = error.what + (f": {error.got}" if error.got is not None else "") + (f"; accepted: {error.accepted}" if error.accepted is not None else "")
    return Finding(name, False, detail, error.do)


def params_are_valid(raw: Mapping[str, Any]) -> list[Finding]:
    """Every section of the params; all wrong keys are named, not only the first section's."""
    from rlpipe.tasks import TasksConfig
    from rlpipe.tracking import TrackingConfig

    problems = _problems(partial(params.check_top_level, raw))
    if not problems:
        for name in layout.MODULES:
            problems += _problems(partial(steps.config, name, raw))
        for kind, name in ((TasksConfig, "tasks"), (TrackingConfig, "tracking"), (KubeflowConfig, "kubeflow")):
            problems += _problems(partial(params.section, kind, raw, name))
    problems = list(dict.fromkeys(problems)) or [*_problems(partial(steps.configs, raw)), *_problems(partial(steps.rounds, raw))]
    if problems:
        return [Finding("params", False, "; ".join(problems), "mend these keys of the params")]
    return [Finding("params", True, f"valid, {len(steps.rounds(raw))} rounds")]


def _problems(check: Callable[[], Any]) -> list[str]:
    """The lines of what a check of params complains about; a shared key by the name it has at the top level."""
    try:
        check()
    except ConfigError as error:
        shared = rf"\b(?:{'|'.join(layout.MODULES)})\.({'|'.join(params.SHARED)})\b"
        return [re.sub(shared, r"\1", line) for line in str(error).splitlines()]
    return []


def secrets_are_there(secrets: Sequence[Secret]) -> list[Finding]:
    """Each secret by its variables and its folder; what is in them is not read."""
    return [_secret(secret) for secret in secrets]


def _secret(secret: Secret) -> Finding:
    missing = [f"variable {name} is not set or empty" for name in secret.env.values() if not os.environ.get(name, "").strip()]
    if secret.folder and not any(path.is_file() for path in _entries(Path(secret.folder))):
        missing.append(f"folder {secret.folder} has no files")
    do = f"create the Kubernetes secret {secret.name} with the keys {', '.join(secret.env) or 'that are wanted as files'}, or mend kubeflow.secrets"
    return Finding(f"secret {secret.name}", not missing, "; ".join(missing) or "there", do if missing else None)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def tracking_answers(raw: Mapping[str, Any], workdir: Path) -> list[Finding]:
    """The MLflow server, or the place of its database file."""
    from rlpipe.tracking import TrackingConfig
    from rlpipe.tracking_place import tracking_uri

    if not params.section(TrackingConfig, raw, "tracking").enabled:
        return [Finding("tracking", True, "switched off")]
    try:
        uri = tracking_uri(workdir)
    except ConfigError as error:
        return [_failed("tracking", error)]
    return [Finding("tracking", *probing.tracking(uri))]


def model_is_reachable(raw: Mapping[str, Any]) -> list[Finding]:
    """The start model: made here, in a cache, in a complete folder, or where it can be fetched from."""
    from rlpipe.policies import fetch, smollm2

    path = steps.config("model", raw).model.path
    folder = Path(path).expanduser()
    if path == fetch.CHAR_LM:
        return [Finding("model", True, "char-lm is made here")]
    if path == smollm2.NAME:
        cached = (smollm2.place(fetch.cache_folder()) / artifact.MANIFEST).is_file()
        return [Finding("model", True, "in the cache") if cached else Finding("model", *probing.package(smollm2.REQUIREMENT))]
    if folder.is_dir():
        return [_model_folder(folder)]
    if fetch.HUB_ID.fullmatch(path):
        return [Finding("model", *probing.hub(path))]
    return [Finding("model", False, f"no folder {path}", "set model.path to a Hugging Face folder or id, or to a built-in name")]


def _model_folder(folder: Path) -> Finding:
    from rlpipe.policies.fetch import check_folder

    try:
        check_folder(folder)
    except ConfigError as error:
        return _failed("model", error)
    except (OSError, ValueError, KeyError) as error:
        return Finding("model", False, f"{folder} cannot be read: {type(error).__name__}", "write the model's folder again")
    return Finding("model", True, f"{folder} is complete")


def engine_answers(raw: Mapping[str, Any]) -> list[Finding]:
    """The server that generates, where it is a remote one: it answers and serves the model."""
    try:
        engine = steps.config("rollout", raw).engine
    except ConfigError:
        return []  # the check of the params names it
    if engine.type != "openai":
        return []
    from rlpipe.engines.openai_engine import served_model

    try:
        model = served_model(engine, probing.REQUEST_SECONDS)
    except EngineError as error:
        return [_failed("engine", error)]
    return [Finding("engine", True, f"{engine.base_url} serves {model}")]


def tasks_are_there(raw: Mapping[str, Any], folders: Sequence[Path] = ()) -> list[Finding]:
    """The sources of both splits: a file that is there, in `folders` or as named, or a generator that makes a task with these settings."""
    from rlpipe.tasks import TasksConfig

    config = params.section(TasksConfig, raw, "tasks")
    return [_tasks("train", config.train, folders), _tasks("eval", config.eval, folders)]


def _tasks(split: Any, source: Any, folders: Sequence[Path]) -> Finding:
    from rlpipe import task_sources

    name = f"tasks {split}"
    if task_sources.names_a_file(source.source, folders):
        there = task_sources.file_of(source.source, folders).is_file()
        return Finding(name, there, f"{source.source} {'is there' if there else 'not found'}", None if there else f"set tasks.{split}.source")
    try:
        task_sources.make(source.source, split, 1, source.seed, source.options)
    except RlpipeError as error:
        return _failed(name, error)
    return Finding(name, True, f"{source.source} makes tasks")


def rewards_are_there(raw: Mapping[str, Any], workdir: Path) -> list[Finding]:
    """The modules of custom rewards; they are found and read, not imported."""
    from rlpipe.reward import own_code
    from rlpipe.reward.section import custom_paths

    found = []
    for path in custom_paths([*steps.config("reward", raw).rewards, *steps.config("evaluate", raw).rewards]):
        try:
            own_code.check(path, [workdir, Path.cwd()])
            found.append(Finding(f"reward {path}", True, "found"))
        except ConfigError as error:
            found.append(_failed(f"reward {path}", error))
    return found


def repository_answers(raw: Mapping[str, Any]) -> list[Finding]:
    """The git repository that rounds are recorded in, where there is one: it can be read; pushing is not tried."""
    from rlpipe.kubeflow import git

    snapshot = params.section(KubeflowConfig, raw, "kubeflow").snapshot
    if snapshot is None:
        return []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            git.init(snapshot.repository, Path(scratch)).git("ls-remote", "--quiet", "origin", "HEAD")
        except RlpipeError as error:
            return [_failed("repository", error)]
    return [Finding("repository", True, f"{snapshot.repository} can be read")]


def space_is_free(raw: Mapping[str, Any], workdir: Path) -> list[Finding]:
    """Room for the run's policies in the working folder, and for temporary files."""
    wanted, what = space.wanted(steps.config("model", raw).model, keeps_moments=steps.config("train", raw).optimizer_state == "keep")
    temporary = Path(tempfile.gettempdir())
    return [
        Finding("space workdir", *space.free(workdir, wanted, what)),
        Finding("space temporary", *space.free(temporary, space.TEMPORARY_BYTES, "temporary files")),
    ]


def packages_are_installed(raw: Mapping[str, Any]) -> list[Finding]:
    """The optional packages that the engine, the backend, tracking and the checks of these params need."""
    wanted = {"great_expectations": "checks", "dvc": "versioning"}
    wanted |= {"mlflow": "tracking"} if (raw.get("tracking") or {}).get("enabled", True) else {}
    wanted |= {"vllm": "vllm"} if steps.config("rollout", raw).engine.type == "vllm" else {}
    wanted |= {"deepspeed": "deepspeed"} if steps.config("train", raw).backend.type == "deepspeed" else {}
    there = {name: importlib.util.find_spec(name) is not None for name in wanted}
    return [
        Finding(f"package {name}", there[name], "installed" if there[name] else "not installed", None if there[name] else f"pip install 'rlpipe[{extra}]'")
        for name, extra in wanted.items()
    ]
