"""What a component's body calls: one step of one round on the artifacts that Kubeflow hands over.

Nothing here imports kfp: artifacts come as objects with `path`, `uri` and `metadata`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from rlpipe import artifact, keys, layout, params, steps
from rlpipe.execute import Call, execute
from rlpipe.kubeflow import wire
from rlpipe.kubeflow.pod import FINISHED, RUN_ID, guarded
from rlpipe.params import SHARED, Section
from rlpipe.tracking import Tracker, TrackingConfig

RECORDS = "records"

log = logging.getLogger("rlpipe")


class Artifact(Protocol):
    """What kfp's artifacts have."""

    path: str
    uri: str
    metadata: dict[str, Any]


class Task:
    """One task of a run: runs its step and hands record, report and tracking over.

    Args:
        name: the step.
        round_index: its round; kfp may hand integers over as floats.
        tracking: section `tracking`, or a reference to it.
        run_key: which MLflow run this belongs to.
        run_id: Kubeflow's id of the run.
    """

    def __init__(self, name: str, round_index: int, tracking: Mapping[str, Any], run_key: str, run_id: str) -> None:
        self.name, self.round_index = name, int(round_index)
        self._tracking_given, self._run_key, self._run_id = tracking, run_key, run_id

    @cached_property
    def _tracking(self) -> TrackingConfig:
        """Read on first use, where a damaged reference is said as every other failure of the task."""
        return params.validated(TrackingConfig, wire.received(self._tracking_given), "tracking")

    def run(
        self,
        config: Mapping[str, Any],
        inputs: Mapping[str, Artifact],
        outputs: Mapping[str, Artifact],
        metrics: Any,
        *,
        report: Artifact | None = None,
        summary: Artifact | None = None,
        **scalars: int,
    ) -> dict[str, Any]:
        """Run the step from and to these artifacts; returns its run record."""
        with guarded(self.name, self.round_index):
            os.environ[RUN_ID] = self._run_id
            # a shard's numbers are not the round's: `gather` sends those
            whole = scalars.get("shard_index", -1) < 0
            record = self.execute(config, inputs, outputs, Path(metrics.path).parent, tracked=whole, scalars=scalars)
            self.hand_over([record], inputs, outputs, metrics, report, summary)
        return record

    def execute(
        self,
        config: Mapping[str, Any],
        inputs: Mapping[str, Artifact],
        outputs: Mapping[str, Artifact],
        folder: Path,
        *,
        tracked: bool = True,
        scalars: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """Run the step, its record kept below `folder`, where only this task writes."""
        step = steps.load(self.name)
        filled: Section = params.validated(step.signature.config, wire.received(config), self.name)
        paths = {name: Path(handed.path) for name, handed in {**inputs, **outputs}.items()}
        workdir = folder / ".rlpipe"
        workdir.mkdir(parents=True, exist_ok=True)
        if record := _finished_elsewhere(Call(step, filled, paths, self.round_index, scalars=whole(scalars))):
            return record
        call = Call(step, filled, paths, self.round_index, workdir, scalars=whole(scalars))
        return execute(call, track=(lambda call, record: self.track(call, record, {**inputs, **outputs})) if tracked else None)

    def hand_over(
        self,
        records: Sequence[dict[str, Any]],
        inputs: Mapping[str, Artifact],
        outputs: Mapping[str, Artifact],
        metrics: Any,
        report: Artifact | None,
        summary: Artifact | None,
    ) -> None:
        """Write the records, the numbers that Kubeflow can show, and the pages; the last record is the step's."""
        record = records[-1]
        artifact.write_json(Path(metrics.path), {RECORDS: records})
        for name, value in shown(record["numbers"]).items():
            metrics.log_metric(name, value)
        for name, handed in outputs.items():
            handed.metadata |= {"step": record["step"], "round": record["round"], "sha256": record["outputs"].get(name, ""), "outcome": record["outcome"] or ""}
        if report is not None:
            from rlpipe.report import html

            artifact.write_text(Path(report.path), html.page(record, _paths(inputs), _paths(outputs)))
        if summary is not None:
            from rlpipe.report import markdown

            artifact.write_text(Path(summary.path), markdown.summary(record))

    def gather(
        self,
        shards: Sequence[Artifact],
        progress_shards: Sequence[Artifact],
        metrics_shards: Sequence[Artifact],
        outputs: Mapping[str, Artifact],
        metrics: Any,
        report: Artifact,
    ) -> None:
        """Join the shards of this round's rollout."""
        from rlpipe.gathering import gather

        with guarded("gather", self.round_index):
            made = [
                (Path(one.path), Path(progress.path), records_of(numbers)[-1])
                for one, progress, numbers in zip(shards, progress_shards, metrics_shards, strict=True)
            ]
            places = _paths(outputs)
            record = gather(
                made,
                places["trajectories"],
                places["progress"],
                Path(metrics.path).parent / ".rlpipe",
                self.round_index,
                track=lambda call, record: self.track(call, record, outputs),
            )
            self.hand_over([record], {}, outputs, metrics, report, None)

    def promote(self, evaluation: Artifact, summary: Artifact) -> str:
        """Point the alias at the version of the promoted policy; returns the version, empty where none was registered."""
        from rlpipe.evaluate import verdict

        with guarded("promote", self.round_index):
            content = verdict.read(Path(evaluation.path))
            tracker = self.tracker({})
            version = tracker.version_of(content["policy_fingerprint"]) or ""
            if version:
                tracker.promote(content["policy_fingerprint"], f"gate, round {self.round_index}: {content['reason']}")
            decision = f"Round {self.round_index}: **{content['decision']}**, {content['reason']}\n\nregistered version: {version or 'none'}\n"
            artifact.write_text(Path(summary.path), decision)
        return version

    def tracker(self, section: Mapping[str, Any]) -> Tracker:
        """MLflow's run of this Kubeflow run; `section` is the step's, as its part of the run's params."""
        tags = {"rlpipe.run_id": self._run_id}
        return Tracker(self._tracking, Path.cwd(), self._run_key, self.known(section), complete=False, tags=tags, keep=False)

    def known(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """What this task knows of the run's params, by the names they have there."""
        own = {name: value for name, value in section.items() if name not in SHARED}
        shared = {name: value for name, value in section.items() if name in SHARED}
        return {**shared, **({self._section(): own} if own else {}), "tracking": params.resolved(self._tracking)}

    def track(self, call: Call, record: dict[str, Any], handed: Mapping[str, Artifact]) -> None:
        """Send a step's record; after an evaluation also the policy, by reference to where Kubeflow keeps it."""
        tracker = self.tracker(params.resolved(call.config) if isinstance(call.config, Section) else record["params"])
        if not tracker.enabled:
            return
        inputs = {name: {"path": self._place(call, name, handed), "fingerprint": record["inputs"][name], "dvc": None} for name in call.inputs}
        numbers = {**record["numbers"], "seconds": record["seconds"]}
        tracker.log_step(record["step"], record["round"], numbers, record["reasons"], inputs, record["params"], record["finished_at"])
        if record["step"] in ("start", "evaluate"):
            fingerprint = {**record["inputs"], **record["outputs"]}["policy"]
            version = int(record["numbers"]["policy_version"])
            tracker.register_policy(
                record["round"],
                call.paths["policy"],
                policy_version=version,
                fingerprint=fingerprint,
                dvc=None,
                metrics=record["numbers"],
                uri=self._place(call, "policy", handed),
            )
            if record["step"] == "start":
                tracker.promote(fingerprint, "the start policy is the first champion")

    def _place(self, call: Call, name: str, handed: Mapping[str, Artifact]) -> str:
        """Where an artifact is kept: its URI, or on a local runner, whose URIs are paths of this machine, where it goes in the working folder."""
        uri = handed[name].uri
        return uri if "://" in uri else layout.place(call.step.name, name, self.round_index).as_posix()

    def _section(self) -> str:
        return "evaluate" if self.name == "start" else self.name


def whole(scalars: Mapping[str, Any] | None) -> dict[str, int]:
    """Scalars as integers: kfp may hand them over as floats."""
    return {name: int(value) for name, value in (scalars or {}).items()}


def _finished_elsewhere(call: Call) -> dict[str, Any] | None:
    """The record of the same step in the working folder of an earlier run on this machine, its outputs linked to this call's places."""
    if FINISHED not in os.environ or call.scalars.get("shard_index", -1) >= 0:
        return None
    workdir = Path(os.environ[FINISHED])
    there = {name: workdir / layout.place(call.step.name, name, call.round_index) for name in call.outputs}
    record = keys.finished(replace(call, paths={**call.paths, **there}, workdir=workdir), keys.of(call))
    for name, place in there.items() if record else ():
        artifact.copy_contents(place, call.paths[name])
        artifact.write_text(call.paths[name] / artifact.MANIFEST, (place / artifact.MANIFEST).read_text(encoding="utf-8"))
    if record:
        log.info("step=%s round=%d state=up-to-date", call.step.name, call.round_index)
    return record


def shown(numbers: Mapping[str, Any]) -> dict[str, float]:
    """The numbers Kubeflow can keep: those that were measured; a record holds none that is not finite."""
    return {name: value for name, value in numbers.items() if value is not None}


def records_of(metrics: Artifact) -> list[dict[str, Any]]:
    """The run records in a task's `metrics`."""
    content = json.loads(Path(metrics.path).read_text(encoding="utf-8"))
    return list(content[RECORDS])


def _paths(artifacts: Mapping[str, Artifact]) -> dict[str, Path]:
    return {name: Path(handed.path) for name, handed in artifacts.items()}
