"""Two rounds of the compiled pipeline, every task in a container of its own, give the bytes of `rlpipe run` in one process."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rlpipe import artifact, layout
from tests.containers.conftest import MARKER, ROOT, SECRETS, image_name

pytestmark = pytest.mark.containers

MICRO = ROOT / "configs/micro.yaml"
ARTIFACTS = ("trajectories", "progress", "kept", "scored", "history", "policy", "evaluation")
AT_START = ("progress", "history", "policy", "evaluation")
CONFINED = ("read_only=true", "network_mode=none", "cap_drop=[ALL]", "security_opt=[no-new-privileges]")


def run(workdir: Path, *options: str) -> None:
    """`rlpipe run` of two rounds; without a umask, so that another user in a container can write into the folders made here."""
    command = [sys.executable, "-m", "rlpipe.cli", "run", "--params", str(MICRO), "--rounds", "2", "--workdir", str(workdir), *options]
    done = subprocess.run(command, env={**os.environ, **SECRETS}, capture_output=True, text=True, check=False, umask=0)
    assert done.returncode == 0, done.stderr[-5000:] + _tail(workdir)
    assert MARKER not in done.stdout + done.stderr


def _tail(workdir: Path) -> str:
    log = workdir / ".rlpipe/kfp-docker.log"
    return "\n" + log.read_text(encoding="utf-8")[-5000:] if log.is_file() else ""


def fingerprints(workdir: Path) -> dict[str, str]:
    """sha256 of the content of every artifact of the run."""
    places = [layout.MODEL]
    places += [
        layout.artifact_path(name, index) for index in range(3) for name in ARTIFACTS if index or name in ("progress", "history", "policy", "evaluation")
    ]
    tasks = {place.as_posix(): artifact.sha256(workdir / place) for place in (layout.TRAIN_TASKS, layout.EVAL_TASKS)}
    return tasks | {place.as_posix(): artifact.fingerprint(workdir / place) for place in places}


@pytest.fixture(scope="module")
def contained(images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in containers: by uid 1000 where the tests' user may hand files over, else by the tests' user."""
    workdir = tmp_path_factory.mktemp("contained")
    for folder in (workdir, *workdir.parents[:2]):
        folder.chmod(0o777 if folder == workdir else 0o755)
    user = ("user=1000:1000",) if os.getuid() == 0 else ()
    run(workdir, "--on", "kfp-docker", *(part for option in (*CONFINED, *user) for part in ("--docker", option)))
    return workdir


def test_same_bytes_as_in_one_process(contained: Path, tmp_path: Path) -> None:
    run(tmp_path)
    assert fingerprints(contained) == fingerprints(tmp_path)


def test_every_task_in_its_own_container(contained: Path) -> None:
    log = (contained / ".rlpipe/kfp-docker.log").read_text(encoding="utf-8")
    used = Counter(re.findall(r"Found image '(.*)'", log))
    assert "Pulling image" not in log
    assert {name: used[image_name(name)] for name in ("preflight", "start", *layout.ROUND_STEPS, "finish")} == {
        "preflight": 1,
        "start": 1,
        "rollout": 2,
        "filter": 2,
        "reward": 2,
        "train": 2,
        "evaluate": 2,
        "finish": 1,
    }


def test_no_secret_in_what_the_run_left(contained: Path) -> None:
    """Case B07."""
    leaking = [path for path in contained.rglob("*") if path.is_file() and MARKER.encode() in path.read_bytes()]
    assert leaking == []
