"""A time limit that holds whatever the step does (case B14)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlpipe import processes

SLEEPS = """
import os, signal, subprocess, sys, time
from pathlib import Path
from rlpipe import deadline
{before}
children = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], start_new_session=True)]
children.append(subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"]))
deadline.watch({seconds}, "train of round 1", "raise the limit", lambda error: Path({told!r}).write_text(str(error)), {parent})
print(*[child.pid for child in children], flush=True)
while True:
    time.sleep(1)
"""


def running(pid: int) -> bool:
    """Whether a process still does something; one that has ended but was not asked how does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(*pids: int, within: float = 2.0) -> bool:
    ends = time.monotonic() + within
    while any(running(pid) for pid in pids) and time.monotonic() < ends:
        time.sleep(0.02)
    return not any(running(pid) for pid in pids)


def started(told: Path, *, seconds: float, before: str = "", parent: int | None = None) -> tuple[subprocess.Popen, list[int]]:
    """A step with children that sleeps for ever, and all processes below it."""
    code = SLEEPS.format(seconds=seconds, told=str(told), before=before, parent=parent)
    step = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    step.stdout.readline()
    below = [process.pid for process in processes.below([step.pid], processes.alive())]
    assert len(below) >= 4
    return step, below


def test_a_step_that_sleeps_for_ever_is_ended_with_its_children(tmp_path: Path) -> None:
    """Case B14: with a limit of 3 s, ended within 5 s, children gone."""
    step, below = started(tmp_path / "told", seconds=3)
    began = time.monotonic()
    step.wait(timeout=5)
    assert 2 < time.monotonic() - began < 5
    assert step.returncode == -signal.SIGTERM
    assert gone(*below)
    assert (tmp_path / "told").read_text() == "train of round 1 took longer than 3 s; do: raise the limit"


def test_a_step_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    step, below = started(tmp_path / "told", seconds=1, before="signal.signal(signal.SIGTERM, signal.SIG_IGN); deadline.GRACE_SECONDS = 1.0")
    step.wait(timeout=5)
    assert step.returncode == -signal.SIGKILL
    assert gone(*below)


def test_a_step_does_not_outlive_whom_it_works_for(tmp_path: Path) -> None:
    master = subprocess.Popen(["sleep", "600"])
    step, below = started(tmp_path / "told", seconds=600, parent=master.pid)
    assert step.poll() is None
    master.kill()
    master.wait()
    step.wait(timeout=5)
    assert gone(*below)
    assert not (tmp_path / "told").exists()


def test_the_watcher_goes_with_the_step_and_is_none_of_its_children(tmp_path: Path) -> None:
    marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
    code = (
        "import os; from rlpipe import deadline, processes;"
        f"deadline.watch(600, {marker!r}, '', print); print(processes.below([os.getpid()], processes.alive()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]")
    ends = time.monotonic() + 5
    while watchers(marker) and time.monotonic() < ends:
        time.sleep(0.02)
    assert watchers(marker) == []


def watchers(marker: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.mark.timeout(120)
def test_a_component_on_kfps_local_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case B14: state timeout, exit code 11, and the run does not go on."""
    from kfp import dsl, local

    @dsl.component(base_image="python:3.11", install_kfp_package=False)
    def sleeps(pids: str):
        import subprocess
        import time
        from pathlib import Path

        from rlpipe.kubeflow.pod import guarded

        with guarded("train", 1):
            children = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], start_new_session=True)]
            Path(pids).write_text(" ".join(str(child.pid) for child in children))
            time.sleep(600)

    @dsl.pipeline
    def pipeline(pids: str):
        sleeps(pids=pids).set_env_variable("RLPIPE_TIMEOUT_SECONDS", "3")

    monkeypatch.setenv("RLPIPE_FAILURE_FILE", str(tmp_path / "failure.json"))
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "root"), raise_on_error=True)
    with pytest.raises(RuntimeError):
        pipeline(pids=str(tmp_path / "pids"))
    ended = time.time()
    pids = tmp_path / "pids"
    assert ended - pids.stat().st_mtime < 5
    assert gone(*(int(word) for word in pids.read_text().split()))
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert (failure["state"], failure["exit_code"], failure["type"]) == ("timeout", 11, "DeadlineError")
    assert failure["message"] == "train of round 1 took longer than 3 s; do: raise kubeflow.resources.train.timeout_seconds"
