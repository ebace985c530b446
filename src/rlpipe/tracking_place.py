"""Where MLflow tracks to, and whether it can be reached; without importing it."""

from __future__ import annotations

import os
import re
import socket
import sqlite3
from pathlib import Path
from urllib.parse import urlsplit

from rlpipe.errors import ConfigError

URI = "MLFLOW_TRACKING_URI"
SCHEMES = ("sqlite", "http", "https", "postgresql", "mysql", "mssql", "databricks")
PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}


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


def without_user(text: str) -> str:
    """`text` with user names and passwords taken out of its URIs."""
    return re.sub(r"(\w://)[^/@\s]*@", r"\1", text)


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
