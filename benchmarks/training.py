"""rlpipe's side of a training step, from its parts: rollout by the torch engine, advantages, update, weights back to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import ATTEMPTS


def train_config(threads: int, **changes: Any) -> Any:
    """Section `train`: its defaults, all weights in bfloat16 autocast."""
    from rlpipe.train.section import Config

    return Config.model_validate({"run": {"threads": threads}, "backend": {"type": "torch", "dtype": "bfloat16"}, **changes})


def open_training(config: Any, policy: Path, groups: Sequence[Any]) -> Any:
    """A backend with the weights of `policy`; `groups` say how long sequences get."""
    from rlpipe.policies import causal_lm
    from rlpipe.train.fit import open_backend
    from rlpipe.train.lineage import Start

    return open_backend(config, Start(policy / causal_lm.POLICY_MODULE, 0), groups)


def update(groups: Sequence[Any], backend: Any, config: Any, version: int) -> float:
    """Advantages, forward, backward and optimizer step on scored groups; seconds."""
    from rlpipe.train.signal import find_signal
    from rlpipe.train.update import update as optimizer_steps

    began = time.perf_counter()
    signal = find_signal(groups, config, list)
    if signal.groups:
        optimizer_steps(signal.groups, backend, config, version=version, round_index=1)
    return time.perf_counter() - began


def alternating_rewards(groups: Sequence[Any]) -> list[Any]:
    """1, 0, 1, … in every group: each has signal, whatever was sampled."""
    return [replace(group, trajectories=tuple(replace(row, reward=float(row.index % 2)) for row in group)) for group in groups]


@dataclass
class Trainer:
    """Engine and backend of one policy, kept open over steps.

    Attributes:
        score: fills in rewards.
        max_new_tokens, stop: of each attempt.
    """

    policy: Path
    config: Any
    score: Callable[[Sequence[Any]], list[Any]]
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    seed: int = 0
    version: int = 0

    def __post_init__(self) -> None:
        from rlpipe.engines import Torch
        from rlpipe.policies import causal_lm

        self.engine = Torch(dtype="bfloat16").open(self.policy, self.config.run.threads)
        self.tokenizer = causal_lm.load_tokenizer(self.policy / causal_lm.POLICY_MODULE)
        self.backend: Any = None

    def rollout(self, prompts: Sequence[Any]) -> list[Any]:
        """Groups of `ATTEMPTS` trajectories, unscored."""
        from rlpipe.engines import Sampling
        from rlpipe.rollout.generate import Origin, generate

        sampling = Sampling(self.max_new_tokens, 1.0, self.stop)
        return list(generate(self.engine, self.tokenizer, prompts, sampling, ATTEMPTS, Origin(self.seed, 1 + self.version, self.version)))

    def step(self, prompts: Sequence[Any]) -> tuple[float, float]:
        """Seconds of the whole step and of the update in it."""
        began = time.perf_counter()
        groups = self.score(self.rollout(prompts))
        if self.backend is None:
            raise ValueError("open the backend first, outside the clock")
        updating = update(groups, self.backend, self.config, self.version)
        self.version += 1
        self.hand_over()
        return time.perf_counter() - began, updating

    def open(self, prompts: Sequence[Any]) -> None:
        self.backend = open_training(self.config, self.policy, self.rollout(prompts))

    def hand_over(self) -> None:
        """The trained weights to the engine."""
        with self.backend.whole_weights():
            self.engine.load(dict(self.backend.module.named_parameters()))

    def close(self) -> None:
        self.engine.close()
        if self.backend is not None:
            self.backend.close()
