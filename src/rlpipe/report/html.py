"""One HTML page about one step's run, complete in itself: no script, nothing loaded from elsewhere.

Everything that comes from policies, tasks or params is escaped by the template; only plots go in as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpipe.errors import ConfigError
from rlpipe.report import attempts, evaluation, plots, words
from rlpipe.trajectory import STATUSES, Trajectory

if TYPE_CHECKING:
    from jinja2 import Template

PROMPT_CHARACTERS, COMPLETION_CHARACTERS = 1500, 3000
SPANS_SHOWN = 12


def page(record: Mapping[str, Any], inputs: Mapping[str, Path], outputs: Mapping[str, Path]) -> str:
    """The page of one run; the same record and artifacts give the same text.

    Args:
        record: the run record of `rlpipe.execute`.
        inputs: where the artifacts lie that the step read, by the step's own names; those a page has no use for may be missing.
        outputs: the same of what it wrote.

    Raises:
        ArtifactError: a dataset or evaluation is unfinished or damaged.
        ConfigError: jinja2 or matplotlib is not installed.
    """
    found = attempts.find(inputs, outputs)
    measured = evaluation.read(inputs, outputs)
    asked = evaluation.asked(measured, inputs) if measured else {}
    view = {
        "record": record,
        "decision": words.decision(dict(record)),
        "numbers": words.numbers(record["numbers"]),
        "reasons": [(words.reason(name), words.value(count)) for name, count in sorted(record["reasons"].items())],
        "plots": _groups_plot(record["numbers"]),
        "params": json.dumps(record.get("params", {}), indent=2, sort_keys=True, ensure_ascii=False),
        **(_dataset(*found) if found else {}),
        **({"asked": asked, **_evaluation(measured)} if measured else {}),
    }
    view["plots"] = [*view["plots"], *view.get("dataset_plots", []), *view.get("evaluation_plots", [])]
    return str(_template().render(view))


def _template() -> Template:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as error:
        raise ConfigError("reports need jinja2, which is not installed", got=str(error), do="pip install 'rlpipe[kubeflow]'") from error
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"line": words.line, "pieces": words.pieces, "value": words.value}
    return environment.get_template("page.html")


def _plot(svg: str, caption: str) -> dict[str, Any]:
    from markupsafe import Markup

    return {"svg": Markup(svg), "caption": caption}


def _groups_plot(numbers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups with and without signal, where the step counts them."""
    num_groups, num_signal = numbers.get("num_groups"), numbers.get("num_groups_with_signal")
    if not num_groups or num_signal is None:
        return []
    counts = {"with signal": num_signal, "without": num_groups - num_signal}
    return [_plot(plots.shares(counts, "groups", (plots.GREEN, plots.GREY)), "A group has signal if its attempts earned different rewards.")]


def _dataset(name: str, path: Path) -> dict[str, Any]:
    facts = attempts.facts(path)
    chosen = attempts.rows(path, attempts.choose(facts)) if len(facts) else []
    return {
        "dataset": name,
        "num_rows": len(facts),
        "by": "reward" if facts.is_scored else "length",
        "trajectories": [_trajectory(row) for row in chosen],
        "dataset_plots": _dataset_plots(name, facts) if len(facts) else [],
    }


def _dataset_plots(name: str, facts: attempts.Facts) -> list[dict[str, Any]]:
    drawn = [_plot(plots.lengths(facts.lengths, facts.statuses, STATUSES), f"Completion lengths of the {len(facts):,} trajectories of {name}.")]
    scored = facts.rewards[np.isfinite(facts.rewards)]
    if len(scored):
        drawn.append(_plot(plots.rewards(scored), f"Rewards of {len(scored):,} trajectories of {name}; {len(facts) - len(scored):,} have none."))
        drawn.append(_plot(plots.group_rewards(_group_means(facts)), f"Mean reward of each group of {name}."))
    return drawn


def _group_means(facts: attempts.Facts) -> np.ndarray:
    """Mean reward of the scored attempts of each group that has any."""
    scored = np.isfinite(facts.rewards)
    counts = np.bincount(facts.groups[scored])
    sums = np.bincount(facts.groups[scored], weights=facts.rewards[scored])
    return sums[counts > 0] / counts[counts > 0]


def _trajectory(row: Trajectory) -> dict[str, Any]:
    trained = [span.trained for span in row.spans if span.source == "policy"]
    return {
        "row": row,
        "prompt": words.pieces(row.prompt, PROMPT_CHARACTERS),
        "completion": words.pieces(row.completion, COMPLETION_CHARACTERS),
        "mean_logprob": attempts.mean_logprob(row),
        "trained": "not trained" if not any(trained) else "trained" if all(trained) else "trained in part",
        "spans": row.spans[:SPANS_SHOWN],
        "num_more_spans": max(0, len(row.spans) - SPANS_SHOWN),
    }


def _evaluation(measured: evaluation.Evaluation) -> dict[str, Any]:
    content = measured.content
    accuracy = {"champion before": measured.before, "this policy": content["greedy_accuracy"]}
    accuracy |= {f"pass@{k}": value for k, value in sorted(content["pass_at"].items(), key=lambda entry: int(entry[0]))}
    known = {name: value for name, value in accuracy.items() if value is not None}
    colours = {"lost": plots.RED, "won": plots.GREEN, "unscored": plots.ORANGE, "neither": plots.GREY, "both": plots.BLUE}
    counts = {kind: measured.counts[kind] for kind in measured.kinds}
    names = counts if measured.before is not None else {"not scored": counts["unscored"], "not solved": counts["neither"], "solved": counts["both"]}
    drawn = [_plot(plots.accuracies(known), "Held-out accuracy. The champion is the one before this decision; pass@k is of sampled attempts.")] if known else []
    drawn.append(_plot(plots.shares(names, "held-out tasks", [colours[kind] for kind in counts]), "Held-out tasks by what became of them."))
    return {"evaluation": measured, "shown_of_each": evaluation.NUM_SHOWN, "evaluation_plots": drawn}
