"""What the Kubeflow server's refusals and silences mean to the person who asked, one error a kind."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import urllib3

from rlpipe.errors import ClusterError
from rlpipe.kubeflow.auth import COOKIES, TOKEN


class UnansweredError(ClusterError):
    """No answer, or one that says nothing about the request (500, 502, 503, 504): it may have been carried out or not."""


class UnreachableError(UnansweredError):
    """There was no connection: the request was not carried out."""


class ConflictError(ClusterError):
    """409: what should be made exists already."""


UNANSWERED = (500, 502, 503, 504)
SIGN_IN = f"give a valid token ({TOKEN} or --token-file) or cookies ({COOKIES} or --cookie-file); those given may have expired"
REFUSALS = {
    400: ("the Kubeflow server finds something wrong in the request", "change what it names"),
    401: ("the Kubeflow server does not know who is asking", SIGN_IN),
    403: ("the Kubeflow server does not allow this", "ask for a role in the namespace; where several users share a server, name yours with --namespace"),
    404: ("the Kubeflow server does not have this", "check the id and --host; the address of a deployment with a dashboard ends in /pipeline"),
    409: ("the Kubeflow server has this already", "look at what is there, or give another name"),
    429: ("the Kubeflow server is asked too often", "wait, then run the same command again"),
}


def refused(what: str, status: int, body: Any, headers: Any) -> ClusterError:
    """The error for an answer that is not a success."""
    said = said_in(body)
    got = f"{status} for: {what}" + (f" ({said})" if said else "")
    if status in UNANSWERED:
        return UnansweredError("the Kubeflow server failed", got=got, do="look at its own logs, or run the same command again later")
    if 300 <= status < 400:
        place = urlsplit(str((headers or {}).get("location", "")))
        where = f"{place.scheme}://{place.netloc}{place.path}" if place.netloc else place.path
        return ClusterError("the Kubeflow server sends elsewhere, to sign in or to another address", got=f"{got}: {where}", do=f"{SIGN_IN}; or correct --host")
    problem, do = REFUSALS.get(status, ("the Kubeflow server refused", "look at its own logs"))
    return (ConflictError if status == 409 else ClusterError)(problem, got=got, do=do)


def unanswered(what: str, error: urllib3.exceptions.HTTPError, host: str) -> ClusterError:
    """The error for a request that got no answer."""
    reason = getattr(error, "reason", None) or error
    got = f"{type(reason).__name__} for: {what} ({str(reason)[:300]})"
    if isinstance(reason, urllib3.exceptions.SSLError):
        return ClusterError(f"no safe connection to {host}", got=got, do="give the authority that signed its certificate: --ca-cert FILE")
    if isinstance(reason, (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)):
        return UnreachableError(f"no connection to {host}", got=got, do="check --host, and the port-forward if there is one")
    return UnansweredError(f"no answer from {host}", got=got, do="run the same command again later")


def not_the_api(what: str, got: str) -> ClusterError:
    """The error for a success that is not what the API documents: a sign-in page, another service, another version."""
    do = f"check --host (the address of a deployment with a dashboard ends in /pipeline); {SIGN_IN}"
    return ClusterError("what answers there is not the Kubeflow Pipelines API", got=f"{got} for: {what}", do=do)


def said_in(body: Any) -> str:
    """The server's own words in the body of an answer, in one line of at most 300 characters."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else str(body or "")
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    if isinstance(content, dict):
        text = next((str(content[key]) for key in ("message", "error", "error_message") if content.get(key)), "")
    elif text.lstrip().startswith("<"):
        return "an HTML page"
    return " ".join(text.split())[:300]
