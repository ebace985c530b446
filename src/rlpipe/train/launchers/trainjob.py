"""A TrainJob through the Kubeflow SDK; the only place that imports it."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.errors import ClusterError, EngineError
from rlpipe.train.launchers.base import QUIET, WORKER, Tail, torchrun

if TYPE_CHECKING:
    from rlpipe.train.launchers.remote import TrainJob

log = logging.getLogger("rlpipe")

RUN = "RLPIPE_RUN"
"""Environment of a step's pod: the run it belongs to."""
LABEL = "rlpipe/run"
"""Of every TrainJob: the run it belongs to."""
API = ("trainer.kubeflow.org", "v1alpha1")
VOLUME = "rlpipe-shared"
TRIES = 3
"""How often the cluster is asked before it counts as not there."""
IN_A_POD = Path("/var/run/secrets/kubernetes.io")
DO = {
    401: "log in to the cluster again",
    403: "let the task's service account create, get, list and delete trainjobs, get trainingruntimes and clustertrainingruntimes, list pods and get pods/log",
    404: "install Kubeflow Trainer v2 and the runtime, or set train.launcher.runtime",
}


class UnansweredError(ClusterError):
    """The Kubernetes API did not answer, or had a fault of its own; the same question may be answered later."""


class Cluster:
    """One TrainJob, by name, through the Kubeflow SDK.

    Raises:
        ClusterError: no cluster is configured here.
        EngineError: the SDK is not installed.
    """

    def __init__(self, config: TrainJob, name: str) -> None:
        self.config, self.name, self.num_lines = config, name, 0
        self.client = _connect(config.namespace)

    def create(self, image: str, file: Path, threads: int) -> None:
        """Create the job, once, whether or not an answer is lost."""
        with _asked(f"get runtime {self.config.runtime}"):
            runtime = self.client.get_runtime(self.config.runtime)
        for number in range(TRIES):
            try:
                with _asked(f"create TrainJob {self.name}"):
                    self.client.train(runtime=runtime, trainer=self._container(image, threads), options=self._options(runtime, file))
                break
            except UnansweredError:
                if number == TRIES - 1:
                    raise
                time.sleep(self.config.poll_seconds)
            except ClusterError as error:
                if number and str(error.got).startswith("409"):  # an earlier try went through; the name is nobody else's
                    break
                raise
        log.info("trainjob=%s num_nodes=%d num_ranks=%d state=created", self.name, self.config.num_nodes, self.config.num_ranks)

    def _container(self, image: str, threads: int) -> Any:
        from kubeflow.trainer import CustomTrainerContainer

        environ = {**QUIET, **({"OMP_NUM_THREADS": str(threads)} if threads else {}), **self.config.env}
        return CustomTrainerContainer(image=image, num_nodes=self.config.num_nodes, resources_per_node=self.config.resources or None, env=environ)

    def _options(self, runtime: Any, file: Path) -> list[Any]:
        from kubeflow.trainer import options

        mpi = runtime.trainer.command[0] == "mpirun"
        return [
            options.Name(self.name),
            options.Labels({LABEL: label(os.environ.get(RUN, self.name))}),
            options.TrainerCommand(self._command(runtime, mpi, file)),
            options.ActiveDeadlineSeconds(self.config.timeout_seconds),
            self._patch(["launcher", "node"] if mpi else ["node"]),
        ]

    def _command(self, runtime: Any, mpi: bool, file: Path) -> list[str]:
        if not mpi:
            return ["python", *torchrun(self.config.processes_per_node), WORKER, str(file)]
        each = self.config.processes_per_node
        spread = ["-np", str(self.config.num_ranks), "--map-by", f"ppr:{each}:node:OVERSUBSCRIBE", "--bind-to", "none"]
        return [*runtime.trainer.command[:3], *spread, "python", "-m", WORKER, str(file)]

    def _patch(self, replicated: list[str]) -> Any:
        """The shared volume, and where the pods may run, for each of the runtime's jobs."""
        from kubeflow.trainer import options

        pod = options.PodSpecPatch(
            volumes=[{"name": VOLUME, "persistentVolumeClaim": {"claimName": self.config.shared_claim}}],
            containers=[options.ContainerPatch(name="node", volume_mounts=[{"name": VOLUME, "mountPath": self.config.shared_folder}])],
            node_selector=self.config.node_selector or None,
            tolerations=[dict(toleration) for toleration in self.config.tolerations] or None,
        )
        template = options.JobTemplatePatch(spec=options.JobSpecPatch(template=options.PodTemplatePatch(spec=pod)))
        jobset = options.JobSetSpecPatch(replicated_jobs=[options.ReplicatedJobPatch(name=name, template=template) for name in replicated])
        return options.RuntimePatch(training_runtime_spec=options.TrainingRuntimeSpecPatch(template=options.JobSetTemplatePatch(spec=jobset)))

    def status(self, tail: Tail) -> str:
        """`Created`, `Running`, `Complete` or `Failed`; what is new in the first node's log is passed on.

        Raises:
            EngineError: somebody removed the job.
        """
        try:
            with _asked(f"get TrainJob {self.name}"):
                status: str = self.client.get_job(self.name).status
        except ClusterError as error:
            if str(error.got).startswith("404"):
                raise EngineError("the TrainJob was removed while it ran", got=self.name, do="run the step again") from error
            raise
        try:
            lines = list(self.client.get_job_logs(self.name))
        except (RuntimeError, TimeoutError) as error:
            log.debug("trainjob=%s log=none reason=%s", self.name, error)  # a container that has not started has none
            return status
        # the last line may be half written for as long as the job runs
        whole = len(lines) if status in ("Complete", "Failed") else max(self.num_lines, len(lines) - 1)
        for line in lines[self.num_lines : whole]:
            tail.add(line)
        self.num_lines = whole
        return status

    def reason(self) -> str:
        """Why the job is in the condition it is in, and what its pods say."""
        with _asked(f"get TrainJob {self.name}"):
            found = self.client.backend.custom_api.get_namespaced_custom_object(*API, self.client.backend.namespace, "trainjobs", self.name)
        conditions = [entry for entry in found.get("status", {}).get("conditions", []) if entry.get("status") == "True"]
        said = [f"{entry.get('reason')}: {entry.get('message')}" for entry in conditions if entry.get("type") == "Failed"]
        return "; ".join([*said, *filter(None, [self.pods()])])

    def pods(self) -> str:
        """What keeps the pods from running, or ended them."""
        with _asked(f"list the pods of TrainJob {self.name}"):
            found = self.client.backend.core_api.list_namespaced_pod(
                self.client.backend.namespace, label_selector=f"jobset.sigs.k8s.io/jobset-name={self.name}"
            )
        return "; ".join(f"pod {pod.metadata.name} is {pod.status.phase}{_why(pod.status)}" for pod in found.items)

    def delete(self) -> None:
        """Remove the job and its pods; says so where that cannot be done."""
        for _ in range(TRIES):
            try:
                with _asked(f"delete TrainJob {self.name}"):
                    self.client.delete_job(self.name)
                return
            except UnansweredError as error:
                problem: ClusterError = error
                time.sleep(min(1.0, self.config.poll_seconds))
            except ClusterError as error:
                problem = error
                break
        if not str(problem.got).startswith("404"):
            log.warning("trainjob=%s state=left_behind reason=%s do=kubectl_delete_trainjob", self.name, problem)


