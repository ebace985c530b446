"""What is said to MLflow about one run of the pipeline: a parent run, a child a round, policies as registered versions.

Every method can be called again with the same arguments, in another process too, and leaves what one call leaves: runs are found
by their tags, points of metrics carry their own time, versions are found by the policy's sha256.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe import layout
from rlpipe.tracking_registry import Registry
from rlpipe.tracking_runs import Runs

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Metric

COURSE = ("sampled_reward", "loss", "approx_kl", "entropy", "clip_fraction", "grad_norm", "mean_completion_tokens", "num_groups_with_signal", "seconds")
"""What the parent shows over the rounds, whichever step reports it, besides all that evaluate measures."""
MAX_PARAMS_PER_BATCH = 100
MAX_DIGEST_LENGTH = 36


class TrackedRun:
    """One run in MLflow, made when the first thing is said about it.

    Args:
        client: MLflow's client.
        workdir: the working folder.
        key: hash of what decides the run; the parent is found by it.
        params: the run's params by dotted names, as text.
        complete: whether those are all of them: then they are sent when the run is made, else up to round 1, by when every step has sent its own.
        tags: tags of the parent.
        experiment: name of the experiment.
        model: name of the registered model.
        copy_below_mb: policies smaller than this are copied into MLflow's artifact store.
        artifacts: where a new experiment keeps artifacts; None for the server's choice.
    """

    def __init__(
        self,
        client: MlflowClient,
        workdir: Path,
        *,
        key: str,
        params: Mapping[str, str],
        complete: bool,
        tags: Mapping[str, str],
        experiment: str,
        model: str,
        copy_below_mb: float,
        artifacts: str | None,
    ) -> None:
        self._client, self._workdir, self._key, self._params, self._complete, self._tags = client, workdir, key, params, complete, tags
        self._experiment, self._artifacts = experiment, artifacts
        self.registry = Registry(client, model, key, copy_below_mb)
        self._found: Runs | None = None
        self._parent_id = ""
        self._parent_is_new = False
        self._children: dict[int, str] = {}

    def log_step(self, step: str, round_index: int, metrics: Mapping[str, float], inputs: list[list[str]], params: Mapping[str, str], at: float) -> None:
        """A step's numbers for its round's run; with evaluate's, the round's point of every course goes to the parent.

        Args:
            metrics: finite, by their names in MLflow.
            inputs: name, digest and source of each artifact.
            params: what differs from the run's.
            at: when the step ended, seconds since 1970: the time of the points.
        """
        child = self._child(round_index)
        points = [self._metric(name, value, at, round_index) for name, value in metrics.items()]
        if not self._complete and round_index <= 1:
            self._log_params(self._parent(), self._params)
        self._log_params(child, {"round": str(round_index), **params}, points)
        if step in ("start", "evaluate"):
            course = self._course(child, round_index, at) if step == "evaluate" else []
            own = [point for point in points if point.key.startswith(f"{step}/")]
            measured = [self._metric(f"evaluate/{point.key.partition('/')[2]}", point.value, at, round_index) for point in own]
            self._client.log_batch(self._parent(), metrics=[*course, *(point for point in measured if "/reason/" not in point.key)])
        self._client.log_inputs(child, [_dataset(step, *given) for given in inputs])

    def register_policy(self, round_index: int, folder: str, tags: Mapping[str, str], uri: str, last: bool) -> None:
        """A policy as a version; ends the round's run, and with the `last` policy the parent.

        Args:
            folder: the policy, relative to the working folder.
            uri: where it is kept, if not in the working folder.
        """
        child = self._child(round_index)
        self.registry.register(Path(os.path.normpath(self._workdir / folder)), child, dict(tags), uri)
        self._client.set_terminated(child)
        del self._children[round_index]
        if last:
            self._client.set_terminated(self._parent())
            self._children, self._parent_id, self._parent_is_new = {}, "", False

    def tag_policy(self, fingerprint: str, name: str, value: str) -> None:
        """Tag the registered version of a policy, if there is one."""
        self.registry.tag(fingerprint, name, value)

    def promote(self, fingerprint: str, why: str, at: float) -> None:
        """Make the registered version of a policy the champion, if there is one."""
        if (version := self.registry.find(fingerprint)) is not None:
            self.registry.promote(version, why, at)

    def finish(self, status: str, rounds: list[int]) -> None:
        """End the parent and the rounds in progress; only the last of those fails with the run: one left earlier was up to date from there on."""
        children = [self._child(round_index) for round_index in rounds]
        for run_id in children[:-1]:
            self._client.set_terminated(run_id)
        for run_id in (*children[-1:], self._parent()):
            self._client.set_terminated(run_id, status)
        self._children, self._parent_id, self._parent_is_new = {}, "", False

    def runs(self) -> Runs:
        """The runs of the experiment, which is made if it is not there."""
        self._found = self._found or Runs(self._client, self._find_experiment())
        return self._found

    def _course(self, child: str, round_index: int, at: float) -> list[Metric]:
        """Read back from the round's run, since the steps before evaluate may have reported from other processes."""
        found = {name: value for name, value in self._client.get_run(child).data.metrics.items() if not name.startswith("evaluate/")}
        return [self._metric(name, value, at, round_index) for name, value in found.items() if name.partition("/")[2] in COURSE]

    def _metric(self, name: str, value: float, at: float, round_index: int) -> Metric:
        from mlflow.entities import Metric

        return Metric(name, value, int(at * 1000), round_index)

    def _log_params(self, run_id: str, params: Mapping[str, str], metrics: list[Metric] | None = None) -> None:
        from mlflow.entities import Param

        sent = [Param(name, value) for name, value in params.items()]
        self._client.log_batch(run_id, metrics=metrics or [], params=sent[:MAX_PARAMS_PER_BATCH])
        for start in range(MAX_PARAMS_PER_BATCH, len(sent), MAX_PARAMS_PER_BATCH):
            self._client.log_batch(run_id, params=sent[start : start + MAX_PARAMS_PER_BATCH])

    def _parent(self) -> str:
        if not self._parent_id:
            tags = {"rlpipe.run_key": self._key, "rlpipe.role": "run"}
            self._parent_id, self._parent_is_new = self.runs().find_or_create(f"rlpipe-{self._key[:8]}", tags)
            for name, value in self._tags.items():
                self._client.set_tag(self._parent_id, name, value)
            # a run whose first process was killed here has none yet; it may differ in what is no part of the key, and params are write-once
            if self._complete and (self._parent_is_new or not self._client.get_run(self._parent_id).data.params):
                self._log_params(self._parent_id, self._params)
        return self._parent_id

    def _child(self, round_index: int) -> str:
        if round_index not in self._children:
            tags = {"rlpipe.run_key": self._key, "rlpipe.round": str(round_index), "mlflow.parentRunId": self._parent()}
            self._children[round_index], _ = self.runs().find_or_create(f"round {layout.round_name(round_index)}", tags, search=not self._parent_is_new)
        return self._children[round_index]

    def _find_experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            try:
                return str(self._client.create_experiment(self._experiment, artifact_location=self._artifacts))
            except MlflowException:  # another process made it meanwhile
                found = self._client.get_experiment_by_name(self._experiment)
                if found is None:
                    raise
        return str(found.experiment_id)


def _dataset(step: str, name: str, digest: str, source: str) -> DatasetInput:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    return DatasetInput(Dataset(name, digest[:MAX_DIGEST_LENGTH], "dvc", source), [InputTag("mlflow.data.context", step)])


def described(name: str, path: str, fingerprint: str | None, dvc: str | None) -> list[str]:
    """An artifact as `log_step` takes it: name, digest (DVC's hash where it has one, else the sha256), and source as JSON."""
    return [name, str(dvc or fingerprint), json.dumps({"path": path, "sha256": fingerprint, "dvc": dvc})]
