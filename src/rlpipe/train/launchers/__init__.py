"""Launchers: where the processes of a training run. The union is the registry; no library is imported before a launch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlpipe.train.launchers.local import Local
from rlpipe.train.launchers.process import Process
from rlpipe.train.launchers.remote import TrainJob
from rlpipe.train.launchers.trainjob import release

LauncherConfig = Annotated[Process | Local | TrainJob, Field(discriminator="type")]

__all__ = ["LauncherConfig", "Local", "Process", "TrainJob", "release"]
