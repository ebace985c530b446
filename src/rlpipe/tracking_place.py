"""Where MLflow tracks to, whether it can be reached, what is said when it cannot, and how params are sent; without importing it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlpipe import layout
from rlpipe.errors import ConfigError
from rlpipe.params import SHARED

URI = "MLFLOW_TRACKING_URI"
SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
MAX_REASON_LENGTH = 120


def tracking_uri(workdir: Path) -> str:
    """The environment's `MLFLOW_TRACKING_URI`, else the sqlite file `mlflow.db` in the working folder; a folder `mlruns` changes nothing.

    Raises:
        ConfigError: a folder or `file:` URI, which MLflow refuses since 3.13.
    """
    uri = os.environ.get(URI, "").strip()
    if not uri:
        return f"sqlite:///{workdir.absolute() / 'mlflow.db'}"
    if uri.split(":", 1)[0].split("+", 1)[0] not in SCHEMES or (":" not in uri and uri != "databricks"):
        raise ConfigError(
            f"{URI} names a folder, which MLflow no longer tracks into",
            got=without_user(uri),
            accepted=f"a URI that begins with {', '.join(SCHEMES)}",
            do=f"unset {URI} to use mlflow.db in the working folder, or convert the folder with `mlflow migrate-filestore`",
        )
    return uri


def params_key(resolved: Mapping[str, Any]) -> str:
    """Hash of a run's resolved params; where it runs (`kubeflow`) does not count."""
    return _hash({name: value for name, value in resolved.items() if name != "kubeflow"})


def run_key(params: str, start_policy: str, tasks: Sequence[str]) -> str:
    """Hash of what decides a run: the key of its params, the fingerprints of its start policy and of its tasks."""
    return _hash([params, start_policy, *tasks])


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def without_user(text: str) -> str:
    """`text` with user names and passwords taken out of its URIs."""
    return re.sub(r"(\w://)[^/@\s]*@", r"\1", text)


def public(value: Any, workdir: Path) -> str:
    """A value as text without a password, and without a path of this machine."""
    text = without_user(str(value))
    if text.startswith(("/", "~")):
        text = layout.relative(Path(text).expanduser(), workdir)
    return text.replace(str(workdir), ".")


def flat(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested params as `section.key`; an empty mapping is a value."""
    for name, value in params.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def differing(step: str, params: Mapping[str, Any], run_params: Mapping[str, Any]) -> dict[str, Any]:
    """A step's params that are not the run's, by the names they have there; `start` takes evaluate's."""
    section, known = "evaluate" if step == "start" else step, dict(flat(run_params))
    named = {name if name.split(".")[0] in SHARED else f"{section}.{name}": value for name, value in flat(params)}
    return {name: value for name, value in named.items() if name not in known or known[name] != value}


def check_reachable(uri: str, timeout: float) -> None:
    """Fail at once where MLflow would try for minutes: it retries a database it cannot open fifteen times."""
    parts = urlsplit(uri)
    scheme = parts.scheme.split("+")[0]
    if scheme == "sqlite" and parts.path:
        connection = sqlite3.connect(parts.path[1:], timeout=timeout)
        connection.execute("BEGIN IMMEDIATE")
        connection.close()
    elif scheme in PORTS and parts.hostname:
        socket.create_connection((parts.hostname, parts.port or PORTS[scheme]), timeout).close()


@contextmanager
def quiet() -> Iterator[None]:
    """Within it urllib3, which others use too, logs nothing: what it fails at is said once, by the one who asked."""
    logger = logging.getLogger("urllib3")
    kept = logger.handlers, logger.propagate
    # not the level: each change of one walks over every logger of the process
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = kept


def reason(error: BaseException) -> str:
    """Class and one short sentence of an error, of the operating system's below it where there is one: the libraries between repeat themselves."""
    shown, below = error, error.__cause__ or error.__context__
    while below is not None:
        shown = below if isinstance(below, OSError) else shown
        below = below.__cause__ or below.__context__
    first = next(iter(without_user(str(shown)).strip().splitlines()), "").split(". ")[0]
    return f"{type(shown).__name__}: {first if len(first) <= MAX_REASON_LENGTH else first[: MAX_REASON_LENGTH - 1] + '…'}"
