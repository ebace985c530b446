"""One working folder with its params: calls steps through `execute`, tracks them, records them with DVC."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rlpipe import artifact, layout, params, records, steps
from rlpipe.execute import Call, execute, peak_memory_mb
from rlpipe.reward.section import check_custom
from rlpipe.tracking import Tracker, TrackingConfig
from rlpipe.tracking_place import params_key, run_key, tracking_uri

log = logging.getLogger("rlpipe")


class Session:
    """Steps of one working folder under one set of params.

    Args:
        workdir: the working folder; artifacts lie where `layout` says.
        raw: the params as read, validated here as a whole.
        fresh: run every step although it is finished.

    Raises:
        ConfigError: the params or the tracking URI of the environment are wrong.
    """

    def __init__(self, workdir: Path, raw: Mapping[str, Any], *, fresh: bool = False, began: float | None = None) -> None:
        self.workdir, self.raw, self.fresh = workdir, raw, fresh
        self.configs = steps.configs(raw)
        check_custom([*self.configs["reward"].rewards, *self.configs["evaluate"].rewards], [workdir, Path.cwd()])
        self.rounds = steps.rounds(raw)
        if self.configs["tracking"].enabled:
            tracking_uri(workdir)
        if _scores_otherwise(raw):
            log.warning("evaluate.rewards=exact_match state=default reason=reward.rewards_scores_otherwise do=set_evaluate.rewards")
        self._began = began
        self._changed = False

    def planned(self, name: str, round_index: int, paths: Mapping[str, Path] | None = None, scalars: Mapping[str, Any] | None = None) -> Call:
        """The call of one step at its places, or at the given ones."""
        step = steps.load(name)
        wanted = {**step.signature_paths(round_index), **(paths or {})}
        return Call(step, self.configs[name], {key: self.workdir / path for key, path in wanted.items()}, round_index, self.workdir, dict(scalars or {}))

    def call(self, name: str, round_index: int, paths: Mapping[str, Path] | None = None, scalars: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Run one step at its places, or at the given ones; returns its run record."""
        began, self._began = self._began, None
        call = self.planned(name, round_index, paths, scalars)
        before = records.read(self.workdir, name, round_index)
        record = execute(call, fresh=self.fresh, began=began, track=self._track if name != "model" else None)
        self._changed |= record != before
        if before is None or before["outputs"] != record["outputs"]:
            records.forget_after(self.workdir, name, round_index)
        records.write_run(self.workdir, max(len(self.rounds), round_index))
        return record

    def make_tasks(self, split: Literal["train", "eval"], out: Path | None = None) -> Path:
        """Write the tasks of one split; the same bytes again change nothing."""
        from rlpipe import task_sources

        path = self.workdir / (out or (layout.TRAIN_TASKS if split == "train" else layout.EVAL_TASKS))
        before = artifact.sha256(path) if path.is_file() else None
        num_tasks = task_sources.write(self.configs["tasks"], split, path, [self.workdir])
        # a task file is a dependency of its own: DVC must see its new content even where the tasks stay the same
        self._changed |= before != artifact.sha256(path) or task_sources.file_of(getattr(self.configs["tasks"], split).source, [self.workdir]).is_file()
        log.info("stage=tasks split=%s num_tasks=%d path=%s", split, num_tasks, layout.relative(path, self.workdir))
        return path

    def commit(self, round_index: int, stages: list[str], *, changed: bool = False) -> None:
        """Record finished outputs with DVC, unless that was done and nothing changed; its time is the round's `versioning` record.

        Args:
            changed: the outputs came from elsewhere.
        """
        from rlpipe import versioning

        if not (self._changed or changed) and records.read(self.workdir, "versioning", round_index):
            return
        began = time.monotonic()
        versioning.commit(self.workdir, stages)
        seconds = time.monotonic() - began
        record = {
            "step": "versioning",
            "round": round_index,
            "outcome": None,
            "numbers": {},
            "reasons": {},
            "outputs": {},
            "seconds": seconds,
            "seconds_overhead": seconds,
            "peak_memory_mb": peak_memory_mb(),
        }
        records.write(self.workdir, record)
        records.write_run(self.workdir, max(len(self.rounds), round_index))
        self._changed = False

    @cached_property
    def tracker(self) -> Tracker:
        """The tracker of this run: the same MLflow parent run from whichever process asks."""
        resolved = steps.resolved(self.raw)
        start = artifact.read_manifest(self.workdir / layout.artifact_path("policy", 0))["fingerprint"]
        tasks = [artifact.sha256(self.workdir / path) for path in (layout.TRAIN_TASKS, layout.EVAL_TASKS)]
        key = run_key(params_key(resolved), start, tasks)
        return Tracker(params.section(TrackingConfig, self.raw, "tracking"), self.workdir, key, resolved, tags=retry_tags(self.workdir, key))

    def finish(self, status: str) -> None:
        """End the MLflow parent run, if this run came far enough to have one."""
        if "tracker" in vars(self) or (self.workdir / layout.artifact_path("policy", 0) / artifact.MANIFEST).is_file():
            self.tracker.finish(status)

    def _track(self, call: Call, record: dict[str, Any]) -> None:
        """Send one step's record to MLflow; after an evaluation also the policy and the champion."""
        if not self.tracker.enabled:
            return
        inputs = {name: self._described(path, record["inputs"][name]) for name, path in call.inputs.items()}
        numbers = {**record["numbers"], "seconds": record["seconds"]}
        self.tracker.log_step(record["step"], record["round"], numbers, record["reasons"], inputs, record["params"], record["finished_at"])
        if record["step"] in ("start", "evaluate"):
            self._register(call, record)

    def _register(self, call: Call, record: dict[str, Any]) -> None:
        from rlpipe.evaluate import verdict

        policy = call.paths["policy"]
        fingerprint = {**record["inputs"], **record["outputs"]}["policy"]
        numbers = record["numbers"]
        self.tracker.register_policy(
            record["round"],
            policy,
            policy_version=int(numbers["policy_version"]),
            fingerprint=fingerprint,
            dvc=self._described(policy, fingerprint)["dvc"],
            metrics=numbers,
        )
        if numbers["promoted"]:
            self.tracker.promote(fingerprint, f"gate, round {record['round']}: {verdict.read(call.paths['evaluation'])['reason']}")

    def _described(self, path: Path, fingerprint: str) -> dict[str, str]:
        from rlpipe import versioning

        return {"path": layout.relative(path, self.workdir), "fingerprint": fingerprint, "dvc": versioning.dvc_hash(path)}


def retry_tags(workdir: Path, key: str) -> dict[str, str]:
    """Which run this folder held before one with other params, tasks or start policy: MLflow's params are write-once, so that is another run."""
    place = workdir / ".rlpipe" / "run_key.json"
    before = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
    if before.get("key") != key:
        before = {"key": key, "retry_of": before.get("key", "")}
        place.parent.mkdir(parents=True, exist_ok=True)
        artifact.write_json(place, before)
    return {"rlpipe.retry_of": f"rlpipe-{before['retry_of'][:8]}"} if before["retry_of"] else {}


def _scores_otherwise(raw: Mapping[str, Any]) -> bool:
    """Whether training is rewarded by something that evaluation, left at its default, does not look at."""
    kinds = {reward.get("type") for reward in (raw.get("reward") or {}).get("rewards", ()) if isinstance(reward, Mapping)}
    return bool(kinds) and "exact_match" not in kinds and "rewards" not in (raw.get("evaluate") or {})
