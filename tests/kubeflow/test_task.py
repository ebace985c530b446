"""What a task hands over: run records, the numbers that Kubeflow can keep, and what its artifacts say about themselves."""

import json
import math
from pathlib import Path
from typing import Any

from kfp import dsl
from kfp.dsl.executor import Executor

from rlpipe.execute import Call, execute, finite
from rlpipe.kubeflow.task import Task, records_of, shown
from rlpipe.params import Section
from rlpipe.step import Out, Report, signature
from rlpipe.steps import Step

NUMBERS = {"reward": math.nan, "kl": math.inf, "accuracy": 0.5, "length": None, "steps": 3}


class Config(Section):
    """Nothing to set."""


def run(config: Config, *, made: Out, round_index: int) -> Report:
    (made / "a.txt").write_text("a")
    return Report(numbers=NUMBERS)


def refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def strict(path: Path) -> Any:
    """JSON without NaN or Infinity, which Python's reader would take."""
    return json.loads(path.read_text(), parse_constant=refuse)


def test_what_is_not_finite_is_flagged() -> None:
    """Case B05."""
    assert shown(finite({"reward": math.nan, "kl": -math.inf, "accuracy": 0.5, "length": None})) == {"accuracy": 0.5, "reward_nonfinite": 1, "kl_nonfinite": 1}


def test_numbers_that_are_not_finite_do_not_end_the_step(tmp_path: Path) -> None:
    """Case B05: through `execute`, a task and kfp's own executor; everything is written, and is strict JSON."""

    def body(made: dsl.Output[dsl.Dataset], metrics: dsl.Output[dsl.Metrics]) -> None:
        call = Call(Step("filter", run, signature(run), ""), Config(), {"made": Path(made.path)}, 1, tmp_path / "records")
        Task("filter", 1, {"enabled": False}, "", "").hand_over([execute(call)], {}, {"made": made}, metrics, None, None)

    def described(name: str, kind: str) -> dict[str, Any]:
        return {"artifacts": [{"name": name, "type": {"schemaTitle": kind}, "uri": str(tmp_path / name), "metadata": {}}]}

    artifacts = {"made": described("made", "system.Dataset"), "metrics": described("metrics", "system.Metrics")}
    Executor({"inputs": {}, "outputs": {"artifacts": artifacts, "outputFile": str(tmp_path / "out/output.json")}}, body).execute()

    written = strict(tmp_path / "out/output.json")["artifacts"]
    assert written["metrics"]["artifacts"][0]["metadata"] == {"accuracy": 0.5, "steps": 3, "reward_nonfinite": 1, "kl_nonfinite": 1}
    assert written["made"]["artifacts"][0]["metadata"]["round"] == 1
    (record,) = strict(tmp_path / "metrics")["records"]
    assert record["numbers"]["accuracy"] == 0.5
    assert record["numbers"]["reward"] is None
    assert record["outputs"].keys() == {"made"}


def test_the_records_are_what_the_metrics_file_holds(tmp_path: Path) -> None:
    records = [
        {"step": name, "round": 2, "numbers": {"num_kept": 4}, "outcome": None, "inputs": {}, "outputs": {"kept": "f" * 64}} for name in ("rollout", "filter")
    ]
    kept, metrics = dsl.Dataset(uri=str(tmp_path / "kept")), dsl.Metrics(uri=str(tmp_path / "metrics"))
    Task("filter", 2.0, {"enabled": False}, "", "").hand_over(records, {}, {"kept": kept}, metrics, None, None)
    assert records_of(metrics) == records
    assert metrics.metadata == {"num_kept": 4}
    assert kept.metadata == {"step": "filter", "round": 2, "sha256": "f" * 64, "outcome": ""}
