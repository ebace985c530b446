"""MLflow as the steps see it. A tracking server that is dead, slow or full costs nothing but time to sync later.

What is to be sent goes into a file first and leaves it once MLflow has taken it, so a kill, an outage or a full server loses nothing: the next
process of the folder, or `rlpipe sync`, sends the rest, in the same order, each once.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field

from rlpipe import layout
from rlpipe.errors import ConfigError, TrackingError
from rlpipe.params import Section
from rlpipe.tracking_client import answering, opened
from rlpipe.tracking_place import differing, flat, public, tracking_uri, without_user
from rlpipe.tracking_registry import accuracy
from rlpipe.tracking_run import TrackedRun, described
from rlpipe.tracking_spool import PLACE, Entry, Spool

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger("rlpipe")

T = TypeVar("T")

MAX_PARAM_LENGTH = 6000
PATIENCE = 100
"""After a failure nothing is tried for so many times the time it took: an outage costs a run one part in so many."""


class TrackingConfig(Section):
    """Section `tracking`: what MLflow is told. Where it lies is the environment's `MLFLOW_TRACKING_URI`, else `mlflow.db` in the working folder."""

    enabled: bool = True
    experiment: str = Field("rlpipe", min_length=1)
    registered_model: str = Field("rlpipe-policy", min_length=1)
    copy_below_mb: float = Field(0, ge=0)
    """Policies smaller than this are copied into MLflow's artifact store; larger ones are a reference to what DVC holds."""
    timeout_seconds: int = Field(5, ge=1)
    """How long one request may take before it counts as failed."""


