"""The tasks around the rounds: preflight before them, the decision to retrain, and the summary at the end."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpipe import artifact, params, steps
from rlpipe.errors import ConfigError
from rlpipe.kubeflow import wire
from rlpipe.kubeflow.pod import guarded, own_folders
from rlpipe.kubeflow.section import KubeflowConfig
from rlpipe.kubeflow.task import Artifact
from rlpipe.tracking import Tracker, TrackingConfig
from rlpipe.tracking_place import params_key

STATES = {"SUCCEEDED": "FINISHED", "CANCELLED": "KILLED", "CANCELED": "KILLED"}
"""MLflow's word for how Kubeflow says a run ended; every other end is FAILED."""


def preflight(sections: Mapping[str, Mapping[str, Any]], num_rounds: int, out: Artifact, summary: Artifact) -> str:
    """Check what the run needs, write its resolved params, and return their key.

    Raises:
        SystemExit: something is missing; the message names everything that is.
    """
    from rlpipe import preflight as checks
    from rlpipe.report import markdown
    from rlpipe.workspace import params_text

    with guarded("preflight"):
        given = {name: wire.received(section) for name, section in sections.items()}
        raw = {**steps.unfilled(given), "rounds": steps.round_list(int(num_rounds))}
        kubeflow = params.validated(KubeflowConfig, given["kubeflow"], "kubeflow")
        found = checks.findings(raw, workdir=next(iter(own_folders()), Path(out.path).parent), secrets=kubeflow.secrets)
        artifact.write_text(Path(summary.path), markdown.findings(found))
        checks.require(found)
        resolved = steps.resolved(raw)
        artifact.write_text(Path(out.path), params_text(resolved))
    return params_key(resolved)


def worth_retraining(evaluation: Artifact, metric: str, below: float, summary: Artifact) -> bool:
    """Whether an evaluation's metric is below what is wanted.

    Raises:
        SystemExit: the evaluation has no such metric.
    """
    from rlpipe.evaluate import verdict

    with guarded("decide"):
        numbers = verdict.numbers(verdict.read(Path(evaluation.path)))
        value = numbers.get(metric)
        if value is None:
            raise ConfigError("the evaluation has no such metric", got=metric, accepted=", ".join(name for name, found in numbers.items() if found is not None))
        retrain = value < below
        said = f"{metric} of the champion is {value:.4g}; retrain below {below:.4g}: **{'retrain' if retrain else 'keep the champion'}**\n"
        artifact.write_text(Path(summary.path), said)
    return retrain


def finish(status: Any, tracking: Mapping[str, Any], run_id: str, summary: Artifact) -> None:
    """Write how the run ended, and end what it holds: its MLflow runs and TrainJobs."""
    from rlpipe.report import markdown
    from rlpipe.train import launchers

    with guarded("finish"), tempfile.TemporaryDirectory() as folder:
        config = params.validated(TrackingConfig, wire.received(tracking), "tracking")
        tracker = Tracker(config, Path(folder), "", {}, keep=False)
        rows = tracker.rounds_tagged("rlpipe.run_id", run_id)
        tracker.finish_tagged("rlpipe.run_id", run_id, STATES.get(status.state, "FAILED"))
        ended = {"state": status.state, "error": status.error_message, "task": status.pipeline_task_name, "run_id": run_id}
        artifact.write_text(Path(summary.path), markdown.run_summary(ended, rows))
        launchers.release(run_id)
