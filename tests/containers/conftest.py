"""The images of every component, built once from the real Dockerfiles, with a secret in the environment that must not get into them."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlpipe import __version__

ROOT = Path(__file__).parents[2]
COMPONENTS = tuple(sorted(path.parent.name for path in ROOT.glob("components/*/Dockerfile")))
MARKER = "marker-4f1d0c62-of-a-secret"
SECRETS = {"HF_TOKEN": MARKER, "AWS_SECRET_ACCESS_KEY": MARKER, "MLFLOW_TRACKING_PASSWORD": MARKER, "KF_TOKEN": MARKER}


def image_name(component: str) -> str:
    """The name that the component's `base_image` has."""
    return f"ghcr.io/rlpipe/{component}:{__version__}"


@pytest.fixture(scope="session")
def revision() -> str:
    """The commit that is checked out when the tests begin."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """A client of the engine that `run.sh` found or set up."""
    import docker

    client = docker.from_env(timeout=600)
    yield client
    client.close()


@pytest.fixture(scope="session")
def images(revision: str) -> dict[str, str]:
    """Image name by component, each built on the CPU base."""
    environment = {**os.environ, **SECRETS, "BASE": "cpu"}
    done = subprocess.run(["tools/images.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    print(*(line for line in done.stderr.splitlines() if line.startswith("images:")), sep="\n")
    assert MARKER not in done.stdout + done.stderr
    return {component: image_name(component) for component in COMPONENTS}


def confined(**more: Any) -> dict[str, Any]:
    """How a container runs in tests, as a restricted pod does: nothing to write but /tmp, no network, no privilege."""
    return {
        "read_only": True,
        "tmpfs": {"/tmp": "exec"},
        "network_mode": "none",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "remove": True,
        "stderr": True,
        **more,
    }