def release(run_id: str, namespace: str | None = None) -> None:
    """Remove the TrainJobs that a run's tasks left behind, where there is a cluster; says so where that cannot be done."""
    if not IN_A_POD.is_dir() and "KUBECONFIG" not in os.environ:
        return
    try:
        client = _connect(namespace)
        with _asked("list TrainJobs"):
            found = client.backend.custom_api.list_namespaced_custom_object(
                *API, client.backend.namespace, "trainjobs", label_selector=f"{LABEL}={label(run_id)}"
            )
        for name in [entry["metadata"]["name"] for entry in found["items"]]:
            with _asked(f"delete TrainJob {name}"):
                client.delete_job(name)
            log.info("trainjob=%s state=deleted", name)
    except (ClusterError, EngineError) as error:
        log.warning("trainjobs=not_looked_for reason=%s", error)


def label(run_id: str) -> str:
    """A run's id as Kubernetes takes it for a label."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", run_id)[:63].strip("-_.")


def _connect(namespace: str | None) -> Any:
    """The SDK's client of the pod's cluster, or of the one that KUBECONFIG names.

    Raises:
        ClusterError: no cluster is configured here.
        EngineError: the SDK is not installed.
    """
    try:
        from kubeflow.common.types import KubernetesBackendConfig
        from kubeflow.trainer import TrainerClient
    except ImportError as error:
        raise EngineError("train.launcher trainjob cannot be used", got=str(error), do="pip install 'rlpipe[kubeflow]'") from error
    with _asked("connect"):
        return TrainerClient(KubernetesBackendConfig(namespace=namespace, config_file=os.environ.get("KUBECONFIG")))


def _why(status: Any) -> str:
    """Reasons in a pod's status, in brackets."""
    states = [entry.state for entry in status.container_statuses or []]
    held = [state.waiting or state.terminated for state in states if state and (state.waiting or state.terminated)]
    said = [entry.reason for entry in (*held, *(status.conditions or ())) if entry.reason and entry.reason != "Completed"]
    return f" ({', '.join(dict.fromkeys(said))})" if said else ""


@contextmanager
def _asked(what: str) -> Iterator[None]:
    """Turn what the SDK and the Kubernetes client raise into an error that says what was asked."""
    from kubernetes.client import ApiException
    from kubernetes.config import ConfigException
    from urllib3.exceptions import HTTPError

    try:
        yield
    except ConfigException as error:
        raise ClusterError("no cluster is configured here", got=str(error), do="run the step in a pod, or name a kubeconfig in KUBECONFIG") from error
    except (ApiException, HTTPError, RuntimeError, TimeoutError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, ApiException):
            cause = cause.__cause__
        if not isinstance(cause, ApiException):
            raise UnansweredError(
                f"the cluster could not be asked to {what}", got=f"{type(cause).__name__}: {cause}", do="check that it can be reached"
            ) from error
        kind = UnansweredError if cause.status in (0, 429) or cause.status >= 500 else ClusterError
        got = f"{cause.status} {cause.reason}: {' '.join(str(cause.body).split())[:300]}"
        raise kind(f"the cluster refused to {what}", got=got, do=DO.get(cause.status)) from error
