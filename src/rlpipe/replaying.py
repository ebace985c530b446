"""`rlpipe replay`: train a policy on trajectories that earlier rounds scored, without generating."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpipe import artifact, dataset
from rlpipe.errors import ConfigError


def merge(scored: Sequence[Path], out: Path) -> None:
    """One finished dataset out of several, rows in the given order.

    Raises:
        ArtifactError: one of them is unfinished or damaged.
        ConfigError: two datasets hold the same group.
    """
    seen: dict[str, Path] = {}
    with dataset.Writer(out) as writer:
        for path in scored:
            for batch in dataset.read_batches(path):
                for group in set(batch.column("group_id").to_pylist()):
                    if seen.setdefault(group, path) != path:
                        raise ConfigError("two datasets hold the same group", got=f"{group} in {seen[group]} and {path}", do="give each dataset once")
                writer.write_batch(batch)
    outcome = None if writer.num_rows else "no_signal"
    artifact.write_manifest(out, artifact="scored", outcome=outcome, facts={}, inputs={path.as_posix(): artifact.content_key(path) for path in scored})


def replay(scored: Sequence[Path], policy: Path, out: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Train `policy` on `scored` under `train` of the params; the result is a finished policy at `out`.

    Several datasets are one: their groups are mixed in one pass. Rounds that lie behind or ahead of the policy are
    corrected for by the sampling log-probs, as ever. The run record lies in `<out>.reports`.

    Raises:
        ArtifactError: a dataset or the policy is unfinished or damaged.
        ConfigError: two datasets hold the same group, or `out` is a place of the run itself.
    """
    from rlpipe import steps
    from rlpipe.execute import Call, execute

    if "rounds" in out.absolute().parts[-4:]:
        raise ConfigError("a replayed policy cannot take a round's place", got=str(out), do="give --out outside rounds/")
    work = artifact.partial_path(out.with_name(out.name + ".scored"))
    evaluation = policy.parent / "evaluation"
    shutil.rmtree(work, ignore_errors=True)
    step = steps.load("train")
    rounds = [artifact.read_manifest(path).get("round") or 0 for path in scored]
    paths = {"scored": work, "policy_in": policy, "evaluation_in": evaluation, "policy": out}
    call = Call(step, steps.configs(raw)["train"], paths, max(rounds), workdir=out.with_name(out.name + ".reports"))
    try:
        merge(scored, work)
        return execute(call, fresh=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
