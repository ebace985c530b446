"""Every component's folder keeps the rules of kubeflow/pipelines-components, and compiles on its own."""

import ast
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import rlpipe.kubeflow.components as package
from docstring_parser import DocstringStyle, parse
from tools import component_readmes

from rlpipe import params
from rlpipe.kubeflow.section import TASKS

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent for path in (ROOT / "components").glob("*/component.py"))
SOURCES = [path for folder in ("components", "pipelines") for path in sorted((ROOT / folder).rglob("*.py"))]
SEMANTIC_VERSION = r"(==|>=|<=)(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
FIELDS, MORE_FIELDS = ["name", "stability", "dependencies", "lastVerified"], ["tags", "ci", "links"]

every_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
every_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())


def function(folder: Path) -> ast.FunctionDef:
    (found,) = [node for node in ast.parse((folder / "component.py").read_text()).body if isinstance(node, ast.FunctionDef)]
    return found


def component(folder: Path):
    module = __import__(f"{package.__name__}.{folder.name}.component", fromlist=[folder.name])
    return getattr(module, folder.name)


def imported(tree: ast.Module) -> set[str]:
    """Top-level packages of the absolute imports outside of functions and classes."""
    found, open_nodes = set(), list(tree.body)
    while open_nodes:
        node = open_nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).split(".")[0])
        elif not isinstance(node, ast.FunctionDef | ast.ClassDef):
            open_nodes += list(ast.iter_child_nodes(node))
    return found


def test_every_task_of_a_pipeline_has_its_folder() -> None:
    assert [folder.name for folder in FOLDERS] == sorted(TASKS)


@every_folder
def test_the_folder_is_complete(folder: Path) -> None:
    for name in ("__init__.py", "component.py", "metadata.yaml", "OWNERS", "README.md", "tests/test_component_unit.py"):
        assert (folder / name).is_file(), name
    assert (folder / "__init__.py").read_text().endswith(f"from .component import {folder.name} as {folder.name}\n")
    assert '__name__ == "__main__"' in (folder / "component.py").read_text()


@every_source
def test_only_the_standard_library_and_kfp_are_imported_at_the_top(path: Path) -> None:
    for_tests = {"pytest"} if path.name.startswith(("test_", "conftest")) else set()
    assert imported(ast.parse(path.read_text())) <= {*sys.stdlib_module_names, "kfp"} | for_tests


@every_folder
def test_metadata_has_its_fields_in_their_order(folder: Path) -> None:
    content = params.read_yaml(folder / "metadata.yaml")
    assert [name for name in content if name not in MORE_FIELDS] == FIELDS
    assert content["name"] == folder.name
    assert content["stability"] in ("experimental", "alpha", "beta", "stable")
    assert all(isinstance(tag, str) for tag in content["tags"])


@every_folder
def test_metadata_says_when_it_was_verified(folder: Path) -> None:
    text = (folder / "metadata.yaml").read_text()
    (day,) = re.findall(r"^lastVerified: (\d{4}-\d{2}-\d{2})T00:00:00Z$", text, re.MULTILINE)
    assert datetime.fromisoformat(day).replace(tzinfo=UTC) <= datetime.now(UTC)


@every_folder
def test_dependencies_are_versions_of_pipelines_and_others(folder: Path) -> None:
    dependencies = params.read_yaml(folder / "metadata.yaml")["dependencies"]
    assert set(dependencies) <= {"kubeflow", "external_services"}
    for entry in [entry for entries in dependencies.values() for entry in entries]:
        assert re.fullmatch(SEMANTIC_VERSION, entry["version"]), entry
    (pipelines,) = [entry["version"] for entry in dependencies["kubeflow"] if entry["name"] == "Pipelines"]
    assert f'"kfp{pipelines},' in (ROOT / "pyproject.toml").read_text()


@every_folder
def test_someone_approves(folder: Path) -> None:
    owners = params.read_yaml(folder / "OWNERS")
    assert list(owners) == ["approvers", "reviewers"]
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", handle) for handle in [*owners["approvers"], *owners["reviewers"]])


@every_folder
def test_the_image_is_a_literal_with_a_tag_and_nothing_is_installed(folder: Path) -> None:
    (decorator,) = function(folder).decorator_list
    values = {keyword.arg: keyword.value for keyword in decorator.keywords}
    assert ast.unparse(decorator.func) == "dsl.component"
    assert set(values) == {"base_image", "install_kfp_package"}
    assert ast.literal_eval(values["install_kfp_package"]) is False
    assert isinstance(values["base_image"], ast.Constant)
    assert re.fullmatch(r"ghcr\.io/rlpipe/[a-z]+:\d+\.\d+\.\d+", values["base_image"].value)


@every_folder
def test_the_body_is_an_import_and_a_call(folder: Path) -> None:
    body = function(folder).body[1:]
    assert len(body) <= 6
    assert [type(node) for node in body if isinstance(node, ast.ImportFrom | ast.Import)] == [ast.ImportFrom]
    assert body[0].module.split(".")[0] == "rlpipe"
    assert isinstance(body[-1], ast.Expr | ast.Return)
    assert not [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.If | ast.For | ast.While | ast.Try)]


@every_folder
def test_the_docstring_explains_every_parameter(folder: Path) -> None:
    found = function(folder)
    docstring = parse(ast.get_docstring(found), DocstringStyle.GOOGLE)
    assert docstring.short_description.endswith(".")
    assert [entry.arg_name for entry in docstring.params] == [argument.arg for argument in found.args.args]
    assert all(entry.description.endswith(".") for entry in docstring.params)
    assert (docstring.returns is None) == (found.returns is None)


@pytest.mark.parametrize("name", ["post_training", "retraining"])
def test_a_pipelines_docstring_explains_every_parameter(name: str) -> None:
    (found,) = [node for node in ast.walk(ast.parse((ROOT / f"pipelines/{name}.py").read_text())) if isinstance(node, ast.FunctionDef) and node.name == name]
    docstring = parse(ast.get_docstring(found), DocstringStyle.GOOGLE)
    assert [entry.arg_name for entry in docstring.params] == [argument.arg for argument in found.args.args]


@every_folder
def test_it_compiles_on_its_own(folder: Path, tmp_path: Path) -> None:
    from kfp import compiler

    compiler.Compiler().compile(component(folder), str(tmp_path / "component.yaml"))
    text = (tmp_path / "component.yaml").read_text()
    assert component_readmes.image(function(folder)) in text
    assert "pip install" not in text


def test_the_readmes_are_what_the_sources_say() -> None:
    assert list(component_readmes.stale()) == []


def test_what_stands_below_the_marker_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("# old\n\n<!-- custom-content -->\n\nMy own words.\n")
    assert component_readmes.whole("# new\n", path) == "# new\n\n<!-- custom-content -->\n\nMy own words.\n"


@every_folder
def test_the_usage_example_compiles(folder: Path, tmp_path: Path) -> None:
    from kfp import compiler

    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    compiler.Compiler().compile(names["example"], str(tmp_path / "example.yaml"))
    assert f"comp-{folder.name.replace('_', '-')}" in (tmp_path / "example.yaml").read_text()
