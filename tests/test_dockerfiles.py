"""The Dockerfiles, lists and pins that the images are built from, without building one."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KINDS = {
    "light": ("filter", "finish", "gather", "preflight", "promote", "reward"),
    "snapshot": ("snapshot",),
    "rollout": ("evaluate", "rollout", "start"),
    "train": ("train",),
}
LISTS = {"light": ("steps",), "snapshot": ("steps", "snapshot"), "rollout": ("steps", "model", "rollout"), "train": ("steps", "model", "train")}


def dockerfile(component: str) -> str:
    return (ROOT / "components" / component / "Dockerfile").read_text(encoding="utf-8")


def names(path: Path) -> set[str]:
    """Distribution names in a list of requirements or pins."""
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    return {re.split(r"[<>=!\[; ]", line)[0].lower().replace(".", "-") for line in lines if line}


def listed(kind: str) -> set[str]:
    return set().union(*(names(ROOT / f"constraints/images/{name}.txt") for name in LISTS[kind]))


def test_every_image_a_component_names_has_a_dockerfile() -> None:
    literals = {re.search(r'base_image="ghcr.io/rlpipe/([a-z]+):', path.read_text(encoding="utf-8")) for path in ROOT.glob("components/*/component.py")}
    assert {found.group(1) for found in literals if found} == {name for kind in KINDS.values() for name in kind}
    assert {path.parent.name for path in ROOT.glob("components/*/Dockerfile")} == {name for kind in KINDS.values() for name in kind}


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_a_kind_share_their_layers(kind: str) -> None:
    assert len({dockerfile(component) for component in KINDS[kind]}) == 1
    assert tuple(re.findall(r"install\.sh (\w+)$", dockerfile(KINDS[kind][0]), re.MULTILINE)) == (*LISTS[kind], "rlpipe")


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_root_and_nothing_stands_before_the_command(kind: str) -> None:
    text = dockerfile(KINDS[kind][0])
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE)[-1] == "1000:1000"
    assert re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE) == ["[]"]


@pytest.mark.parametrize("kind", KINDS)
def test_bases_are_versions(kind: str) -> None:
    assert re.match(r"ARG BASE_IMAGE=[a-z/-]+:v?[0-9]+\.[0-9]+[a-z0-9.-]*\nFROM \$\{BASE_IMAGE\}\n", dockerfile(KINDS[kind][0]))


@pytest.mark.parametrize("kind", KINDS)
def test_everything_in_an_image_is_pinned(kind: str) -> None:
    """Case F10."""
    assert listed(kind) <= names(ROOT / "constraints/cpu.txt")


def test_an_image_with_a_model_holds_what_the_package_depends_on() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = {re.split(r"[<>=\[]", text)[0].replace(".", "-") for text in tomllib.load(file)["project"]["dependencies"]}
    assert needed <= listed("rollout")
    assert needed - listed("light") == {"torch", "transformers", "safetensors", "gguf"}


def test_a_new_file_is_in_no_image_unless_it_is_listed() -> None:
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert rules[0] == "*"
    assert not any(rule.lstrip("!").startswith((".git", ".env", "tests")) for rule in rules)
