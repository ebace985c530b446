"""Advantages: what each attempt's reward says against its siblings'. The union is the registry."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlpipe.train.advantages.base import Estimator
from rlpipe.train.advantages.dr_grpo import DrGrpo
from rlpipe.train.advantages.grpo import Grpo
from rlpipe.train.advantages.reinforce import Reinforce
from rlpipe.train.advantages.rloo import Rloo

AdvantageConfig = Annotated[Grpo | DrGrpo | Rloo | Reinforce, Field(discriminator="type")]


def needs_siblings(advantage: Estimator) -> bool:
    """Whether the estimator compares attempts at one task, so that one attempt a task can teach it nothing."""
    return advantage.needs_siblings


__all__ = ["AdvantageConfig", "DrGrpo", "Estimator", "Grpo", "Reinforce", "Rloo", "needs_siblings"]
