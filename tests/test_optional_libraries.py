"""Libraries that only some options need, installed and broken: their import raises, as it does on a machine without CUDA."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
OPTIONAL = ("deepspeed", "peft", "trl", "vllm")
CALLS = """
    import contextlib, io, json, sys
    from rlpipe import cli

    micro, workdir, names = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
    found = []
    for name in names:
        with contextlib.suppress(RuntimeError):
            __import__(name)
            sys.exit(f"{name} is not broken")
    for options in json.loads(sys.argv[4]):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            code = cli.main(["run", "--params", micro, "--workdir", workdir, *options])
        found.append([code, [line for line in said.getvalue().splitlines() if line.startswith("rlpipe: ") or "Traceback" in line]])
    sys.__stdout__.write("\\n" + json.dumps(found))
"""


def calls(folder: Path, *options: list[str]) -> list[Any]:
    """Exit code and error lines of `rlpipe run` on the micro config with each of `options`, in one folder and one process where no optional library imports."""
    for name in OPTIONAL:
        (folder / "stubs" / name).mkdir(parents=True)
        (folder / "stubs" / name / "__init__.py").write_text("raise RuntimeError('no CUDA runtime\\nfound')\n")
    environment = os.environ | {"PYTHONPATH": f"{folder / 'stubs'}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1", "MLFLOW_TRACKING_URI": ""}
    arguments = [str(ROOT / "configs/micro.yaml"), str(folder / "run"), ",".join(OPTIONAL), json.dumps(options)]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(CALLS), *arguments], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_f11_a_whole_run_needs_none_of_them_and_an_option_that_does_is_refused_in_one_line(tmp_path: Path) -> None:
    """Case F11: a round is trained and evaluated; `engine.type: vllm` and `backend.type: deepspeed` end with exit code 8 and what to do."""
    plain, vllm, deepspeed = calls(tmp_path, [], ["--set", "engine.type=vllm"], ["--set", "backend={type: deepspeed, dtype: float32}"])
    assert plain == [0, []]
    (row,) = json.loads((tmp_path / "run/reports/run.json").read_text())["rounds"]
    assert (row["round"], row["outcome"], row["groups"], row["num_eval_tasks"]) == (1, "trained", 6, 8)
    assert vllm == [8, ["rlpipe: vllm does not import; got RuntimeError: no CUDA runtime found; do: run `make install-vllm`, or set engine.type: torch"]]
    got = "got RuntimeError: no CUDA runtime found; do: pip install 'rlpipe[deepspeed]', or set backend.type: torch"
    assert deepspeed == [8, [f"rlpipe: backend.type deepspeed cannot be used; {got}"]]
