"""Imports run one way, heavy libraries stay in their one place, and the sizes hold."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "rlpipe"
FILES = sorted(SRC.rglob("*.py"))
ONLY_IN = {
    "vllm": ("engines/",),
    "deepspeed": ("train/backends/",),
    "kfp": ("kubeflow/",),
    "kfp_server_api": ("kubeflow/",),
    "kubeflow": ("train/launchers/trainjob.py",),
    "great_expectations": ("checks.py",),
    "mlflow": ("tracking.py", "tracking_client.py", "tracking_run.py", "tracking_runs.py", "tracking_registry.py"),
    "matplotlib": ("report/",),
    "jinja2": ("report/",),
    "dvc": ("versioning.py", "versioning_remote.py"),
    "dvc_data": ("versioning.py", "versioning_remote.py"),
}
ROOMS = ("rollout", "filter", "reward", "train", "evaluate")
MAY_IMPORT = {"evaluate": ("rollout", "reward")}
SURFACES = (
    "execute",
    "session",
    "run",
    "cli",
    "commands",
    "workspace",
    "records",
    "tracking",
    "tracking_client",
    "tracking_run",
    "tracking_spool",
    "checks",
    "versioning",
    "versioning_remote",
    "doctor",
    "report",
    "preflight",
    "probing",
    "space",
    "gathering",
    "planning",
    "comparing",
    "reproducing",
)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("library", ONLY_IN)
def test_each_heavy_library_has_one_place(library: str) -> None:
    users = [path.relative_to(SRC).as_posix() for path in FILES if any(name.split(".")[0] == library for name in imports(path))]
    assert [user for user in users if not user.startswith(ONLY_IN[library])] == []


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_do_not_import_each_other(room: str) -> None:
    refused = [f"rlpipe.{other}" for other in ROOMS if other != room and other not in MAY_IMPORT.get(room, ())] + [f"rlpipe.{name}" for name in SURFACES]
    for path in sorted((SRC / room).rglob("*.py")):
        wrong = [name for name in imports(path) if any(name == bad or name.startswith(bad + ".") for bad in refused)]
        assert wrong == [], path


def test_files_and_functions_stay_short() -> None:
    long = [path.name for path in FILES if path.read_text().count("\n") > 300]
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > 40:
                long.append(f"{path.name}:{node.name}")
    assert long == []


def test_params_and_help_load_no_heavy_library() -> None:
    code = (
        "import sys; from rlpipe import params, steps; from pathlib import Path;"
        f"steps.configs(params.read_yaml(Path({str(SRC.parents[1] / 'params.yaml')!r})));"
        "print([name for name in ('torch','transformers','pyarrow','vllm','deepspeed','mlflow','dvc','great_expectations','pandas') if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_nothing_prints() -> None:
    for path in FILES:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        assert "print" not in {call.func.id for call in calls}, path
