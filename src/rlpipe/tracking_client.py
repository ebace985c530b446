"""MLflow's client, opened so that it gives up soon and says nothing, and the one boundary where what it raises ends."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe.errors import RlpipeError, TrackingError
from rlpipe.tracking_place import check_reachable, quiet, reason

if TYPE_CHECKING:
    from mlflow import MlflowClient


@contextmanager
def answering(what: str) -> Iterator[None]:
    """The boundary to MLflow and the libraries below it, which share no base class.

    Raises:
        TrackingError: whatever they raised, as class and one sentence.
    """
    try:
        with quiet():
            yield
    except RlpipeError:
        raise
    except Exception as error:
        do = "see that the server runs and MLFLOW_TRACKING_URI names it; what a run could not send is kept for `rlpipe sync`"
        raise TrackingError(f"MLflow did not take or answer: {what}", got=reason(error), do=do) from error


def opened(uri: str, timeout: int) -> MlflowClient:
    """A client of this store; `timeout` in seconds is that of one request. Nothing is tried twice: a request that was done and not
    answered would be done again, and what is not answered is spooled."""
    check_reachable(uri, timeout)
    for name, value in {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": timeout,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": 0,
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": 0,
        "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": 0,
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
    }.items():
        os.environ.setdefault(name, str(value))
    from mlflow import MlflowClient

    for name in ("alembic", "mlflow"):  # after the import, which sets a level itself
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    with _alone(uri):
        client = MlflowClient(tracking_uri=uri, registry_uri=os.environ.get("MLFLOW_REGISTRY_URI") or uri)
        client.search_experiments(max_results=1)
    return client


def _alone(uri: str) -> AbstractContextManager[object]:
    """One process at a time for a sqlite store: MLflow makes its tables at the first use, and two that do so together fail."""
    from filelock import FileLock

    if not uri.startswith("sqlite:///"):
        return nullcontext()
    place = Path(uri.removeprefix("sqlite:///"))
    return FileLock(place.with_name(f".{place.name}.lock"))
