"""What differs between two runs, and which numbers moved: `rlpipe diff`. Reads their records, nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlpipe import keys, layout, records
from rlpipe.errors import ArtifactError
from rlpipe.tracking_place import flat

CLOCK = ("seconds", "peak_memory_mb")
"""Beginnings of the numbers that differ from run to run whatever is done."""
NOT_SET = "(not set)"


@dataclass(frozen=True)
class Difference:
    """One thing that differs: its name, and what it is in the first and in the second run."""

    name: str
    first: Any
    second: Any

    def __str__(self) -> str:
        text = f"{self.name}  {_shown(self.first)} -> {_shown(self.second)}"
        moved = isinstance(self.first, int | float) and isinstance(self.second, int | float)
        return text + (f"  ({self.second - self.first:+.4g})" if moved else "")


@dataclass(frozen=True)
class Comparison:
    """What differs between two runs.

    Attributes:
        environment: versions, CPU, commit.
        params: what the steps were run with, by dotted names; each step's last.
        artifacts: outputs by `step of round N: name`, in the order of a run, with the sha256 of each.
        numbers: what steps measured, but for seconds and memory.
        num_artifacts: outputs that both runs recorded.
    """

    environment: list[Difference]
    params: list[Difference]
    artifacts: list[Difference]
    numbers: list[Difference]
    num_artifacts: int

    def as_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(asdict(self), indent=1)

    def as_text(self) -> str:
        """All of it for people; of the artifacts where they part, since all that follows differs too."""
        parts = [(name, [str(one) for one in getattr(self, name)]) for name in ("environment", "params", "numbers")]
        same = f"all {self.num_artifacts} the same"
        first = f"{len(self.artifacts)} of {self.num_artifacts} differ, first {self.artifacts[0].name}" if self.artifacts else same
        parts.insert(2, ("artifacts", [first]))
        return "\n".join(f"{name:<11}  {line}" for name, lines in parts for line in lines or ["the same"])


def compare(first: Path, second: Path) -> Comparison:
    """Compare the runs of two working folders.

    Raises:
        ArtifactError: a folder has no records of a run.
    """
    runs = [_Run(folder) for folder in (first, second)]
    outputs = [run.outputs() for run in runs]
    return Comparison(
        environment=_differences(*(run.environment() for run in runs)),
        params=_differences(*(run.params() for run in runs)),
        artifacts=[one for one in _differences(*outputs) if None not in (one.first, one.second)],
        numbers=_differences(*(run.numbers() for run in runs)),
        num_artifacts=len(outputs[0].keys() & outputs[1].keys()),
    )


class _Run:
    """The records of one working folder, in the order of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        rounds = sorted(int(path.name) for path in (folder / layout.REPORTS).glob("[0-9][0-9]*") if path.is_dir())
        wanted = [(step, index) for index in rounds for step in (layout.ROUND_STEPS if index else ("model", "start"))]
        self.records = {at: record for at in wanted if (record := records.read(folder, *at))}
        if not self.records:
            raise ArtifactError("no records of a run", got=str(folder), accepted="a working folder with reports/", do="run `rlpipe run` there")

    def environment(self) -> dict[str, Any]:
        last = list(self.records.values())[-1]
        return {name: " ".join(value) if isinstance(value, list) else value for name, value in flat(last.get("environment", {}))}

    def params(self) -> dict[str, Any]:
        return {name: value for (step, _), record in self.records.items() for name, value in keys.named(step, record["params"]).items()}

    def outputs(self) -> dict[str, Any]:
        return {f"{_named(*at)}: {name}": sha256 for at, record in self.records.items() for name, sha256 in record["outputs"].items()}

    def numbers(self) -> dict[str, Any]:
        return {f"{_named(*at)}: {name}": value for at, record in self.records.items() for name, value in _kept(record["numbers"])}


def _kept(numbers: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in numbers.items() if not name.startswith(CLOCK))


def _named(step: str, round_index: int) -> str:
    return f"{step} of round {round_index}" if round_index else step


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    names = dict.fromkeys([*first, *second])
    return [Difference(name, first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)]


def _shown(value: Any) -> str:
    return NOT_SET if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
