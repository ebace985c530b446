"""Per-task results and their file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlpipe.errors import ArtifactError
from rlpipe.evaluate.metrics import mean, mean_pass_at_k

RESULTS = "results.parquet"
CHAMPION = "champion.parquet"


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task's results.

    Attributes:
        correct: whether the greedy completion is right; None if it could not be made or scored, `reason` then says why.
        num_tokens: tokens of the greedy completion; None if it could not be made.
        attempts: sampled attempts that could be scored.
        attempts_correct: the right ones among them.
    """

    task_id: str
    correct: bool | None
    completion: str
    num_tokens: int | None
    attempts: int
    attempts_correct: int
    reason: str | None = None


def metrics(results: Sequence[TaskResult], pass_at: Sequence[int]) -> dict[str, float | int | None]:
    """Greedy accuracy, pass@k, mean greedy completion length over the tasks that have them, and the counts behind them.

    A pass@k that no task has enough attempts for is absent.
    """
    passed = {f"pass_at_{k}": mean_pass_at_k(((row.attempts, row.attempts_correct) for row in results), k) for k in pass_at}
    return {
        "greedy_accuracy": mean(None if row.correct is None else float(row.correct) for row in results),
        "mean_completion_tokens": mean(row.num_tokens for row in results),
        "num_eval_tasks": len(results),
        "num_unscored": sum(row.correct is None for row in results),
        **{name: value for name, value in passed.items() if value is not None},
    }


def write(path: Path, results: Sequence[TaskResult]) -> None:
    """Write results in their order; the same results give the same bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema(
        [
            ("task_id", pa.string()),
            ("correct", pa.bool_()),
            ("completion", pa.string()),
            ("num_tokens", pa.int32()),
            ("attempts", pa.int32()),
            ("attempts_correct", pa.int32()),
            ("reason", pa.string()),
        ]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([asdict(row) for row in results], schema=schema), path, compression="zstd")


def read(path: Path) -> list[TaskResult]:
    """The results in a file.

    Raises:
        ArtifactError: the file is missing, damaged, or lacks a column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return [TaskResult(**row) for row in pq.read_table(path, partitioning=None).to_pylist()]
    except (FileNotFoundError, pa.ArrowInvalid, TypeError) as error:
        raise ArtifactError(f"{path} cannot be read", got=str(error).splitlines()[0], do="run evaluate again") from error
