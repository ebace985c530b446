"""Trajectories, groups and configs for the tests of training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlpipe import artifact, dataset
from rlpipe.train.section import Config
from rlpipe.trajectory import Group, Span, Trajectory

PROMPT = (5, 6, 7, 8)


def attempt(
    completion: Sequence[int],
    reward: float | None = 1.0,
    *,
    index: int = 0,
    group: str = "g",
    prompt: Sequence[int] = PROMPT,
    logprob: float = -2.0,
    **changes: Any,
) -> Trajectory:
    """A trajectory whose completion is trained, sampled with the same log-prob everywhere."""
    ids = np.asarray([*prompt, *completion], dtype=np.int32)
    logprobs = np.full(len(ids), np.nan, dtype=np.float32)
    logprobs[len(prompt) :] = logprob
    temperature = changes.pop("temperature", 1.0)
    spans = (Span("prompt", 0, len(prompt)), Span("policy", len(prompt), len(ids), temperature=temperature, trained=True))
    values: dict[str, Any] = {"spans": spans, "logprobs": logprobs, "reward": reward}
    return Trajectory(f"{group}-{index}", group, f"task-{group}", index, 1, ids, **values | changes)


def group(name: str, *completions_and_rewards: tuple[Sequence[int], float | None], **changes: Any) -> Group:
    """Siblings with the given completions and rewards."""
    return Group(name, tuple(attempt(ids, reward, index=i, group=name, **changes) for i, (ids, reward) in enumerate(completions_and_rewards)))


def random_groups(num_groups: int, seed: int = 0, vocab_size: int = 40, temperatures: Sequence[float] = (1.0,)) -> list[Group]:
    """Groups of 2 to 5 attempts, 1 to 6 tokens long, many of them beginning alike."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(num_groups):
        prompt = rng.integers(1, vocab_size, rng.integers(2, 9)).tolist()
        members = []
        for index in range(rng.integers(2, 6)):
            completion = [*([3, 4] if rng.random() < 0.5 else [3]), *rng.integers(1, vocab_size, rng.integers(0, 5)).tolist()]
            temperature = float(rng.choice(temperatures))
            row = attempt(completion, float(rng.integers(0, 4)) + 0.1 * index, index=index, group=f"g{number}", prompt=prompt, temperature=temperature)
            row.logprobs[len(prompt) :] = rng.uniform(-4.5, -3.0, len(completion))
            members.append(row)
        groups.append(Group(f"g{number}", tuple(members)))
    return groups


def config(**changes: Any) -> Config:
    """Section `train`, in float32 on one thread unless said otherwise."""
    run = {"threads": 1, **changes.pop("run", {})}
    return Config.model_validate({"backend": {"type": "torch", "dtype": "float32"}, "run": run, **changes})


def scored_dataset(folder: Path, groups: Sequence[Group], outcome: str | None = None) -> Path:
    """A finished `scored` artifact."""
    dataset.write(folder, groups)
    artifact.write_manifest(folder, outcome=outcome)
    return folder


def evaluation_artifact(folder: Path, champion: int = 0) -> Path:
    """A finished `evaluation` artifact that names the champion's version."""
    artifact.write_json(folder / "evaluation.json", {"champion": {"policy_version": champion}})
    artifact.write_manifest(folder)
    return folder
