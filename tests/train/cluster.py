"""A Kubernetes API over http, as far as a TrainJob needs it, that runs the command of each job here.

Requests and answers are held against the models that Kubeflow publishes for its API (`kubeflow_trainer_api`); paths,
status codes and the pods of a job are those of Kubernetes and of Kubeflow Trainer 2.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from kubeflow_trainer_api import models

CREATED = "2026-01-01T00:00:00Z"
JOBS = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/lab/trainjobs"


def runtime(name: str, policy: dict[str, Any], framework: str, replicated: list[str]) -> dict[str, Any]:
    """A ClusterTrainingRuntime like those that Kubeflow Trainer installs; its last job is the trainer's."""
    template = {"spec": {"template": {"spec": {"containers": [{"name": "node", "image": "runtime"}]}}}}
    ancestor = {"metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}}
    jobs = [{"name": job, "template": {**template, **(ancestor if job == replicated[-1] else {})}} for job in replicated]
    content = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": framework}},
        "spec": {"mlPolicy": {"numNodes": 1, **policy}, "template": {"spec": {"replicatedJobs": jobs}}},
    }
    return models.TrainerV1alpha1ClusterTrainingRuntime.from_dict(content).to_dict()


RUNTIMES = {
    "torch-distributed": runtime("torch-distributed", {"torch": {}}, "torch", ["node"]),
    "deepspeed-distributed": runtime("deepspeed-distributed", {"mpi": {"numProcPerNode": 1, "runLauncherAsNode": True}}, "deepspeed", ["node", "launcher"]),
}


@dataclass
class Cluster:
    """What the API holds, and how it should behave.

    Attributes:
        phase: of the pods of a job, unless its command is run.
        condition: (type, reason, message) of a job at once.
        refusals: status codes by (method, end of path), used up from the front; 0 does as asked and loses the answer.
        environ: of commands; None runs none.
    """

    folder: Path
    environ: dict[str, str] | None = None
    phase: str = "Pending"
    condition: tuple[str, str, str] | None = None
    waiting: str | None = None
    refusals: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, job: dict[str, Any]) -> None:
        name, command = job["metadata"]["name"], job["spec"]["trainer"]["command"]
        if self.environ is not None:
            log = (self.folder / f"{name}.log").open("wb")
            environ = {**os.environ, **{entry["name"]: entry["value"] for entry in job["spec"]["trainer"]["env"]}, **self.environ}
            self.processes[name] = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def stop(self, name: str) -> None:
        if process := self.processes.pop(name, None):
            process.terminate()  # as Kubernetes does first
            process.wait(30)

    def seen(self, name: str) -> dict[str, Any]:
        """A job with its status now."""
        process, condition = self.processes.get(name), self.condition
        if process and process.poll() is not None:
            condition = ("Complete", "JobsCompleted", "done") if process.returncode == 0 else ("Failed", "JobsFailed", f"exit code {process.returncode}")
        conditions = [] if condition is None else [dict(zip(("type", "reason", "message"), condition, strict=True), status="True", lastTransitionTime=CREATED)]
        return {**self.jobs[name], "status": {"conditions": conditions}}

    def pod(self, name: str) -> dict[str, Any]:
        mpi = self.jobs[name]["spec"]["runtimeRef"]["name"] == "deepspeed-distributed"
        role, phase = "launcher" if mpi else "node", "Running" if name in self.processes else self.phase
        labels = {
            "jobset.sigs.k8s.io/jobset-name": name,
            "jobset.sigs.k8s.io/replicatedjob-name": role,
            "batch.kubernetes.io/job-completion-index": "0",
        }
        state = {"waiting": {"reason": self.waiting}} if self.waiting else {"running": {}}
        container = {"name": "node", "image": "i", "imageID": "i", "ready": False, "restartCount": 0, "state": state}
        return {
            "metadata": {"name": f"{name}-{role}-0-0", "labels": labels, "creationTimestamp": CREATED},
            "spec": {"containers": [{"name": "node", "image": "i"}]},
            "status": {"phase": phase, "containerStatuses": [container]},
        }

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        if path.endswith("/configmaps/kubeflow-trainer-public"):
            return 200, {"kind": "ConfigMap", "data": {"kubeflow_trainer_version": "v2.3.0"}}
        if found := re.fullmatch(r".*/clustertrainingruntimes/([^/]+)", path):
            return (200, RUNTIMES[found[1]]) if found[1] in RUNTIMES else (404, None)
        if path.endswith("/pods"):
            name = re.search(r"jobset-name=([^,]+)", query["labelSelector"][0])[1]
            return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": [self.pod(name)] if name in self.jobs else []}
        if found := re.fullmatch(r".*/pods/(.+)-(?:node|launcher)-0-0/log", path):
            log = self.folder / f"{found[1]}.log"
            return (200, log.read_text()) if log.exists() else (400, None)
        if path.startswith(JOBS):
            return self.answer_job(method, path.removeprefix(JOBS).strip("/"), query, body)
        return 404, None

    def answer_job(self, method: str, name: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        if method == "POST":
            job = models.TrainerV1alpha1TrainJob.from_dict(body).to_dict()
            name = job["metadata"]["name"]
            if name in self.jobs:
                return 409, None
            job["metadata"] |= {"namespace": "lab", "uid": f"uid-{name}", "creationTimestamp": CREATED}
            self.jobs[name] = job
            self.created.append(job)
            self.start(job)
            return 201, self.seen(name)
        if not name:
            key, _, value = query["labelSelector"][0].partition("=")
            return 200, {"items": [self.seen(job) for job in self.jobs if self.jobs[job]["metadata"]["labels"].get(key) == value]}
        if name not in self.jobs:
            return 404, None
        if method == "DELETE":
            del self.jobs[name]
            self.stop(name)
            return 200, {"kind": "Status", "status": "Success"}
        return 200, self.seen(name)


class Handler(BaseHTTPRequestHandler):
    cluster: Cluster

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        url = urlparse(self.path)
        self.cluster.asked.append((self.command, url.path))
        refusals = next((codes for (method, end), codes in self.cluster.refusals.items() if method == self.command and url.path.endswith(end) and codes), [])
        refusal = refusals.pop(0) if refusals else None
        if refusal:
            self.say(refusal, None)
            return
        status, content = self.cluster.answer(self.command, url.path, parse_qs(url.query), body)
        if refusal == 0:
            self.close_connection = True
            return
        self.say(status, content)

    do_POST = do_DELETE = do_GET

    def say(self, status: int, content: Any) -> None:
        if status >= 400:
            content = {"kind": "Status", "status": "Failure", "code": status, "message": f"said {status}"}
        sent = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(content, str) else "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serving(cluster: Cluster) -> Iterator[Path]:
    """The kubeconfig of a server for `cluster`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("H", (Handler,), {"cluster": cluster}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    kubeconfig = cluster.folder / "kubeconfig"
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "lab",
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab", "namespace": "lab"}}],
        "clusters": [{"name": "lab", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "lab", "user": {}}],
    }
    kubeconfig.write_text(json.dumps(content))
    try:
        yield kubeconfig
    finally:
        server.shutdown()
        server.server_close()
        for process in cluster.processes.values():
            os.killpg(process.pid, signal.SIGKILL)
