"""Great Expectations at the boundaries of a step. The only file that imports it, and late: the import takes seconds.

Great Expectations decides whether a rule holds on a flat summary of the rows (`summaries`); which rows break it is then
found here, so that a message stays short whatever the rows hold. Empty is a failure of its own and is looked for first.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlpipe import artifact
from rlpipe.errors import CheckError, RlpipeError
from rlpipe.trajectory import STATUSES

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Kind = Literal["tasks", "trajectories", "kept", "scored"]
NAMED_ROWS = 20
ID_LENGTH = 200
MAX_UNSCORED = 0.5
"""Largest share of rows without a reward; groups that leave at the tail of reward can raise it above `reward.max_unscorable`."""


@dataclass(frozen=True, eq=False)
class Rule:
    """One expectation on a column of the summary.

    Attributes:
        column: what a message calls it.
        text: what holds for a good row.
        expectation: a name in `_expectations()`.
        options: what that expectation is told.
        bad: `[n]` bool, the rows that break it.
        mostly: the share of rows it must hold for; nulls count as rows that break it.
    """

    column: str
    text: str
    expectation: str
    options: dict[str, Any]
    bad: Callable[[pd.DataFrame], pd.Series]
    mostly: float = 1.0


@dataclass
class Broken:
    """The rows that break one rule, over all blocks."""

    count: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, rows: pd.Series) -> None:
        self.count += len(rows)
        self.names += [_short(name) for name in rows.head(NAMED_ROWS - len(self.names))]


def present(column: str) -> Rule:
    """The column has a value in every row."""
    return Rule(column, "present", "NotNull", {"column": column}, lambda frame: frame[column].isna())


def unique(column: str) -> Rule:
    """No two rows have the same value."""
    return Rule(column, "present and unique", "Unique", {"column": column}, lambda frame: frame[column].isna() | frame[column].duplicated(keep=False))


def unique_together(*columns: str) -> Rule:
    """No two rows have the same values in all these columns."""
    names = list(columns)
    return Rule(f"({', '.join(names)})", "unique", "UniqueTogether", {"column_list": names}, lambda frame: frame.duplicated(names, keep=False))


def at_least(column: str, minimum: float, text: str) -> Rule:
    """A number of at least `minimum` in every row."""
    return Rule(column, text, "Between", {"column": column, "min_value": minimum}, lambda frame: ~(frame[column] >= minimum).fillna(False).astype(bool))


def one_of(column: str, values: Sequence[Any], text: str, mostly: float = 1.0) -> Rule:
    """One of `values` in every row, or in the share `mostly` of all rows."""
    return Rule(column, text, "InSet", {"column": column, "value_set": list(values)}, lambda frame: ~frame[column].isin(values), mostly)


TASK_RULES = (
    at_least("prompt.length", 1, "a text or chat messages, not empty"),
    at_least("reference.length", 1, "a text, not empty"),
)
TRAJECTORY_RULES = (
    present("task_id"),
    present("group_id"),
    at_least("index", 0, "0 or more"),
    one_of("status", STATUSES, f"one of {', '.join(STATUSES)}"),
    at_least("token_ids.length", 1, "one token or more"),
    one_of("logprobs.missing", [0], "as many log-probs as tokens"),
    one_of("logprobs.unsound", [0], "finite and at most 0 on every token of a policy span, NaN elsewhere"),
    one_of("spans.gaps", [0], "spans that cover [0, T) in order, without gap"),
    one_of("spans.unsampled", [0], "one sampled token or more in a completed trajectory"),
)
REWARD_RULES = (
    one_of("reward.unexplained", [0], "finite, or null with a reward that says why"),
    one_of("reward.scored", [True], f"present in {1 - MAX_UNSCORED:.0%} of the rows or more", mostly=1 - MAX_UNSCORED),
)
ROW_RULES: dict[str, tuple[Rule, ...]] = {
    "tasks": TASK_RULES,
    "trajectories": TRAJECTORY_RULES,
    "kept": TRAJECTORY_RULES,
    "scored": TRAJECTORY_RULES + REWARD_RULES,
}
_TRAJECTORY_IDS = (unique("trajectory_id"), unique_together("group_id", "index"))
ID_RULES: dict[str, tuple[Rule, ...]] = {
    "tasks": (unique("task_id"),),
    "trajectories": _TRAJECTORY_IDS,
    "kept": _TRAJECTORY_IDS,
    "scored": _TRAJECTORY_IDS,
}
"""What only a look at all rows can say; the other rules are asked of each block."""


def warm() -> threading.Thread:
    """Begin importing Great Expectations in the background, so that the first check does not wait for it."""
    thread = threading.Thread(target=_warm, name="great-expectations", daemon=True)
    thread.start()
    return thread


def _warm() -> None:
    with suppress(RlpipeError):  # the first check says it
        _library()


_passed: set[tuple[str, str]] = set()
_importing = threading.Lock()


def check(kind: Kind, path: Path, *, outcome: str | None, role: Literal["in", "out"]) -> None:
    """Hold a dataset against the rules of its kind.

    What this process has passed before is not checked again when it comes back with the same fingerprint.

    Args:
        kind: which rules.
        path: a task file, or the folder of a trajectory dataset with its manifest.
        outcome: the manifest's; with `no_signal`, `stopped` or `empty` a trajectory dataset may be empty.
        role: whether the dataset comes into a step or goes out of it, for the message.

    Raises:
        CheckError: names the column, the rule, how many rows break it and the ids of the first 20.
        ArtifactError: the dataset is unfinished or damaged.
    """
    key = (kind, artifact.content_key(path)) if path.exists() else (kind, "")
    if key in _passed and outcome is None:
        return
    from rlpipe import summaries

    found: dict[Rule, Broken] = {}
    ids: list[pa.Table] = []
    num_rows = 0
    for block in summaries.blocks(kind, path):
        num_rows += block.num_rows
        if kind == "tasks" or (block.num_rows < summaries.ROWS_PER_BLOCK and not ids):
            rules = ROW_RULES[kind] + ID_RULES[kind]  # the only block: one question to Great Expectations
        else:
            rules = ROW_RULES[kind]
            ids.append(block.select(["trajectory_id", "group_id", "index"]))
        if block.num_rows:
            broken(_frame(block), rules, found)
    if num_rows == 0:
        _check_empty(kind, path, outcome, role)
        return
    if ids:
        broken(_concatenated(ids), ID_RULES[kind], found)
    if found:
        raise CheckError(_message(kind, role, found, num_rows), got=str(path), do="see the rows with `rlpipe inspect`, then run the step that wrote them again")
    _passed.add(key)


def broken(frame: pd.DataFrame, rules: Sequence[Rule], found: dict[Rule, Broken] | None = None) -> dict[Rule, Broken]:
    """The rules that Great Expectations says do not hold on a frame with rows, added to `found`, each with the rows that break it."""
    found = {} if found is None else found
    name = "trajectory_id" if "trajectory_id" in frame else "task_id"
    for rule, holds in zip(rules, _verdicts(frame, rules), strict=True):
        if not holds:
            found.setdefault(rule, Broken()).add(frame[name][rule.bad(frame)])
    return found


def _check_empty(kind: Kind, path: Path, outcome: str | None, role: str) -> None:
    """An empty dataset is right only where its manifest says why it is empty."""
    if kind == "tasks" or outcome not in ("no_signal", "stopped", "empty"):
        raise CheckError(f"{kind} ({role}) is empty", got=f"0 rows in {path}", accepted="one row or more", do="see the drop reasons in the step's report")


def _message(kind: str, role: str, broken: dict[Rule, Broken], num_rows: int) -> str:
    lines = [f"{kind} ({role}) breaks {len(broken)} rule{'s' * (len(broken) > 1)}"]
    for rule, rows in broken.items():
        lines.append(f"column {rule.column}: {rows.count} of {num_rows} rows are not {rule.text}; ids: {', '.join(rows.names)}")
    return "\n".join(lines)


def _short(name: Any) -> str:
    text = str(name)
    return text if len(text) <= ID_LENGTH else f"{text[:ID_LENGTH]}…"


def _frame(table: pa.Table) -> pd.DataFrame:
    import pandas as pd
    import pyarrow as pa

    # Arrow's own strings in place of a Python object for each id
    return table.to_pandas(types_mapper={pa.string(): pd.ArrowDtype(pa.string())}.get)


def _concatenated(tables: Sequence[pa.Table]) -> pd.DataFrame:
    import pyarrow as pa

    return _frame(pa.concat_tables(tables))


def _verdicts(frame: pd.DataFrame, rules: Sequence[Rule]) -> list[bool]:
    """What Great Expectations says of each rule.

    Raises:
        CheckError: the frame has no rows.
        RuntimeError: an expectation could not be evaluated, which is a fault of the rule.
    """
    library = _library()
    suite = library["Suite"](name=uuid.uuid4().hex)
    suite.expectations.append(library["RowCount"](min_value=1, meta={"rule": -1}))
    for place, rule in enumerate(rules):
        suite.expectations.append(library[rule.expectation](mostly=rule.mostly, meta={"rule": place}, **rule.options))
    verdicts = {}
    # the results come in an order of their own
    for result in library["Batch"](frame).validate(suite, result_format="BOOLEAN_ONLY").results:
        if result.exception_info.get("raised_exception"):
            raise RuntimeError(f"{result.expectation_config.type} could not be evaluated: {result.exception_info['exception_message']}")
        verdicts[result.expectation_config.meta["rule"]] = bool(result.success)
    if not verdicts.pop(-1):
        raise CheckError("the dataset is empty", got="0 rows", accepted="one row or more")
    return [verdicts[place] for place in range(len(rules))]


def _library() -> dict[str, Any]:
    with _importing:
        try:
            return _expectations()
        except ModuleNotFoundError as error:
            raise RlpipeError("Great Expectations is not installed", got=str(error), do="pip install 'rlpipe[checks]'") from error


@cache
def _expectations() -> dict[str, Any]:
    """The parts of Great Expectations that the rules use: no project folder, no telemetry, no progress bars, nothing written."""
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    import great_expectations as gx
    import great_expectations.expectations as gxe
    from great_expectations.data_context.types.base import ProgressBarsConfig

    class NullsFail:
        """Great Expectations takes a share of the rows that are not null; here a null is a row that breaks the rule."""

        def _validate(self, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
            verdict = super()._validate(metrics, *args, **kwargs)  # type: ignore[misc]
            total = metrics["table.row_count"]
            bad = metrics["column_values.nonnull.unexpected_count"] + metrics[f"{self.map_metric}.unexpected_count"]  # type: ignore[attr-defined]
            return {**verdict, "success": total - bad >= self.mostly * total}  # type: ignore[attr-defined]

    class ExpectEveryValueInSet(NullsFail, gxe.ExpectColumnValuesToBeInSet):
        """In the set, nulls counted."""

    class ExpectEveryValueBetween(NullsFail, gxe.ExpectColumnValuesToBeBetween):
        """Between the limits, nulls counted."""

    class ExpectEveryValueUnique(NullsFail, gxe.ExpectColumnValuesToBeUnique):
        """Unique, nulls counted."""

    logging.getLogger("great_expectations.data_context.types.base").setLevel(logging.WARNING)
    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = ProgressBarsConfig(globally=False)
    source = context.data_sources.add_pandas(f"rlpipe-{uuid.uuid4().hex}")
    definition = source.add_dataframe_asset("summary").add_batch_definition_whole_dataframe("rows")
    return {
        "Suite": gx.ExpectationSuite,
        "Batch": lambda frame: definition.get_batch({"dataframe": frame}),
        "RowCount": gxe.ExpectTableRowCountToBeBetween,
        "NotNull": gxe.ExpectColumnValuesToNotBeNull,
        "UniqueTogether": gxe.ExpectCompoundColumnsToBeUnique,
        "InSet": ExpectEveryValueInSet,
        "Between": ExpectEveryValueBetween,
        "Unique": ExpectEveryValueUnique,
    }
