"""A working folder: its params, its `dvc.yaml`, its DVC repository, and the lock that keeps it to one run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from rlpipe import artifact, layout, params, steps
from rlpipe.errors import ConfigError
from rlpipe.reward.section import check_custom

log = logging.getLogger("rlpipe")

PARAMS, PIPELINE = "params.yaml", "dvc.yaml"
OWN_REWARDS = ("reward", "start", "evaluate")
"""Stages that score with the user's own code."""
MARK = "# Written by rlpipe run.\n"


def shipped(name: str) -> Path:
    """A file that comes with rlpipe: `params.yaml`, `dvc.yaml`, `configs/tiny.yaml`; in a checkout, the checkout's own."""
    package = Path(__file__).parent
    for place in (package.parents[1] / name, package / "shipped" / name):
        if place.is_file():
            return place
    raise ConfigError("rlpipe ships no such file", got=name, accepted="params.yaml, dvc.yaml, configs/tiny.yaml, configs/micro.yaml")


def find_params(workdir: Path, given: Path | None) -> Path:
    """The params file to use: the given one (shipped configs go by their name too), the folder's own, or the shipped one."""
    if given is not None:
        if given.is_file() or not str(given).startswith("configs/"):
            return given
        return shipped(str(given))
    own = workdir / PARAMS
    if own.is_file():
        return own
    log.info("params=%s state=shipped reason=none_in_the_working_folder", PARAMS)
    return shipped(PARAMS)


def read_params(workdir: Path, given: Path | None, assignments: Sequence[str], num_rounds: int | None = None) -> dict[str, Any]:
    """The params to use, with `--set` and `--rounds` applied; one round where nothing says how many.

    Raises:
        ConfigError: the params or the number of rounds are wrong.
    """
    if num_rounds is not None and num_rounds < 1:
        raise ConfigError("--rounds needs a positive number", got=num_rounds)
    raw = steps.switched(params.override(params.read_yaml(find_params(workdir, given)), assignments), assignments)
    if num_rounds is not None:
        raw["rounds"] = steps.round_list(num_rounds)
    raw.setdefault("rounds", steps.round_list(1))
    return raw


def prepare(workdir: Path, given: Path | None, assignments: Sequence[str], num_rounds: int | None) -> dict[str, Any]:
    """Make `workdir` a DVC workspace that holds the params of this run; returns the params.

    Raises:
        ConfigError: the params are missing or wrong; nothing was written then.
    """
    raw = read_params(workdir, given, assignments, num_rounds)
    sections = steps.configs(raw)
    check_custom([*sections["reward"].rewards, *sections["evaluate"].rewards], [workdir, Path.cwd()])
    workdir.mkdir(parents=True, exist_ok=True)
    write_params(workdir, raw)
    write_pipeline(workdir, raw)
    from rlpipe import versioning

    versioning.ensure_repo(workdir)
    return raw


def write_params(workdir: Path, raw: dict[str, Any]) -> None:
    """Write the resolved params unless the folder's own file already says the same."""
    own = workdir / PARAMS
    if own.is_file():
        present = params.read_yaml(own)
        if present == raw or present == steps.resolved(raw):
            return
        kept = next(place for i in range(1, 1000) if not (place := own.with_name(f"{PARAMS}.{i}.orig")).exists())
        own.replace(kept)
        log.info("params=%s state=replaced kept=%s", PARAMS, kept.name)
    artifact.write_text(own, params_text(steps.resolved(raw)))


def params_text(resolved: Mapping[str, Any]) -> str:
    """Resolved params as the text of a `params.yaml` that rlpipe wrote."""
    text = StringIO()
    _yaml().dump(dict(resolved), text)
    return MARK + text.getvalue()


def write_pipeline(workdir: Path, raw: dict[str, Any]) -> None:
    """Write the shipped `dvc.yaml`, its deps on rlpipe's source replaced by those on the user's files; one written by hand is left alone."""
    own = workdir / PIPELINE
    present = own.read_text(encoding="utf-8") if own.is_file() else None
    if present is not None and not present.startswith(MARK):
        return
    content = params.read_yaml(shipped(PIPELINE))
    users = user_files(workdir, raw)
    for name, stage in content["stages"].items():
        body = stage.get("do", stage)
        body["deps"] = [dep for dep in body.get("deps", []) if not dep.startswith("src/")] + users.get(name, [])
        if not body["deps"]:
            del body["deps"]
    text = StringIO()
    _yaml().dump(content, text)
    if present == MARK + text.getvalue():
        return
    artifact.write_text(own, MARK + text.getvalue())
    log.info("pipeline=%s state=written", PIPELINE)


def user_files(workdir: Path, raw: dict[str, Any]) -> dict[str, list[str]]:
    """What lies in the working folder and decides a stage's outputs: task files, a model folder, modules of custom rewards."""
    from rlpipe import task_sources
    from rlpipe.reward import own_code
    from rlpipe.reward.section import custom_paths

    sections = steps.configs(raw)
    folders = (workdir, Path.cwd())
    rewards = {name: [file for path in custom_paths(sections[name].rewards) for file in own_code.files(path, folders).values()] for name in OWN_REWARDS}
    model = Path(sections["model"].model.path).expanduser()
    sources = [task_sources.file_of(split.source, [workdir]) for split in (sections["tasks"].train, sections["tasks"].eval)]
    found = {"model": [model] if model.is_dir() else [], "tasks": [source for source in sources if source.is_file()], **rewards}
    return {name: _inside(workdir, paths) for name, paths in found.items()}


def _inside(workdir: Path, paths: Iterable[Path]) -> list[str]:
    """Those below `workdir` as seen from it, each once, without what stages write: a stage cannot depend on its own output."""
    root = os.path.abspath(workdir)
    relative = dict.fromkeys(Path(os.path.relpath(path.absolute(), root)) for path in paths)
    written = (layout.MODEL, layout.TRAIN_TASKS, layout.EVAL_TASKS)
    return [
        path.as_posix()
        for path in relative
        if path.parts[:1] not in ((), ("..",)) and not any(out.is_relative_to(path) or path.is_relative_to(out) for out in written)
    ]


def _yaml() -> Any:
    from ruamel.yaml import YAML

    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 160
    return yaml


def lock_place(workdir: Path) -> Path:
    """The lock file of a working folder."""
    return workdir / ".rlpipe" / "lock"


@contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Keep a working folder to one run; the lock of a dead process is free at once.

    Raises:
        ConfigError: another process is at work in this folder.
    """
    from filelock import FileLock, Timeout

    place = lock_place(workdir)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError("the working folder is not a folder", got=str(workdir), do="give another --workdir") from error
    try:
        with FileLock(place, timeout=0):
            yield
    except Timeout as error:
        raise ConfigError("another run is at work in this folder", got=str(workdir), do="wait for it, or use another --workdir") from error
