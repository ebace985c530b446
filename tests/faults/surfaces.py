"""How each surface runs the rounds in a folder, with or without a fault."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from tests.faults.hook import Fault, watch_tracking

ROOT = Path(__file__).parents[2]
PARAMS = ROOT / "configs" / "micro.yaml"
SURFACES = ("run", "dvc", "kfp-local")


def warm() -> None:
    """Import what a run imports, once, so that the processes forked from this one need not."""

    from rlpipe import checks, cli, commands, execute, run, session, tracking, versioning  # noqa: F401
    from rlpipe.rollout import attempts  # noqa: F401
    from rlpipe.train import fit  # noqa: F401

    checks.warm().join()
    watch_tracking()


def start(surface: str, folder: Path, log: Path, fault: Fault | None = None) -> int:
    """Run the rounds of `PARAMS` in `folder`; returns how the process ended: its exit code, or minus the signal."""
    with log.open("ab") as output:
        return _forked(folder, output.fileno(), fault) if surface == "run" else _spawned(surface, folder, output.fileno(), fault)


def _forked(folder: Path, output: int, fault: Fault | None) -> int:
    child = os.fork()
    if child == 0:
        os.setsid()
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os._exit(_run(folder, fault))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _run(folder: Path, fault: Fault | None) -> int:
    from rlpipe import cli

    if fault:
        fault.install()
    try:
        code = cli.main(["run", "--workdir", str(folder), "--params", str(PARAMS)])
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def _spawned(surface: str, folder: Path, output: int, fault: Fault | None) -> int:
    environ = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'tests/faults/inject'}:{ROOT}:{ROOT / 'src'}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    if fault:
        environ["RLPIPE_TEST_FAULT"] = json.dumps(asdict(fault))
    rlpipe = [sys.executable, "-m", "rlpipe.cli"]
    command = [*rlpipe, "run", "--on", "kfp-local", "--workdir", str(folder), "--params", str(PARAMS)]
    if surface == "dvc":
        prepared = subprocess.run([sys.executable, "-c", PREPARE, str(folder), str(PARAMS)], stdout=output, stderr=output, check=False)
        command = [sys.executable, "-m", "dvc", "repro"]
        if prepared.returncode:
            return prepared.returncode
    return subprocess.run(command, cwd=folder, env=environ, stdout=output, stderr=output, start_new_session=True, check=False).returncode


PREPARE = "import sys; from pathlib import Path; from rlpipe import workspace; workspace.prepare(Path(sys.argv[1]), Path(sys.argv[2]), [], None)"
