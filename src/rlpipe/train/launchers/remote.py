"""Ranks on several nodes, as a `TrainJob` of Kubeflow Trainer v2, https://www.kubeflow.org/docs/components/trainer/."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlpipe.errors import ConfigError
from rlpipe.params import PositiveInt, Section
from rlpipe.step import Report
from rlpipe.stopping import terminating
from rlpipe.train import job as jobs
from rlpipe.train.launchers import shared
from rlpipe.train.launchers.base import Tail, report_of, too_late
from rlpipe.train.launchers.trainjob import TRIES, Cluster, UnansweredError

if TYPE_CHECKING:
    from rlpipe.train.job import Job

IMAGE = "RLPIPE_IMAGE"
"""Environment of a step's pod: its own image."""
GRACE_SECONDS = 180.0
"""How long ranks outlive a coordinator that was killed without a chance to end them; network volumes show changes late."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]


class TrainJob(Section):
    """A `TrainJob` of the step's own image; the step waits, passes its log on, and removes it at its end."""

    type: Literal["trainjob"] = "trainjob"
    num_nodes: PositiveInt = 1
    processes_per_node: PositiveInt = 1
    """Ranks on each node; one a GPU."""
    runtime: Name = "deepspeed-distributed"
    """The (Cluster)TrainingRuntime. With an MPI one, its nodes' image must hold rlpipe too; with torch-distributed all nodes run `image`."""
    image: str | None = Field(None, min_length=1)
    """None takes the image of the step's own pod, as the environment variable RLPIPE_IMAGE names it."""
    shared_claim: Name
    """A PersistentVolumeClaim that several nodes can write, mounted in the task `train` too."""
    shared_folder: str = Field("/shared", pattern=r"^/.+")
    """Where it is mounted, there and here."""
    resources: dict[str, str] = Field(default_factory=dict)
    """What each node gets: `{cpu: "8", memory: 32Gi, nvidia.com/gpu: "4"}`."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, str | int], ...] = ()
    """Kubernetes tolerations: `{key: nvidia.com/gpu, operator: Exists}`."""
    env: dict[str, str] = Field(default_factory=dict)
    """Plain environment of the ranks; never a secret."""
    namespace: Name | None = None
    """None is the step's own."""
    timeout_seconds: PositiveInt = 14_400
    """The job is ended after this time, waiting for nodes included (exit code 11)."""
    exchange_seconds: float = Field(1_800, gt=0)
    """A rank that keeps the others waiting longer is given up (exit code 8)."""
    poll_seconds: float = Field(5.0, gt=0)

    @property
    def num_ranks(self) -> int:
        """Processes that train."""
        return self.num_nodes * self.processes_per_node

    def run(self, job: Job) -> Report:
        """Train in a TrainJob and wait for it; when this process ends, so does the job.

        Raises:
            ClusterError: the cluster refused, or cannot be reached.
            ConfigError: no image is known, or the shared folder is not mounted here.
            DeadlineError: it took longer than `timeout_seconds`.
            EngineError: it failed, or was removed by somebody else.
            RlpipeError: what a rank raised.
        """
        image = self.image or os.environ.get(IMAGE)
        if image is None:
            raise ConfigError("no image for the TrainJob", accepted=f"train.launcher.image, or the environment variable {IMAGE}", do="set train.launcher.image")
        mounted, tail = Path(self.shared_folder), Tail()
        with terminating(), shared.job_folder(mounted, self.shared_claim) as folder:
            sent = shared.send(job, mounted, folder)
            file = jobs.write(folder, sent, jobs.Terms(self.exchange_seconds, GRACE_SECONDS))
            cluster = Cluster(self, f"rlpipe-r{job.round_index:02d}-{folder.name}")
            try:
                cluster.create(image, file, job.config.run.threads)
                failure = self._wait(cluster, folder, tail)
            finally:
                cluster.delete()
            report = report_of(folder, failure, tail)
            shared.fetch(sent, job)
            return report

    def _wait(self, cluster: Cluster, folder: Path, tail: Tail) -> str | None:
        """How the job failed, if it did."""
        until, misses = time.monotonic() + self.timeout_seconds, 0
        while True:
            (folder / jobs.ALIVE).touch()
            try:
                status, misses = cluster.status(tail), 0
            except UnansweredError:
                status, misses = "not known", misses + 1
                if misses == TRIES:
                    raise
            if status == "Complete":
                return None
            if status == "Failed":
                reason = cluster.reason()
                if reason.startswith("DeadlineExceeded"):
                    raise too_late(self.timeout_seconds, f"TrainJob {cluster.name} is Failed: {reason}")
                return f"TrainJob {cluster.name} is Failed: {reason}"
            if time.monotonic() > until:
                raise too_late(self.timeout_seconds, f"TrainJob {cluster.name} is {status}; {cluster.pods() or 'it has no pods'}")
            time.sleep(self.poll_seconds)