class Tracker:
    """Sends the records of one run to MLflow.

    Processes that give the same `run_key` write into the same parent run.

    Args:
        config: section `tracking`.
        workdir: the working folder; paths below it are sent relative to it, others as their bare name.
        run_key: hash of what decides the run: resolved params, start policy, tasks.
        params: the resolved params, nested: the whole run's, sent when the run is made; or, where not `complete`,
            what one step knows of them, sent up to round 1, by when every step has sent its own.
        tags: tags of the parent run.
        keep: whether what is not sent yet is kept in the working folder, or only as long as this process lives.

    Attributes:
        place: the tracking URI without a password, or the path of the sqlite file.

    Raises:
        ConfigError: `MLFLOW_TRACKING_URI` names a kind of store that MLflow no longer has.
    """

    def __init__(
        self,
        config: TrackingConfig,
        workdir: Path,
        run_key: str,
        params: Mapping[str, Any],
        *,
        complete: bool = True,
        tags: Mapping[str, str] | None = None,
        keep: bool = True,
    ) -> None:
        self.enabled = config.enabled
        self._config, self._workdir, self._params, self._complete = config, workdir.absolute(), params, complete
        self._uri = tracking_uri(self._workdir)
        self.place = self._uri.removeprefix("sqlite:///") if self._uri.startswith("sqlite:") else without_user(self._uri)
        self._store = layout.relative(Path(self.place), self._workdir) if self._uri.startswith("sqlite:") else self.place
        self._run = {
            "key": run_key,
            "params": {name: self._text(value) for name, value in flat(params)},
            "complete": complete,
            "tags": dict(tags or {}),
            "experiment": config.experiment,
            "model": config.registered_model,
            "copy_below_mb": config.copy_below_mb,
        }
        self._spool = Spool(self._workdir / PLACE if keep else None)
        self._client: MlflowClient | None = None
        self._runs: dict[str, TrackedRun] = {}
        self._resume_at = 0.0
        self._open_rounds: list[int] = []
        self._ended = True

    @property
    def problems(self) -> list[str]:
        """Names of what is not sent yet."""
        return [entry.what for entry in self._spool.entries()] if self.enabled else []

    def log_step(
        self,
        step: str,
        round_index: int,
        report_numbers: Mapping[str, Any],
        reasons: Mapping[str, int],
        inputs: Mapping[str, Mapping[str, str | None]],
        params: Mapping[str, Any],
        at: float | None = None,
    ) -> None:
        """Send a step's report to its round's run; with evaluate's, the round's point of every course goes to the parent.

        Sets runs that had ended as FAILED or KILLED to RUNNING again.

        Args:
            report_numbers: None is left out; what is not finite is left out and counted as `<step>/non_finite`.
            reasons: counts, sent as `<step>/reason/<name>`.
            inputs: by artifact name, each with `path`, `fingerprint` (sha256) and `dvc` (hash).
            params: the step's resolved section; sent only where it differs from the run's params, which the parent has.
            at: when the step ended, seconds since 1970 (default: now); the same report with the same time is one point.
        """
        given = {
            "step": step,
            "round_index": round_index,
            "metrics": _metrics(step, {**report_numbers, **{f"reason/{name}": count for name, count in reasons.items()}}),
            "inputs": [described(name, public(found["path"], self._workdir), found["fingerprint"], found["dvc"]) for name, found in inputs.items()],
            "params": {name: self._text(value) for name, value in differing(step, params, self._params).items()},
            "at": time.time() if at is None else at,
        }
        self._ended = False
        self._open_rounds = [*(index for index in self._open_rounds if index != round_index), round_index]
        self._send(f"{step} of round {round_index}", "log_step", given)

    def register_policy(
        self, round_index: int, policy_folder: Path, *, policy_version: int, fingerprint: str, dvc: str | None, metrics: Mapping[str, Any], uri: str = ""
    ) -> None:
        """Register a policy, unless this run has one with the same fingerprint; ends the round's run.

        With the last of the params' rounds the parent ends too, since steps in processes of their own have no end of the run.

        Args:
            uri: where the policy is kept, if not in the working folder.
        """
        tags = {"sha256": fingerprint, "dvc": dvc or "", "policy_version": str(policy_version), "run_key": self._run["key"], "round": str(round_index)}
        tags |= {"path": uri or layout.relative(policy_folder, self._workdir), **accuracy(metrics)}
        self._ended = last = 0 < round_index == len(self._params.get("rounds", ()))
        self._open_rounds = [] if last else [index for index in self._open_rounds if index != round_index]
        given = {"round_index": round_index, "folder": os.path.relpath(policy_folder, self._workdir), "tags": tags, "uri": uri, "last": last}
        self._send(f"policy of round {round_index}", "register_policy", given)

    def tag_policy(self, fingerprint: str, name: str, value: str) -> None:
        """Tag the registered version of a policy, such as with its DVC hash once DVC has it."""
        self._send(f"tag {name}", "tag_policy", {"fingerprint": fingerprint, "name": name, "value": value})

    def promote(self, fingerprint: str, why: str) -> None:
        """Point the alias `champion` at the version that this run registered of a policy, with the reason as its tag."""
        self._send("alias champion", "promote", {"fingerprint": fingerprint, "why": why, "at": time.time()})

    def promote_version(self, version: str, why: str) -> tuple[str | None, dict[str, str]]:
        """Make a registered version of any run the champion; returns the champion before and the version's tags.

        Raises:
            ConfigError: there is no such version.
            TrackingError: MLflow refused, or could not be reached.
        """
        self.sync()
        registry = self._tracked(self._run).registry
        with answering("registered versions"):
            known = registry.versions()
        if version not in known:
            raise ConfigError(f"{self._config.registered_model} has no such version", got=version, accepted=", ".join(known) or None)
        with answering("alias champion"):
            return registry.promote(version, why, time.time()), known[version]

    def finish(self, status: str = "FINISHED") -> None:
        """End the parent, if this process wrote to it and it has not ended, and the round in progress; `status` is MLflow's (FINISHED, FAILED, KILLED).

        What earlier processes kept is sent too.
        """
        if not self._ended:
            self._send(f"status {status}", "finish", {"status": status, "rounds": self._open_rounds})
            self._ended, self._open_rounds = True, []
        elif self.enabled and self.problems:
            self._try("what earlier runs kept", self.sync)

    def version_of(self, fingerprint: str) -> str | None:
        """The version that this run registered of a policy, None where there is none or it could not be asked."""
        return self._ask("registered version", lambda run: run.registry.find(fingerprint))

    def finish_tagged(self, tag: str, value: str, status: str) -> None:
        """End every run with this tag that has not ended, and the rounds in it; `status` is MLflow's."""
        self._ask(f"status {status}", lambda run: run.runs().finish_tagged(tag, value, status))

    def rounds_tagged(self, tag: str, value: str) -> list[dict[str, float]] | None:
        """The metrics of every round of the run with this tag; None where it could not be asked."""
        return self._ask("rounds", lambda run: run.runs().rounds_tagged(tag, value))

    def sync(self) -> int:
        """Send what is kept for this store, whatever failed before; returns how many entries that were.

        Raises:
            TrackingError: MLflow did not take one; it and those after it are kept.
        """
        entries = self._spool.entries()
        waiting, others = [entry for entry in entries if entry.place == self._store], [entry for entry in entries if entry.place != self._store]
        sent = 0
        try:
            for entry in waiting:
                run = self._tracked(entry.run)
                with answering(entry.what):
                    getattr(run, entry.call)(**entry.given)
                sent += 1
        finally:
            if sent:
                self._spool.keep([*others, *waiting[sent:]])
        return sent

    def _send(self, what: str, call: str, given: Mapping[str, Any]) -> None:
        """Keep one exchange, then have it and all before it sent, unless a failure is too recent."""
        if not self.enabled:
            return
        self._spool.append(Entry(self._store, what, self._run, call, given))
        self._try(what, self.sync)

    def _ask(self, what: str, question: Callable[[TrackedRun], T]) -> T | None:
        def asked() -> T:
            self.sync()
            run = self._tracked(self._run)
            with answering(what):
                return question(run)

        return self._try(what, asked) if self.enabled else None

    def _try(self, what: str, exchange: Callable[[], T]) -> T | None:
        began = time.monotonic()
        if began < self._resume_at:
            return None
        try:
            done = exchange()
        except TrackingError as error:
            # a run half made must be looked for again
            self._runs = {}
            if not self._resume_at:
                log.warning("tracking=off place=%s what=%r error=%s do=rlpipe_sync", self.place, what, error.got)
            now = time.monotonic()
            self._resume_at = now + PATIENCE * (now - began)
            return None
        if self._resume_at:
            log.info("tracking=on place=%s", self.place)
        self._resume_at = 0.0
        return done

    def _tracked(self, run: Mapping[str, Any]) -> TrackedRun:
        name = json.dumps(run, sort_keys=True)
        if name not in self._runs:
            with answering("the store"):
                self._client = self._client or opened(self._uri, self._config.timeout_seconds)
            # a sqlite store would otherwise put artifacts into ./mlruns of whatever folder the process is in
            artifacts = (self._workdir / "mlartifacts").as_uri() if self._uri.startswith("sqlite:") else None
            self._runs[name] = TrackedRun(self._client, self._workdir, **run, artifacts=artifacts)
        return self._runs[name]

    def _text(self, value: Any) -> str:
        return public(value, self._workdir)[:MAX_PARAM_LENGTH]


def _metrics(step: str, numbers: Mapping[str, Any]) -> dict[str, float]:
    """By their names in MLflow; those that are not finite are counted instead."""
    known = {name: float(value) for name, value in numbers.items() if value is not None}
    finite = {name: value for name, value in known.items() if math.isfinite(value)}
    if len(finite) < len(known):
        finite["non_finite"] = len(known) - len(finite)
    return {re.sub(r"[^\w\-. :/]", "_", f"{step}/{name}"): value for name, value in finite.items()}
