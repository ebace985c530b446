"""Aggregations: what each token's loss weighs in the optimizer step's. The union is the registry."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlpipe.train.aggregations.constant import Constant
from rlpipe.train.aggregations.sequence_mean import SequenceMean
from rlpipe.train.aggregations.token_mean import TokenMean

AggregationConfig = Annotated[TokenMean | SequenceMean | Constant, Field(discriminator="type")]

__all__ = ["AggregationConfig", "Constant", "SequenceMean", "TokenMean"]
