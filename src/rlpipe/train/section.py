"""Section `train` of params.yaml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rlpipe.params import PositiveInt, Run, Section
from rlpipe.policies.packing import Packing
from rlpipe.train.advantages import AdvantageConfig, Grpo
from rlpipe.train.aggregations import AggregationConfig, TokenMean
from rlpipe.train.backends import AdamW, BackendConfig, Torch
from rlpipe.train.kl import Kl
from rlpipe.train.launchers import LauncherConfig, Process
from rlpipe.train.losses import Clipped, LossConfig
from rlpipe.train.trainable import All, TrainableConfig

Beta = Annotated[float, Field(ge=0, lt=1)]


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
    """Packed rows a forward and backward takes. Changes memory and speed, not the result beyond rounding."""
    packing: Packing = "prefix"
    """`prefix` computes what siblings have in common once; `none` gives every trajectory its own row."""
    max_row_tokens: PositiveInt = 2048
    """Siblings go on in another row beyond this; a longer single trajectory still is one row."""
    trainable: TrainableConfig = All()
    optimizer_state: Literal["keep", "reset"] = "keep"
    """Carry Adam's moments from round to round (twice the trained weights' size in the policy folder), or begin anew."""
    start_from: Literal["latest", "champion"] = "latest"
    """Train the incoming policy, or go back to the champion while the incoming one was not promoted."""
    launcher: LauncherConfig = Process()
    """Where the processes of a training run: the step's own, several here, or a Kubeflow TrainJob's. All give one result, up to rounding."""

    def adamw(self) -> AdamW:
        """The optimizer's part of the section."""
        return AdamW(self.betas, self.eps, self.weight_decay, self.max_grad_norm)
