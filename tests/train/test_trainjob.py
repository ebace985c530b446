"""A TrainJob through the Kubeflow SDK and a Kubernetes API over http: what is asked for, and how each end is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlpipe.errors import ClusterError, ConfigError, DeadlineError, EngineError
from rlpipe.train.launchers import release
from tests.factories import tiny_policy
from tests.train.cluster import JOBS, Cluster, serving
from tests.train.factories import config, random_groups
from tests.train.processes import ranks_below, wait_for
from tests.train.test_fit import WEIGHTS, contents, train

ROOT = Path(__file__).parents[2]
MPIRUN = """#!{python}
# Open MPI as far as a rank sees it: processes that are told their number.
import os, subprocess, sys
size = int(sys.argv[sys.argv.index("-np") + 1])
command = sys.argv[sys.argv.index("python"):]
def environ(rank):
    return {{**os.environ, "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(size), "PMIX_NAMESPACE": "1234"}}
ranks = [subprocess.Popen(command, env=environ(rank)) for rank in range(size)]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


@pytest.fixture(scope="module")
def policy_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("start") / "policy")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster that this process is set up for, and a shared volume."""
    (tmp_path / "shared").mkdir()
    made = Cluster(tmp_path)
    with serving(made) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        monkeypatch.setenv("RLPIPE_IMAGE", "registry.example/train:1.2")
        monkeypatch.setenv("RLPIPE_RUN", "run/7")
        yield made


def launcher(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    common = {"type": "trainjob", "namespace": "lab", "shared_claim": "trainings", "shared_folder": str(tmp_path / "shared"), "poll_seconds": 0.1}
    return {**common, "runtime": "torch-distributed", **changes}


def settings(tmp_path: Path, **changes: Any) -> Any:
    return config(groups_per_step=2, micro_batch=2, learning_rate=1e-3, launcher=launcher(tmp_path, **changes))


def environ_of_pods(tmp_path: Path) -> dict[str, str]:
    """What the image brings: python, and Open MPI."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "mpirun").write_text(MPIRUN.format(python=sys.executable))
    (bin_folder / "mpirun").chmod(0o755)
    return {"PATH": f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PET_NNODES": "1", "PYTHONPATH": str(ROOT)}


def nothing_is_left(cluster: Cluster) -> bool:
    return cluster.jobs == {} and cluster.processes == {} and list((cluster.folder / "shared/rlpipe").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["torch-distributed", "deepspeed-distributed"])
def test_a_trainjob_gives_what_one_process_gives(tmp_path: Path, policy_in: Path, cluster: Cluster, runtime: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rlpipe")
    cluster.environ = environ_of_pods(tmp_path)
    groups = random_groups(3)
    _, alone = train(tmp_path, config(groups_per_step=2, micro_batch=2, learning_rate=1e-3), groups, policy_in, "alone")
    report, policy = train(tmp_path, settings(tmp_path, runtime=runtime, processes_per_node=2), groups, policy_in, "policy")
    assert report.numbers["optimizer_steps"] == 2
    first, second = load_file(alone / WEIGHTS), load_file(policy / WEIGHTS)
    assert all(torch.allclose(first[name], second[name], rtol=0, atol=1e-5) for name in first)
    assert contents(policy).keys() == contents(alone).keys()
    assert "rank=0 num_ranks=2 state=joined" in caplog.text
    assert nothing_is_left(cluster)


def test_what_the_cluster_is_asked_for(tmp_path: Path, policy_in: Path, cluster: Cluster) -> None:
    cluster.condition = ("Failed", "JobsFailed", "ended early")
    asked = {"resources": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "2"}, "node_selector": {"pool": "gpu"}, "tolerations": [{"key": "gpu"}]}
    nodes = {"num_nodes": 3, "processes_per_node": 2, "runtime": "deepspeed-distributed", "timeout_seconds": 600}
    with pytest.raises(EngineError):
        train(tmp_path, settings(tmp_path, **asked, **nodes, env={"NCCL_DEBUG": "WARN"}), random_groups(2), policy_in)
    (job,) = cluster.created
    spec, trainer = job["spec"], job["spec"]["trainer"]
    assert job["metadata"]["labels"] == {"rlpipe/run": "run-7"}
    assert (spec["runtimeRef"]["name"], spec["activeDeadlineSeconds"]) == ("deepspeed-distributed", 600)
    assert (trainer["image"], trainer["numNodes"]) == ("registry.example/train:1.2", 3)
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "2"}
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in trainer["env"]
    mpirun = "mpirun --hostfile /etc/mpi/hostfile -np 6 --map-by ppr:2:node:OVERSUBSCRIBE --bind-to none python -m rlpipe.train.worker"
    assert " ".join(trainer["command"][:-1]) == mpirun
    assert trainer["command"][-1].startswith(str(tmp_path / "shared/rlpipe/"))
    (patch,) = spec["runtimePatches"]
    for replicated in patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]:
        pod = replicated["template"]["spec"]["template"]["spec"]
        assert replicated["name"] in ("launcher", "node")
        assert pod["volumes"] == [{"name": "rlpipe-shared", "persistentVolumeClaim": {"claimName": "trainings"}}]
        assert pod["containers"] == [{"name": "node", "volumeMounts": [{"name": "rlpipe-shared", "mountPath": str(tmp_path / "shared")}]}]
        assert (pod["nodeSelector"], pod["tolerations"]) == ({"pool": "gpu"}, [{"key": "gpu"}])


