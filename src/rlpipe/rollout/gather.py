"""Joins the shards of a round's rollout into the very dataset and progress that one process would have written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe import artifact, params
from rlpipe.errors import ArtifactError
from rlpipe.rollout.section import Config
from rlpipe.step import Out, Report

SAME = ("inputs", "params", "code", "facts")
"""What the manifests of one round's shards agree on."""
AGAIN = "run the rollout's shards again"


@dataclass(frozen=True)
class Shard:
    """One shard's outputs, with the manifest of its trajectories."""

    index: int
    trajectories: Path
    progress: Path
    manifest: dict[str, Any]


def run(shards: Sequence[Shard], *, trajectories: Out, progress: Out, round_index: int) -> Report:
    """Write the rows of all shards as one dataset, and the progress on which they agree; counts are taken from the rows."""
    from rlpipe import dataset
    from rlpipe.rollout import attempts

    counts = attempts.write_rows(trajectories, (batch for shard in shards for batch in dataset.read_batches(shard.trajectories)))
    artifact.verify(shards[0].progress)
    artifact.copy_contents(shards[0].progress, progress)
    facts = shards[0].manifest["facts"]
    num_rejected = len(facts.get("rejected_prompts", ()))
    return Report(counts.numbers(num_rejected), counts.reasons(num_rejected), "stopped" if _stopped(shards[0]) else None, facts)


def key(shards: Sequence[Shard]) -> dict[str, Any]:
    """What decides the joined outputs: the key of the same rollout in one process."""
    manifest = shards[0].manifest
    own = {name: manifest[name] for name in ("step", "round", "inputs", "code")}
    return own | {"params": params.deciding(_config(manifest))}


def ordered(trajectories: Sequence[Path], progress: Sequence[Path], round_index: int) -> list[Shard]:
    """The shards of a round in their order, from folders in any order.

    Raises:
        ArtifactError: names what is no shard of this round's rollout, is missing, stands twice, or was made otherwise.
    """
    datasets = _by_index(trajectories, "trajectories", round_index)
    states = _by_index(progress, "progress", round_index)
    shards = [Shard(index, path, states[index], artifact.read_manifest(path)) for index, path in sorted(datasets.items())]
    _check_agreement(shards)
    return shards


def _by_index(folders: Sequence[Path], name: str, round_index: int) -> dict[int, Path]:
    """The folders by the shard index of their manifests: each of 0 to `rollout.shards` - 1 once."""
    if not folders:
        raise ArtifactError(f"no {name} to gather", got="no shards", accepted="one folder a shard", do=AGAIN)
    manifests = {folder: artifact.read_manifest(folder) for folder in folders}
    for folder, manifest in manifests.items():
        _check_shard(folder, manifest, name, round_index)
    indices = [manifests[folder]["scalars"]["shard_index"] for folder in folders]
    num_shards = max(_config(manifest).shards for manifest in manifests.values())
    wrong = {"missing": sorted(set(range(num_shards)) - set(indices)), "more than once": sorted(index for index, n in Counter(indices).items() if n > 1)}
    if any(wrong.values()):
        got = "; ".join(f"{problem}: {', '.join(f'shard {index}' for index in found)}" for problem, found in wrong.items() if found)
        raise ArtifactError(f"{name} of round {round_index} cannot be gathered", got=got, accepted=f"shards 0 to {num_shards - 1}, each once", do=AGAIN)
    return dict(zip(indices, folders, strict=True))


def _check_shard(folder: Path, manifest: dict[str, Any], name: str, round_index: int) -> None:
    found = (manifest.get("step"), manifest.get("artifact"))
    if found != ("rollout", name) or "shard_index" not in manifest.get("scalars", {}):
        raise ArtifactError(f"{folder} is no shard of a rollout", got=f"{found[1]} of step {found[0]}", accepted=f"{name} of a rollout with a shard_index")
    if manifest["round"] != round_index:
        raise ArtifactError(f"{folder} is of another round", got=manifest["round"], accepted=round_index, do=AGAIN)


def _check_agreement(shards: Sequence[Shard]) -> None:
    """Refuse shards made under different inputs, params or code, or that left different progress."""
    first = shards[0]
    progress = artifact.read_manifest(first.progress)["fingerprint"]
    for shard in shards[1:]:
        wrong = [name for name in SAME if shard.manifest[name] != first.manifest[name]]
        wrong += ["progress"] if artifact.read_manifest(shard.progress)["fingerprint"] != progress else []
        wrong += ["outcome"] if _stopped(shard) != _stopped(first) else []
        if wrong:
            raise ArtifactError(f"shard {shard.index} was made otherwise than shard {first.index}", got=f"other {', '.join(wrong)}", do=AGAIN)


def _stopped(shard: Shard) -> bool:
    return bool(shard.manifest["outcome"] == "stopped")


def _config(manifest: dict[str, Any]) -> Config:
    return params.validated(Config, manifest["params"], "rollout")
