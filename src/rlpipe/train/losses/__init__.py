"""Losses: one number a trained token. The union is the registry."""

from __future__ import annotations

from rlpipe.train.losses.base import LossInputs, TokenLosses
from rlpipe.train.losses.clipped import Clipped

LossConfig = Clipped

__all__ = ["Clipped", "LossConfig", "LossInputs", "TokenLosses"]