def test_a_failed_job_says_why(tmp_path: Path, policy_in: Path, cluster: Cluster) -> None:
    cluster.condition = ("Failed", "JobsFailed", "jobset failed due to one or more job failures")
    with pytest.raises(EngineError, match=r"the training failed; got TrainJob rlpipe-r01-\w+ is Failed: JobsFailed: jobset failed due to one or more"):
        train(tmp_path, settings(tmp_path), random_groups(2), policy_in)
    assert nothing_is_left(cluster)


def test_a_job_that_never_starts_says_what_it_waits_for(tmp_path: Path, policy_in: Path, cluster: Cluster) -> None:
    cluster.waiting = "ImagePullBackOff"
    with pytest.raises(DeadlineError, match=r"got 1 s; TrainJob rlpipe-\S+ is Created; pod \S+-node-0-0 is Pending \(ImagePullBackOff\)"):
        train(tmp_path, settings(tmp_path, timeout_seconds=1), random_groups(2), policy_in)
    assert nothing_is_left(cluster)


def test_a_job_that_the_cluster_ended_for_its_time_is_too_late(tmp_path: Path, policy_in: Path, cluster: Cluster) -> None:
    cluster.condition = ("Failed", "DeadlineExceeded", "active longer than allowed")
    with pytest.raises(DeadlineError, match=r"is Failed: DeadlineExceeded: active longer"):
        train(tmp_path, settings(tmp_path), random_groups(2), policy_in)


@pytest.mark.parametrize(
    ("refusals", "message"),
    [
        ({("POST", "/trainjobs"): [403]}, r"refused to create TrainJob.*got 403 Forbidden: .*do: let the task's service account"),
        ({("POST", "/trainjobs"): [401]}, r"got 401.*log in"),
        ({("POST", "/trainjobs"): [500, 500, 500]}, r"refused to create TrainJob.*got 500"),
        ({("GET", "/clustertrainingruntimes/torch-distributed"): [404]}, r"refused to get runtime torch-distributed; got 404.*train.launcher.runtime"),
    ],
)
def test_a_cluster_that_refuses_is_quoted(tmp_path: Path, policy_in: Path, cluster: Cluster, refusals: Any, message: str) -> None:
    cluster.refusals = refusals
    with pytest.raises(ClusterError, match=message):
        train(tmp_path, settings(tmp_path), random_groups(2), policy_in)
    assert nothing_is_left(cluster)


