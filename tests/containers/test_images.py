"""The images: what is in them, who they run as, and what must not be in them."""

import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlpipe import __version__
from tests.containers.conftest import COMPONENTS, MARKER, ROOT, confined

pytestmark = pytest.mark.containers

SMOKE = (ROOT / "tools/image/smoke.py").read_text(encoding="utf-8")
FLAVOURS = ("filter", "snapshot", "rollout", "train")
"""One image of each kind of Dockerfile; the others differ in labels alone."""
PIP_SETTINGS = ("etc/pip.conf", "etc/uv/uv.toml", "root/.config/pip/pip.conf", "root/.pip/pip.conf", "root/.netrc")
LARGEST_SCANNED = 1_000_000


@pytest.mark.parametrize("component", COMPONENTS)
def test_imports_and_versions(engine: Any, images: dict[str, str], component: str) -> None:
    """Case F10."""
    output = engine.containers.run(images[component], ["python3", "-c", SMOKE], environment={"COMPONENT": component}, **confined()).decode()
    line = output.strip().splitlines()[-1]
    print(line)
    assert line.startswith(f"{component} python=3.")
    assert f"rlpipe={__version__} kfp=2.17.3" in line
    assert ("torch=2.13.0" in line) == (component in ("rollout", "start", "evaluate", "train"))
    assert ("vllm=0.32.0" in line) == (component in ("rollout", "start", "evaluate"))
    assert ("deepspeed=0.19.8" in line) == (component == "train")


@pytest.mark.parametrize("component", COMPONENTS)
def test_configuration(engine: Any, images: dict[str, str], revision: str, component: str) -> None:
    config = engine.images.get(images[component]).attrs["Config"]
    assert config["User"] == "1000:1000"
    assert not config.get("Entrypoint")
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == component
    assert labels["org.opencontainers.image.version"] == __version__
    assert labels["org.opencontainers.image.revision"] == revision
    assert labels["org.opencontainers.image.source"].startswith("https://")


def test_what_a_step_needs_at_hand(engine: Any, images: dict[str, str]) -> None:
    """A command line, a home that can be written, a name for uid 1000; git and DVC where artifacts are versioned."""
    run = "rlpipe --help >/dev/null && touch $HOME/x && id -u -n && git --version && dvc --version"
    said = engine.containers.run(images["snapshot"], ["sh", "-c", run], **confined()).decode()
    assert re.search(r"^\w+\ngit version 2\..*\n3\.67\.1$", said.strip(), re.MULTILINE), said


@pytest.mark.parametrize("component", FLAVOURS)
def test_history_without_secrets_and_machine(engine: Any, images: dict[str, str], component: str) -> None:
    """Case B07."""
    image = engine.images.get(images[component])
    text = json.dumps([image.history(), image.attrs])
    assert MARKER not in text
    assert "find-links" not in text
    assert "pip.conf" not in text


def test_layers_without_secrets_and_machine(engine: Any, images: dict[str, str]) -> None:
    """Case B07: every layer, whether or not a later one covers it."""
    found, layers = [], set()
    for layer, name, content in (file for component in FLAVOURS for file in _files(engine.images.get(images[component]), layers)):
        if MARKER.encode() in content:
            found.append(f"{layer}: {name}: the secret")
        if name.removeprefix("./") in PIP_SETTINGS and content.strip():
            found.append(f"{layer}: {name}: settings of pip")
    assert found == []
    assert len(layers) > 10


def _files(image: Any, seen: set[str]) -> Iterator[tuple[str, str, bytes]]:
    """Every file up to a size, in every layer of an image that was not seen yet; the image's own description too."""
    with tarfile.open(fileobj=_Stream(image.save()), mode="r|") as outer:
        for member in outer:
            content = outer.extractfile(member) if member.isfile() else None
            if content is None or member.name in seen:
                continue
            if member.name.endswith(".tar") or "blobs/" in member.name:  # named by their content
                seen.add(member.name)
            if member.size > LARGEST_SCANNED:
                yield from _members(member.name, content)
            elif tarfile.is_tarfile(small := io.BytesIO(content.read())):
                yield from _members(member.name, small)
            else:
                yield member.name, "", small.getvalue()


def _members(layer: str, content: Any) -> Iterator[tuple[str, str, bytes]]:
    with tarfile.open(fileobj=content, mode="r|*") as files:
        for member in files:
            file = files.extractfile(member) if member.isfile() and member.size <= LARGEST_SCANNED else None
            if file is not None:
                yield layer, member.name, file.read()


class _Stream(io.RawIOBase):
    """The chunks of a download as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = iter(chunks), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def test_own_rewards_are_added_to_the_images_that_score(engine: Any, images: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "kind_rewards.py").write_text("class Kind:\n    pass\n", encoding="utf-8")
    project = '[project]\nname = "kind-rewards"\nversion = "1.2"\n[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
    project += '[tool.hatch.build.targets.wheel]\nonly-include = ["kind_rewards.py"]\n'
    (tmp_path / "pyproject.toml").write_text(project, encoding="utf-8")
    environment = {**os.environ, "BASE": "cpu", "TAG": "with-own-rewards", "EXTRA": str(tmp_path)}
    done = subprocess.run(["tools/images.sh", "reward", "filter"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    asked = ["python3", "-c", "import importlib.util; print(importlib.util.find_spec('kind_rewards') is not None)"]
    scoring, other = (engine.containers.run(f"ghcr.io/rlpipe/{name}:with-own-rewards", asked, **confined()) for name in ("reward", "filter"))
    assert (scoring.strip(), other.strip()) == (b"True", b"False")
    assert engine.images.get("ghcr.io/rlpipe/reward:with-own-rewards").attrs["Config"]["User"] == "1000:1000"
