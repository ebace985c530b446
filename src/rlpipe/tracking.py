"""MLflow: one parent run per run of the pipeline, one child per round, policies as registered versions by reference.

The only file that imports mlflow. A tracking server that is dead, slow or full costs records, never a run: `Tracker._send` is
the one boundary where what MLflow and the libraries below it raise ends; after the first failure nothing more is sent.
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
from rlpipe.params import Section
from rlpipe.tracking_place import check_reachable, differing, flat, public, quiet, reason, tracking_uri, without_user
from rlpipe.tracking_registry import Registry, accuracy
from rlpipe.tracking_runs import Runs

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric

log = logging.getLogger("rlpipe")

T = TypeVar("T")

CHAMPION = "champion"
COURSE = ("sampled_reward", "loss", "approx_kl", "entropy", "clip_fraction", "grad_norm", "mean_completion_tokens", "num_groups_with_signal", "seconds")
"""What the parent shows over the rounds, whichever step reports it, besides all that evaluate measures."""
MAX_PARAMS_PER_BATCH = 100
MAX_PARAM_LENGTH = 6000
MAX_DIGEST_LENGTH = 36


class TrackingConfig(Section):
    """Section `tracking`: what MLflow is told. Where it lies is the environment's `MLFLOW_TRACKING_URI`, else `mlflow.db` in the working folder."""

    enabled: bool = True
    experiment: str = Field("rlpipe", min_length=1)
    registered_model: str = Field("rlpipe-policy", min_length=1)
    copy_below_mb: float = Field(0, ge=0)
    """Policies smaller than this are copied into MLflow's artifact store; larger ones are a reference to what DVC holds."""
    timeout_seconds: int = Field(5, ge=1)
    """How long one request may take before tracking is given up for the rest of the process."""


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

    Attributes:
        place: the tracking URI without a password, or the path of the sqlite file.
        problems: names of what could not be sent.

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
    ) -> None:
        self.enabled, self.problems = config.enabled, []
        self._complete, self._tags = complete, dict(tags or {})
        self._config, self._workdir, self._key, self._params = config, workdir.absolute(), run_key, params
        self._uri = tracking_uri(self._workdir)
        self.place = self._uri.removeprefix("sqlite:///") if self._uri.startswith("sqlite:") else without_user(self._uri)
        self._failed = False
        self._opened: MlflowClient | None = None
        self._experiment = ""
        self._parent_id = ""
        self._parent_is_new = False
        self._children: dict[int, str] = {}

    problems: list[str]

    def log_step(
        self,
        step: str,
        round_index: int,
        report_numbers: Mapping[str, Any],
        reasons: Mapping[str, int],
        inputs: Mapping[str, Mapping[str, str | None]],
        params: Mapping[str, Any],
    ) -> None:
        """Send a step's report to its round's run; with evaluate's, the round's point of every course goes to the parent.

        Sets runs that had ended as FAILED or KILLED to RUNNING again.

        Args:
            report_numbers: None is left out; what is not finite is left out and counted as `<step>/non_finite`.
            reasons: counts, sent as `<step>/reason/<name>`.
            inputs: by artifact name, each with `path`, `fingerprint` (sha256) and `dvc` (hash).
            params: the step's resolved section; sent only where it differs from the run's params, which the parent has.
        """
        self._send(f"{step} of round {round_index}", lambda: self._log_step(step, round_index, report_numbers, reasons, inputs, params))

    def register_policy(
        self, round_index: int, policy_folder: Path, *, policy_version: int, fingerprint: str, dvc: str | None, metrics: Mapping[str, Any], uri: str = ""
    ) -> str | None:
        """Register a policy, or find the version that this run registered with the same fingerprint; ends the round's run.

        With the last of the params' rounds the parent ends too, since steps in processes of their own have no end of the run.

        Args:
            uri: where the policy is kept, if not in the working folder.

        Returns:
            The registered model's version, or None where it could not be sent.
        """
        tags = {"sha256": fingerprint, "dvc": dvc or "", "policy_version": str(policy_version), "run_key": self._key, "round": str(round_index)}
        tags["path"] = uri or layout.relative(policy_folder, self._workdir)
        return self._send(f"policy of round {round_index}", lambda: self._register(round_index, policy_folder, tags, metrics, uri))

    def tag_policy(self, fingerprint: str, name: str, value: str) -> None:
        """Tag the registered version of a policy, such as with its DVC hash once DVC has it."""
        self._send(f"tag {name}", lambda: self._registry().tag(fingerprint, name, value))

    def version_of(self, fingerprint: str) -> str | None:
        """The version that this run registered of a policy, None where there is none or it could not be asked."""
        return self._send("registered version", lambda: self._registry().find(fingerprint))

    def finish_tagged(self, tag: str, value: str, status: str) -> None:
        """End every run with this tag that has not ended, and the rounds in it; `status` is MLflow's."""
        self._send(f"status {status}", lambda: self._runs().finish_tagged(tag, value, status))

    def rounds_tagged(self, tag: str, value: str) -> list[dict[str, float]] | None:
        """The metrics of every round of the run with this tag; None where it could not be asked."""
        return self._send("rounds", lambda: self._runs().rounds_tagged(tag, value))

    def promote(self, version: str) -> None:
        """Point the alias `champion` at a registered version."""
        self._send(f"alias {CHAMPION}", lambda: self._client().set_registered_model_alias(self._config.registered_model, CHAMPION, version))

    def finish(self, status: str = "FINISHED") -> None:
        """End the parent, if this process wrote to it and it has not ended, and the round in progress; `status` is MLflow's (FINISHED, FAILED, KILLED)."""
        if self._parent_id:
            self._send(f"status {status}", lambda: self._finish(status))

    def _send(self, what: str, send: Callable[[], T]) -> T | None:
        """The boundary: run one exchange with MLflow, unless an earlier one failed."""
        if not self.enabled:
            return None
        if self._failed:
            self.problems.append(what)
            return None
        try:
            with quiet():
                return send()
        except Exception as error:  # mlflow, requests, urllib3 and sqlalchemy share no base class
            self._failed = True
            self.problems.append(what)
            log.warning("tracking=off place=%s what=%r error=%s", self.place, what, reason(error))
            return None

    def _client(self) -> MlflowClient:
        if self._opened is None:
            check_reachable(self._uri, self._config.timeout_seconds)
            self._opened = _open(self._uri, self._config.timeout_seconds)
        return self._opened

    def _log_step(self, step: str, round_index: int, numbers: Mapping[str, Any], reasons: Mapping[str, int], inputs: Any, params: Mapping[str, Any]) -> None:
        metrics = self._metrics(step, round_index, {**numbers, **{f"reason/{name}": count for name, count in reasons.items()}})
        client, child = self._client(), self._child(round_index)
        if not self._complete and round_index <= 1:
            self._log_params(self._parent(), self._params)
        self._log_params(child, {"round": round_index, **differing(step, params, self._params)}, metrics)
        if step in ("start", "evaluate"):
            course = self._course(child, round_index) if step == "evaluate" else []
            client.log_batch(self._parent(), metrics=[*course, *self._metrics("evaluate", round_index, numbers)])
        client.log_inputs(child, [self._dataset(step, name, artifact) for name, artifact in inputs.items()])

    def _course(self, child: str, round_index: int) -> list[Metric]:
        """Read back from the round's run, since the steps before evaluate may have reported from other processes."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        found = {name: value for name, value in self._client().get_run(child).data.metrics.items() if not name.startswith("evaluate/")}
        return [Metric(name, value, now, round_index) for name, value in found.items() if name.partition("/")[2] in COURSE]

    def _finish(self, status: str) -> None:
        """Only the round in progress fails with the run: one left earlier was up to date from there on."""
        children = [*self._children.values()]
        for run_id in children[:-1]:
            self._client().set_terminated(run_id)
        for run_id in (*children[-1:], self._parent_id):
            self._client().set_terminated(run_id, status)
        self._forget()

    def _forget(self) -> None:
        self._children, self._parent_id, self._parent_is_new = {}, "", False

    def _log_params(self, run_id: str, params: Mapping[str, Any], metrics: list[Metric] | None = None) -> None:
        from mlflow.entities import Param

        sent = [Param(name, public(value, self._workdir)[:MAX_PARAM_LENGTH]) for name, value in flat(params)]
        self._client().log_batch(run_id, metrics=metrics or [], params=sent[:MAX_PARAMS_PER_BATCH])
        for start in range(MAX_PARAMS_PER_BATCH, len(sent), MAX_PARAMS_PER_BATCH):
            self._client().log_batch(run_id, params=sent[start : start + MAX_PARAMS_PER_BATCH])

    def _metrics(self, step: str, round_index: int, numbers: Mapping[str, Any]) -> list[Metric]:
        from mlflow.entities import Metric

        known = {name: float(value) for name, value in numbers.items() if value is not None}
        finite = {name: value for name, value in known.items() if math.isfinite(value)}
        if len(finite) < len(known):
            finite["non_finite"] = len(known) - len(finite)
        now = int(time.time() * 1000)
        return [Metric(re.sub(r"[^\w\-. :/]", "_", f"{step}/{name}"), value, now, round_index) for name, value in finite.items()]

    def _dataset(self, step: str, name: str, artifact: Mapping[str, str | None]) -> DatasetInput:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = {"path": public(artifact["path"], self._workdir), "sha256": artifact["fingerprint"], "dvc": artifact["dvc"]}
        digest = str(artifact["dvc"] or artifact["fingerprint"])[:MAX_DIGEST_LENGTH]
        return DatasetInput(Dataset(name, digest, "dvc", json.dumps(source)), [InputTag("mlflow.data.context", step)])

    def _parent(self) -> str:
        if not self._parent_id:
            tags = {"rlpipe.run_key": self._key, "rlpipe.role": "run"}
            self._parent_id, self._parent_is_new = self._runs().find_or_create(f"rlpipe-{self._key[:8]}", tags)
            for name, value in self._tags.items():
                self._client().set_tag(self._parent_id, name, value)
            if self._parent_is_new and self._complete:
                self._log_params(self._parent_id, self._params)
        return self._parent_id

    def _child(self, round_index: int) -> str:
        if round_index not in self._children:
            tags = {"rlpipe.run_key": self._key, "rlpipe.round": str(round_index), "mlflow.parentRunId": self._parent()}
            self._children[round_index], _ = self._runs().find_or_create(f"round {layout.round_name(round_index)}", tags, search=not self._parent_is_new)
        return self._children[round_index]

    def _find_experiment(self) -> str:
        client, name = self._client(), self._config.experiment
        found = client.get_experiment_by_name(name)
        if found:
            return str(found.experiment_id)
        # a sqlite store would otherwise put artifacts into ./mlruns of whatever folder the process is in
        place = (self._workdir / "mlartifacts").as_uri() if self._uri.startswith("sqlite:") else None
        return str(client.create_experiment(name, artifact_location=place))

    def _register(self, round_index: int, folder: Path, tags: dict[str, str], metrics: Mapping[str, Any], uri: str) -> str:
        child = self._child(round_index)
        version = self._registry().register(folder, child, {**tags, **accuracy(metrics)}, uri)
        self._client().set_terminated(child)
        del self._children[round_index]
        if 0 < round_index == len(self._params.get("rounds", ())):
            self._client().set_terminated(self._parent())
            self._forget()
        return version

    def _runs(self) -> Runs:
        self._experiment = self._experiment or self._find_experiment()
        return Runs(self._client(), self._experiment)

    def _registry(self) -> Registry:
        return Registry(self._client(), self._config.registered_model, self._key, self._config.copy_below_mb)


def _open(uri: str, timeout: int) -> MlflowClient:
    """A client that gives up soon and says nothing."""
    for name, value in {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": timeout,
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": 1,
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
    return MlflowClient(tracking_uri=uri, registry_uri=os.environ.get("MLFLOW_REGISTRY_URI") or uri)