@pytest.mark.parametrize("codes", [[500], [503, 503], [0]], ids=["500", "503 twice", "the answer is lost"])
def test_a_job_is_created_once_whatever_happens_to_the_answer(tmp_path: Path, policy_in: Path, cluster: Cluster, codes: list[int]) -> None:
    cluster.refusals = {("POST", "/trainjobs"): codes}
    cluster.condition = ("Failed", "JobsFailed", "ended early")
    with pytest.raises(EngineError, match="ended early"):
        train(tmp_path, settings(tmp_path), random_groups(2), policy_in)
    assert len(cluster.created) == 1
    assert nothing_is_left(cluster)


def test_a_cluster_that_is_away_for_a_moment_ends_nothing(tmp_path: Path, policy_in: Path, cluster: Cluster) -> None:
    cluster.waiting = "ContainerCreating"
    cluster.refusals = {("GET", "/pods"): [503, 503]}
    with pytest.raises(DeadlineError, match="ContainerCreating"):
        train(tmp_path, settings(tmp_path, timeout_seconds=1), random_groups(2), policy_in)


def test_a_job_that_somebody_removed_is_not_waited_for(tmp_path: Path, policy_in: Path, cluster: Cluster) -> None:
    remover = threading.Thread(target=lambda: wait_for(lambda: cluster.jobs) and cluster.jobs.clear())
    remover.start()
    with pytest.raises(EngineError, match="was removed while it ran"):
        train(tmp_path, settings(tmp_path), random_groups(2), policy_in)
    remover.join()


def test_a_cluster_that_is_not_there(tmp_path: Path, policy_in: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    with pytest.raises(ClusterError, match="no cluster is configured here"):
        train(tmp_path, settings(tmp_path), random_groups(2), policy_in)


def test_no_image_and_no_volume_are_refused_first(tmp_path: Path, policy_in: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"shared_folder is not there; got /nowhere; accepted: claim trainings mounted"):
        train(tmp_path, settings(tmp_path, shared_folder="/nowhere"), random_groups(2), policy_in)
    monkeypatch.delenv("RLPIPE_IMAGE")
    with pytest.raises(ConfigError, match="no image for the TrainJob"):
        train(tmp_path, settings(tmp_path), random_groups(2), policy_in, "other")
    assert cluster.asked == []


COORDINATOR = """
import sys
from pathlib import Path
from tests.train.factories import config, random_groups
from tests.train.test_fit import train
from tests.train.test_trainjob import launcher
folder = Path(sys.argv[1])
train(folder, config(launcher=launcher(folder), epochs=20_000), random_groups(3), Path(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_step_that_is_ended_takes_its_job_along(tmp_path: Path, policy_in: Path, cluster: Cluster) -> None:
    """Case F04."""
    cluster.environ = environ_of_pods(tmp_path)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    step = subprocess.Popen([sys.executable, "-c", COORDINATOR, str(tmp_path), str(policy_in)], env=environ, stderr=subprocess.DEVNULL)
    wait_for(lambda: ranks_below(tmp_path))
    step.send_signal(signal.SIGTERM)
    assert step.wait(60) == 143
    assert nothing_is_left(cluster)
    assert ranks_below(tmp_path) == {}


def test_what_a_killed_step_left_is_removed_at_the_runs_end(tmp_path: Path, cluster: Cluster) -> None:
    for name, run in (("a", "run-7"), ("b", "run-8")):
        cluster.jobs[name] = {"metadata": {"name": name, "labels": {"rlpipe/run": run}}}
    release("run/7", "lab")
    assert list(cluster.jobs) == ["b"]
    cluster.refusals = {("GET", "/trainjobs"): [403]}
    release("run/8", "lab")
    assert list(cluster.jobs) == ["b"]
    assert ("DELETE", f"{JOBS}/a") in cluster.asked
