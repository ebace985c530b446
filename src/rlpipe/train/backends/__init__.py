"""Backends: who holds the weights and steps the optimizer. The union is the registry; torch is imported when one opens."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlpipe.train.backends.base import AdamW, Backend, Optimizer, check_capable
from rlpipe.train.backends.deepspeed_backend import DeepSpeed
from rlpipe.train.backends.torch_backend import Torch

BackendConfig = Annotated[Torch | DeepSpeed, Field(discriminator="type")]

__all__ = ["AdamW", "Backend", "BackendConfig", "DeepSpeed", "Optimizer", "Torch", "check_capable"]
