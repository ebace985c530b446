"""Section `train` of params.yaml."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlpipe.params import PositiveInt, Run, Section
from rlpipe.policies.packing import Packing
from rlpipe.train.advantages import AdvantageConfig, Grpo
from rlpipe.train.aggregations import AggregationConfig, TokenMean
from rlpipe.train.backends import AdamW, BackendConfig, Optimizer, Torch, check_capable
from rlpipe.train.kl import Kl
from rlpipe.train.launchers import LauncherConfig, Process
from rlpipe.train.losses import Clipped, LossConfig
from rlpipe.train.trainable import All, TrainableConfig

Beta = Annotated[float, Field(ge=0, lt=1)]


class Checkpoint(Section):
    """Section `train.checkpoint`: what a killed training goes on from."""

    seconds: float | None = Field(300.0, ge=0)
    """At the end of an optimizer step, weights and optimizer are saved if that was last done this long ago; null saves at SIGTERM only."""
    grace_seconds: float = Field(25.0, ge=0)
    """After SIGTERM the optimizer step may end and be saved for this long; Kubernetes kills after 30 s. With several ranks nothing waits."""


class Config(Section):
    """Section `train` of `params.yaml`."""

    run: Run = Run()
    backend: BackendConfig = Torch()
    advantage: AdvantageConfig = Grpo()
    loss: LossConfig = Clipped()
    aggregation: AggregationConfig = TokenMean()
    kl: Kl | None = None
    learning_rate: float = Field(1e-5, gt=0)
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps, counted over all rounds, over which the learning rate rises to its value."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    optimizer: Optimizer = Optimizer()
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Global norm the gradient is clipped to; null clips nothing."""
    groups_per_step: PositiveInt = 8
    """Groups with signal in one optimizer step; the last step of a pass takes what is left."""
    drop_last: bool = False
    """Leave a smaller last step out; `num_groups_dropped` counts it."""
    epochs: PositiveInt = 1
    """Passes over the round's groups."""
    micro_batch: PositiveInt = 8
    """Packed rows a forward and backward takes at most. Changes memory and speed, not the result beyond rounding."""
    micro_batch_tokens: PositiveInt = 4096
    """Positions a forward and backward computes at most, unless a single trajectory has more: what decides peak memory."""
    packing: Packing = "prefix"
    """`prefix` computes what trajectories of a micro-batch have in common once; `none` gives every trajectory its own padded row."""
    max_row_tokens: PositiveInt = 2048
    """Siblings go on in another row beyond this; a longer single trajectory still is one row."""
    activation_checkpointing: bool = False
    """Keep only what enters each layer for the backward and compute the rest again: less memory, a third more time."""
    trainable: TrainableConfig = All()
    optimizer_state: Literal["keep", "reset"] = "keep"
    """Carry Adam's moments from round to round (twice the trained weights' size in the policy folder), or begin anew."""
    start_from: Literal["latest", "champion"] = "latest"
    """Train the incoming policy, or go back to the champion while the incoming one was not promoted."""
    checkpoint: Checkpoint = Checkpoint()
    launcher: LauncherConfig = Process()
    """Where the processes of a training run: the step's own, several here, or a Kubeflow TrainJob's. All give one result, up to rounding."""

    spread: ClassVar[frozenset[str]] = frozenset({"checkpoint"})

    @model_validator(mode="after")
    def _backend_can(self) -> Self:
        if self.optimizer.state != "float32":
            check_capable(self.backend.type, self.backend.can, {"narrow_moments": f"train.optimizer.state: {self.optimizer.state}"})
        return self

    def adamw(self) -> AdamW:
        """The optimizer's part of the section."""
        return AdamW(self.betas, self.eps, self.weight_decay, self.max_grad_norm, self.optimizer.state, self.run.seed)
