"""Short Markdown summaries: of one step's run, and of the whole run at its end."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlpipe.redaction import without_secrets
from rlpipe.report import words

if TYPE_CHECKING:
    from rlpipe.preflight import Finding

ERROR_CHARACTERS = 2000
ROUND_COLUMNS = ("Round", "Greedy accuracy", "Sampled reward", "Mean length (tokens)", "Groups with signal", "Seconds", "Decision")


def summary(record: Mapping[str, Any]) -> str:
    """One step's run: what came of it, its numbers, and what was dropped and why.

    Args:
        record: the run record of `rlpipe.execute`.
    """
    numbers = [(f"{label} ({unit})" if unit else label, value) for label, value, unit in words.numbers(record["numbers"])]
    reasons = [(words.reason(name), words.value(count)) for name, count in sorted(record["reasons"].items())]
    parts = [
        f"# {escaped(str(record['step']).capitalize())}, round {record['round']}: {escaped(words.decision(dict(record)))}",
        table(["Number", "Value"], numbers) if numbers else "",
        table(["Dropped, left out or failed", "Count"], reasons) if reasons else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def run_summary(status: Mapping[str, Any], rows: Sequence[Mapping[str, float]] | None) -> str:
    """The whole run at its end.

    Args:
        status: `state` (Kubeflow's word, such as SUCCEEDED or FAILED); where known `run_id`, `error` (its text) and `task` (the pipeline or task it is of).
        rows: what `rlpipe.tracking.Tracker.rounds_tagged` returns; None where the rounds could not be asked for.
    """
    error = status.get("error")
    facts = [f"{label}: {escaped(str(status[key]))}" for label, key in (("Run", "run_id"), ("Of", "task")) if status.get(key)]
    parts = [f"# Run {escaped(str(status['state']).lower())}", "  \n".join(facts), _error(str(error)) if error else "", _rounds(rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def findings(found: Sequence[Finding]) -> str:
    """What preflight found, one row a check."""
    failed = sum(not finding.ok for finding in found)
    rows = [(finding.name, "ok" if finding.ok else "FAILED", finding.detail, finding.do or "") for finding in found]
    said = f"{failed} of {len(found)} checks failed" if failed else f"all {len(found)} checks passed"
    return f"# Preflight: {said}\n\n{table(['Check', 'State', 'Found', 'Do'], rows, numeric=False)}\n"


def _error(text: str) -> str:
    """An error's text as a quotation, without credentials."""
    shown = without_secrets(text if len(text) <= ERROR_CHARACTERS else text[:ERROR_CHARACTERS] + " …")
    return "Error:\n\n" + "\n>\n".join(f"> {escaped(line)}" for line in shown.splitlines() if line.strip())


def _rounds(rows: Sequence[Mapping[str, float]] | None) -> str:
    if rows is None:
        return "The rounds are not known: tracking could not be asked."
    return table(ROUND_COLUMNS, [_round(row) for row in rows]) if rows else "No round was tracked."


def _round(row: Mapping[str, float]) -> list[str]:
    """A round's numbers as `ROUND_COLUMNS` has them; round 0 is the start policy."""
    step = "evaluate" if "evaluate/greedy_accuracy" in row else "start"
    promoted = row.get(f"{step}/promoted")
    decision = "-" if promoted is None else "champion" if step == "start" else words.verdict(row, f"{step}/")
    numbers = [row.get(name) for name in (f"{step}/greedy_accuracy", "reward/sampled_reward", "rollout/mean_completion_tokens")]
    groups = [row.get(name) for name in ("reward/num_groups_with_signal", "rollout/num_groups")]
    seconds = [value for name, value in row.items() if name.endswith("/seconds")]
    return [
        f"{row['round']:g}",
        *("-" if number is None else f"{number:.3f}" for number in numbers),
        "/".join("-" if count is None else f"{count:g}" for count in groups) if any(count is not None for count in groups) else "-",
        f"{sum(seconds):.1f}" if seconds else "-",
        decision,
    ]


def table(header: Sequence[str], body: Sequence[Sequence[str]], *, numeric: bool = True) -> str:
    """A Markdown table with every cell escaped; columns after the first stand to the right if they are `numeric`."""
    return "\n".join([_line(header), f"| --- |{(' ---: |' if numeric else ' --- |') * (len(header) - 1)}", *map(_line, body)])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(escaped, cells)) + " |"


def escaped(text: str) -> str:
    """Text that Markdown and HTML show as it stands, on one line, control characters shown."""
    shown = words.line(text, ERROR_CHARACTERS).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#$!])", r"\\\1", shown)
