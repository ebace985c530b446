"""What a step costs on kfp's local runner besides its work, against kfp's own trivial step and the imports the step needs, in one run.

    python benchmarks/overhead.py [--repeats N]

Prints, in seconds: kfp's trivial step; the imports of the step in a fresh interpreter; the step itself less the work its record names;
and the difference of the three.
"""

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kfp import dsl, local
from rlpipe.kubeflow.components.filter import filter as filter_task
from rlpipe.kubeflow.components.reward import reward as reward_task

from rlpipe import commands, layout, params, steps
from rlpipe.kubeflow.compile import plan
from rlpipe.logs import quiet
from rlpipe.workspace import shipped

COMMON = (
    "import rlpipe.execute, rlpipe.dataset, rlpipe.kubeflow.task, rlpipe.checks; rlpipe.checks.warm().join(); "
    "from mlflow import MlflowClient; import mlflow.store.tracking.sqlalchemy_store; "
)
IMPORTS = {
    "filter": COMMON + "import rlpipe.filter.step",
    "reward": COMMON + "import rlpipe.reward.step, rlpipe.reward.scoring, matplotlib.figure, jinja2",
}


@dsl.component(base_image="python:3.11-slim", install_kfp_package=False)
def trivial(number: int) -> int:
    """kfp's own step that does nothing."""
    return number


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    quiet(debug=False)
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder)
        commands.run_in(workdir, shipped("configs/micro.yaml"), [], 1, fresh=False)
        local.init(runner=local.SubprocessRunner(use_venv=False), pipeline_root=str(workdir / "kfp"), raise_on_error=True, enable_caching=False)
        bare = per_step(_trivial_pipeline(repeats), repeats)
        for name, made in (("filter", _filter_pipeline), ("reward", _reward_pipeline)):
            step = per_step(made(workdir, repeats), repeats)
            imports = median_seconds(lambda name=name: subprocess.run([sys.executable, "-c", IMPORTS[name]], check=True), repeats) - python_start(repeats)
            record = json.loads((workdir / layout.report_path(name, 1)).read_text(encoding="utf-8"))
            work = record["seconds"] - record["seconds_overhead"]
            overhead = step - work - bare - imports
            print(f"{name}: trivial step {bare:.2f} s, imports {imports:.2f} s, step less its work {step - work:.2f} s, overhead {overhead:.2f} s")


def per_step(pipeline: Callable[[], Any], repeats: int) -> float:
    """Seconds of one of the `repeats` steps in a pipeline, kfp's output kept away."""
    began = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        pipeline()
    return (time.monotonic() - began) / repeats


def median_seconds(call: Callable[[], Any], repeats: int) -> float:
    """The median time of a call."""
    seconds = []
    for _ in range(repeats):
        began = time.monotonic()
        call()
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds)


def python_start(repeats: int) -> float:
    """A bare interpreter, which the trivial step has in it already."""
    return median_seconds(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True), repeats)


def _trivial_pipeline(repeats: int) -> Any:
    @dsl.pipeline(name="trivial")
    def pipeline():
        for number in range(repeats):
            trivial(number=number)

    return pipeline


def _common(name: str) -> dict[str, Any]:
    sections = plan({**params.read_yaml(shipped("configs/micro.yaml")), "rounds": steps.round_list(1)}).sections
    return {"config": sections[name], "tracking": sections["tracking"], "round_index": 1, "run_key": "0" * 64, "run_id": "overhead"}


def _imported(workdir: Path, step: str, parameter: str, kind: Any) -> Any:
    return dsl.importer(artifact_uri=str(workdir / layout.place(step, parameter, 1)), artifact_class=kind).output


def _filter_pipeline(workdir: Path, repeats: int) -> Any:
    @dsl.pipeline(name="filters")
    def pipeline():
        given = _imported(workdir, "filter", "trajectories", dsl.Dataset)
        for _ in range(repeats):
            filter_task(trajectories=given, **_common("filter"))

    return pipeline


def _reward_pipeline(workdir: Path, repeats: int) -> Any:
    @dsl.pipeline(name="rewards")
    def pipeline():
        kinds = {"kept": dsl.Dataset, "tasks": dsl.Dataset, "history_in": dsl.Artifact}
        given = {name: _imported(workdir, "reward", name, kind) for name, kind in kinds.items()}
        for _ in range(repeats):
            reward_task(**given, **_common("reward"))

    return pipeline


if __name__ == "__main__":
    main()
