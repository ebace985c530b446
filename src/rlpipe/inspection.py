"""A trajectory dataset as text, for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from rlpipe import artifact, dataset
from rlpipe.errors import ConfigError
from rlpipe.trajectory import Trajectory

DATASETS = ("trajectories", "kept", "scored")


def summary(path: Path) -> str:
    """Counts, statuses, lengths and rewards of a dataset, one `name=value` line each kind.

    Raises:
        ArtifactError: the folder is unfinished or damaged.
        ConfigError: the artifact is of another kind.
    """
    manifest = artifact.read_manifest(path)
    if manifest.get("artifact") not in DATASETS:
        raise ConfigError(f"{path} is no trajectory dataset", got=manifest.get("artifact"), accepted=", ".join(DATASETS))
    statuses: Counter[str] = Counter()
    groups: set[str] = set()
    lengths: list[int] = []
    rewards: list[float | None] = []
    for row in dataset.read(path):
        statuses[row.status] += 1
        groups.add(row.group_id)
        lengths.append(row.num_sampled_tokens)
        rewards.append(row.reward)
    lines = [
        f"artifact={manifest.get('artifact')} round={manifest.get('round')} outcome={manifest.get('outcome')} fingerprint={manifest['fingerprint']}",
        f"num_trajectories={len(lengths)} num_groups={len(groups)}",
        "statuses " + (" ".join(f"{name}={count}" for name, count in sorted(statuses.items())) or "none"),
        "completion_tokens " + _spread(lengths),
        f"reward {_spread([value for value in rewards if value is not None])} num_unscored={sum(value is None for value in rewards)}",
    ]
    return "\n".join(lines)


def _spread(values: list[int] | list[float]) -> str:
    if not values:
        return "none"
    return f"mean={np.mean(values):.4g} min={min(values):.4g} median={np.median(values):.4g} max={max(values):.4g}"


def examples(path: Path, num: int) -> Iterator[str]:
    """The first `num` trajectories as text: every span with its source, trained ones marked with `*`."""
    for row in islice(dataset.read(path), num):
        head = f"[{row.trajectory_id}] task={row.task_id} status={row.status} finish_reason={row.finish_reason} reward={row.reward}"
        verdicts = [
            f"  reward {verdict.name}={verdict.value} status={verdict.status}" + (f" reason={verdict.reason}" if verdict.reason else "")
            for verdict in row.rewards
        ]
        yield "\n".join([head, *verdicts, *_spans(row)])


def _spans(row: Trajectory) -> Iterator[str]:
    for span in row.spans:
        mark = "*" if span.trained else " "
        text = ""
        if span.source == "prompt":
            text = row.prompt
        elif span.source == "policy":
            text = row.completion
            mean = float(np.mean(row.logprobs[span.start : span.end])) if span.end > span.start else 0.0
            text = f"{text!r} version={span.policy_version} temperature={span.temperature:g} mean_logprob={mean:.4f}"
            yield f"{mark} {span.source}[{span.start}:{span.end}] {text}"
            continue
        yield f"{mark} {span.source}[{span.start}:{span.end}] {text!r}"
