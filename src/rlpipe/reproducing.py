"""A run repeated from its params in a folder of its own, and held against the first: `rlpipe reproduce`."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlpipe import layout, params, workspace
from rlpipe.comparing import Comparison, compare
from rlpipe.errors import ConfigError

Verdict = Literal["identical", "equal within chance", "different"]
Z = 1.96
"""Two accuracies on n tasks differ by chance alone in 95 % of cases by at most so many standard errors."""


@dataclass(frozen=True)
class Reproduction:
    """What came of repeating a run.

    Attributes:
        beyond: evaluations whose accuracies differ by more than chance would have it, in words.
    """

    verdict: Verdict
    comparison: Comparison
    beyond: tuple[str, ...]

    def as_text(self) -> str:
        """The verdict, what differs in the machine, and what of the run came out otherwise."""
        lines = [f"verdict      {self.verdict}", *(f"beyond       {line}" for line in self.beyond)]
        return "\n".join([*lines, self.comparison.as_text()])


def reproduce(workdir: Path, out: Path) -> Reproduction:
    """Repeat the run of `workdir` in `out`, with the same params and the same files of its user, and compare.

    MLflow is told nothing: the first run is already there.

    Raises:
        ArtifactError: `workdir` has no records of a run.
        ConfigError: it has no params, or `out` holds something.
    """
    from rlpipe.commands import run_in

    if out.exists() and any(out.iterdir()):
        raise ConfigError("the folder to reproduce in is not empty", got=str(out), do="give another --out, or remove it")
    compare(workdir, workdir)  # there is a run to hold against
    raw = params.read_yaml(workdir / workspace.PARAMS)
    for file in {file for files in workspace.user_files(workdir, raw).values() for file in files}:
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        place = shutil.copytree if (workdir / file).is_dir() else shutil.copy2
        place(workdir / file, out / file)
    run_in(out, workdir / workspace.PARAMS, ["tracking.enabled=false"], None, fresh=False)
    return judged(workdir, out)


def judged(first: Path, second: Path) -> Reproduction:
    """The verdict on two runs with the same params."""
    found = compare(first, second)
    if not found.artifacts:
        return Reproduction("identical", found, ())
    beyond = tuple(_beyond_chance(first, second))
    return Reproduction("different" if beyond else "equal within chance", found, beyond)


def _beyond_chance(first: Path, second: Path) -> Iterator[str]:
    """Rounds whose held-out accuracies differ by more than `Z` standard errors of their difference."""
    contents = [json.loads((folder / layout.RUN_REPORT).read_text(encoding="utf-8"))["rounds"] for folder in (first, second)]
    for one, other in zip(*contents, strict=False):
        values = [row["greedy_accuracy"] for row in (one, other)]
        if None in values:
            yield f"round {one['round']}: an accuracy could not be measured"
            continue
        error = math.sqrt(sum(value * (1 - value) / row["num_eval_tasks"] for value, row in zip(values, (one, other), strict=True)))
        if abs(values[0] - values[1]) > Z * error:
            yield f"round {one['round']}: greedy accuracy {values[0]:.3f} and {values[1]:.3f}, more than {Z * error:.3f} apart"
    if len(contents[0]) != len(contents[1]):
        yield f"{len(contents[0])} rounds and {len(contents[1])}"
