"""A working folder: its params, its `dvc.yaml`, its DVC repository, and the lock that keeps it to one run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from rlpipe import artifact, params, steps
from rlpipe.errors import ConfigError

log = logging.getLogger("rlpipe")

PARAMS, PIPELINE = "params.yaml", "dvc.yaml"
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


def prepare(workdir: Path, given: Path | None, assignments: Sequence[str], num_rounds: int | None) -> dict[str, Any]:
    """Make `workdir` a DVC workspace that holds the params of this run; returns the params.

    Raises:
        ConfigError: the params are missing or wrong; nothing was written then.
    """
    source = find_params(workdir, given)
    raw = params.override(params.read_yaml(source), assignments)
    if num_rounds is not None:
        raw["rounds"] = steps.round_list(num_rounds)
    elif "rounds" not in raw:
        raw["rounds"] = steps.round_list(1)
    steps.configs(raw)
    workdir.mkdir(parents=True, exist_ok=True)
    _write_params(workdir, source, raw)
    _write_pipeline(workdir)
    from rlpipe import versioning

    versioning.ensure_repo(workdir)
    return raw


def _write_params(workdir: Path, source: Path, raw: dict[str, Any]) -> None:
    """Write the resolved params unless the folder's own file already says the same."""
    own = workdir / PARAMS
    if own.is_file():
        present = params.read_yaml(own)
        if present == raw or present == steps.resolved(raw):
            return
        kept = next(place for i in range(1, 1000) if not (place := own.with_name(f"{PARAMS}.{i}.orig")).exists())
        own.replace(kept)
        log.info("params=%s state=replaced kept=%s", PARAMS, kept.name)
    text = StringIO()
    _yaml().dump(steps.resolved(raw), text)
    artifact.write_text(own, MARK + text.getvalue())


def _write_pipeline(workdir: Path) -> None:
    """Write the shipped `dvc.yaml` without its deps on rlpipe's source, where the folder has none."""
    own = workdir / PIPELINE
    if own.is_file():
        return
    content = params.read_yaml(shipped(PIPELINE))
    for stage in content["stages"].values():
        body = stage.get("do", stage)
        body["deps"] = [dep for dep in body.get("deps", []) if not dep.startswith("src/")]
        if not body["deps"]:
            del body["deps"]
    text = StringIO()
    _yaml().dump(content, text)
    artifact.write_text(own, MARK + text.getvalue())
    log.info("pipeline=%s state=written", PIPELINE)


def _yaml() -> Any:
    from ruamel.yaml import YAML

    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = 160
    return yaml


@contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Keep a working folder to one run; the lock of a dead process is free at once.

    Raises:
        ConfigError: another process is at work in this folder.
    """
    from filelock import FileLock, Timeout

    place = workdir / ".rlpipe" / "lock"
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError("the working folder is not a folder", got=str(workdir), do="give another --workdir") from error
    try:
        with FileLock(place, timeout=0):
            yield
    except Timeout as error:
        raise ConfigError("another run is at work in this folder", got=str(workdir), do="wait for it, or use another --workdir") from error
