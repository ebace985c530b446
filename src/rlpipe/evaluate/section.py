"""Section `evaluate` of params.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from rlpipe.engines import EngineConfig, Torch
from rlpipe.evaluate.gate import Gate, Paired
from rlpipe.params import NonEmpty, PositiveInt, Run, Section
from rlpipe.reward.exact_match import ExactMatch
from rlpipe.reward.section import RewardConfig, RewardSection, code_hashes


class Config(Section):
    """Section `evaluate`."""

    run: Run = Run()
    engine: EngineConfig = Torch()
    rewards: tuple[RewardConfig, ...] = Field((ExactMatch(),), min_length=1)
    """What a completion is scored by."""
    correct_at: float = 1.0
    """A completion with this total reward or more is correct."""
    max_unscorable: float = Field(0.2, ge=0, le=1)
    """Share of completions without a total above which the step fails."""
    num_attempts: int = Field(4, ge=0)
    """Sampled attempts per task, for pass@k; 0 makes only the greedy completion."""
    pass_at: tuple[PositiveInt, ...] = (1, 4)
    """Which pass@k to report; absent where fewer than k attempts could be scored."""
    temperature: float = Field(1.0, gt=0)
    """Of the sampled attempts."""
    max_new_tokens: PositiveInt = 16
    stop: tuple[NonEmpty, ...] = ("\n",)
    chunk_groups: PositiveInt = 64
    """Tasks computed together."""
    gate: Gate = Paired()

    @property
    def reward_section(self) -> RewardSection:
        """The rewards as the reward room takes them."""
        return RewardSection(rewards=self.rewards, max_unscorable=self.max_unscorable, group_filters=())

    def own_code(self, folders: Sequence[Path]) -> dict[str, str]:
        return code_hashes(self.rewards, folders)

    @model_validator(mode="after")
    def _stop_metric_is_measured(self) -> Self:
        accepted = [*self._accuracies, "mean_completion_tokens"]
        if self.run.stop is not None and self.run.stop.metric not in accepted:
            raise ValueError(f"run.stop.metric {self.run.stop.metric} is not measured; accepted: {', '.join(accepted)}")
        return self

    @model_validator(mode="after")
    def _gate_compares_what_is_measured(self) -> Self:
        for metric in (self.gate.compared, *(guard.metric for guard in self.gate.must_not_fall)):
            if metric not in self._accuracies:
                raise ValueError(f"gate: {metric} is not measured; accepted: {', '.join(self._accuracies)}")
        return self

    @property
    def _accuracies(self) -> list[str]:
        return ["greedy_accuracy", *(f"pass_at_{k}" for k in self.pass_at if k <= self.num_attempts)]
