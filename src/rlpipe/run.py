"""`rlpipe run`: the rounds of `params.yaml` in one process, at the places `dvc.yaml` names."""

from __future__ import annotations

import logging
from typing import Any

from rlpipe import layout, records
from rlpipe.session import Session

log = logging.getLogger("rlpipe")

COLUMNS = {
    "round": "round",
    "greedy_accuracy": "greedy",
    "sampled_reward": "sampled reward",
    "mean_completion_tokens": "mean length",
    "groups_with_signal": "groups with signal",
    "seconds_per_optimizer_step": "s/optimizer step",
    "seconds": "seconds",
    "outcome": "outcome",
    "decision": "decision",
}
NOTE = "greedy: held-out accuracy of the round's policy; sampled reward: of its trajectories, made by the policy before it"


def run(session: Session) -> dict[str, Any]:
    """Model, tasks, start, then every round; what is finished is not run again. Returns the content of `reports/run.json`.

    Raises:
        NoSignalError: a round had nothing to teach and `run.no_signal` is `stop`.
    """
    from rlpipe import checks

    checks.warm()
    session.call("model", 0)
    session.make_tasks("train")
    session.make_tasks("eval")
    session.call("start", 0)
    session.commit(0, ["model", "tasks", "start"])
    for index, _ in enumerate(session.rounds, start=1):
        for step in layout.ROUND_STEPS:
            session.call(step, index)
        session.commit(index, [f"{step}@{index - 1}" for step in layout.ROUND_STEPS])
    return records.write_run(session.workdir, len(session.rounds))


def table(content: dict[str, Any]) -> str:
    """The run as text: one line a round, the start policy as round 0."""
    start = content["start"] or {}
    first = {"round": 0, "greedy_accuracy": start.get("greedy_accuracy"), "seconds": start.get("seconds"), "outcome": "start", "decision": "champion"}
    rows = [first, *content["rounds"]]
    cells = [list(COLUMNS.values())] + [[_cell(name, row) for name in COLUMNS] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([*lines, "", NOTE])


def _cell(name: str, row: dict[str, Any]) -> str:
    value = row.get(name)
    if value is None:
        return "-"
    if name == "groups_with_signal":
        return f"{value}/{row['groups']}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def places(session: Session, content: dict[str, Any]) -> str:
    """Where what the run made lies: the last round's policy, and the champion's."""
    last = len(session.rounds)
    champion = max((row["round"] for row in content["rounds"] if row["decision"] == "promote"), default=0)
    lines = {
        "policy": layout.artifact_path("policy", last) / "modules" / "policy",
        "champion": layout.artifact_path("policy", champion) / "modules" / "policy",
        "trajectories": layout.artifact_path("trajectories", last),
        "evaluation": layout.artifact_path("evaluation", last) / "evaluation.json",
        "report": layout.RUN_REPORT,
    }
    shown = {name: str(session.workdir / path) for name, path in lines.items()}
    if session.tracker.enabled and not session.tracker.problems:
        shown["tracking"] = session.tracker.place
    return "\n".join(f"{name:>13}  {place}" for name, place in shown.items())
