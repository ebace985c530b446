"""Section `rollout` of params.yaml."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator

from rlpipe.engines import EngineConfig, Sampling, Torch
from rlpipe.params import NonEmpty, PositiveInt, Run, Section
from rlpipe.rollout.selectors import Selector, Uniform

WHOLE_VOCABULARY = (
    "the engine would renormalise over the tokens it keeps while training uses the whole vocabulary, so every importance ratio would be off by the kept mass; "
)


class Config(Section):
    """Section `rollout`."""

    run: Run = Run()
    engine: EngineConfig = Torch()
    num_tasks: PositiveInt = 8
    """Tasks attempted in a round."""
    num_attempts: PositiveInt = 8
    """Attempts at each task."""
    temperature: float = Field(1.0, gt=0)
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[NonEmpty, ...] = ("\n",)
    """Texts that end a completion; the token that completes one is kept and trained."""
    max_new_tokens: PositiveInt = 16
    selector: Selector = Uniform()
    shards: PositiveInt = 1
    """Pods that make a round's attempts on Kubeflow, whole chunks each; elsewhere one process makes them all, and the bytes are the same."""

    spread: ClassVar[frozenset[str]] = frozenset({"shards"})

    @field_validator("top_p")
    @classmethod
    def _no_top_p(cls, top_p: float) -> float:
        if top_p != 1:
            raise ValueError(f"{WHOLE_VOCABULARY}leave top_p at 1")
        return top_p

    @field_validator("top_k")
    @classmethod
    def _no_top_k(cls, top_k: int) -> int:
        if top_k not in (0, -1):
            raise ValueError(f"{WHOLE_VOCABULARY}leave top_k at 0")
        return top_k

    @field_validator("min_p")
    @classmethod
    def _no_min_p(cls, min_p: float) -> float:
        if min_p != 0:
            raise ValueError(f"{WHOLE_VOCABULARY}leave min_p at 0")
        return min_p

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.max_new_tokens, self.temperature, self.stop)
