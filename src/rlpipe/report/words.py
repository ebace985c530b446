"""What numbers, reasons and texts are called and look like on a page."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

NUMBERS = {
    "greedy_accuracy": ("Greedy accuracy on held-out tasks", ""),
    "num_eval_tasks": ("Held-out tasks", ""),
    "num_unscored": ("Held-out tasks that could not be scored", ""),
    "sampled_reward": ("Mean reward", ""),
    "num_groups": ("Groups", ""),
    "num_groups_with_signal": ("Groups with signal", ""),
    "num_groups_kept": ("Groups kept", ""),
    "num_groups_dropped": ("Groups left over after the last whole batch", ""),
    "num_trajectories": ("Trajectories", ""),
    "num_kept": ("Trajectories kept", ""),
    "num_dropped": ("Trajectories dropped", ""),
    "num_scored": ("Trajectories scored", ""),
    "num_unscorable": ("Trajectories that could not be scored", ""),
    "num_skipped": ("Trajectories never scored (partial, aborted or lost)", ""),
    "num_limited": ("Trajectories that broke a limit of their scoring", ""),
    "num_written": ("Trajectories written", ""),
    "num_tokens_generated": ("Tokens generated", ""),
    "mean_completion_tokens": ("Mean completion length", "tokens"),
    "num_truncated": ("Trajectories cut at the length limit", ""),
    "num_infra_errors": ("Trajectories lost to the infrastructure", ""),
    "infra_error_rate": ("Share lost to the infrastructure", ""),
    "num_rejected_prompts": ("Prompts too long for the model", ""),
    "optimizer_steps": ("Optimizer steps", ""),
    "num_tokens_trained": ("Tokens trained on", ""),
    "loss": ("Loss, mean over optimizer steps", ""),
    "grad_norm": ("Gradient norm before clipping, mean over optimizer steps", ""),
    "clip_fraction": ("Share of tokens clipped", ""),
    "approx_kl": ("Approximate KL to the sampling policy", "nats"),
    "kl": ("KL to the reference policy", "nats"),
    "entropy": ("Entropy of the policy", "nats"),
    "logprob_gap_max": ("Largest gap between training and sampling log-probs", "nats"),
    "logprob_gap_p95": ("95th percentile of that gap", "nats"),
    "completion_tokens_mean": ("Mean completion length", "tokens"),
    "completion_tokens_min": ("Shortest completion", "tokens"),
    "seconds_per_optimizer_step": ("Time of an optimizer step", "s"),
    "policy_version": ("Policy version", "optimizer steps"),
    "num_weight_bytes": ("Size of the weights", "bytes"),
}
"""Label and unit of a number, in the order of a page; others follow under their own names."""

REASONS = {
    "infra_error": "lost to the infrastructure",
    "prompt_too_long": "prompt too long for the model",
    "zero_signal": "groups dropped: all attempts earned the same",
    "unscored": "trajectories without a reward",
    "no_trained_tokens": "trajectories without a trained token",
    "zero_advantage": "groups left out: every advantage is zero",
}

HIDDEN = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories of what cannot be seen, or changes how its neighbours look."""


class Piece(NamedTuple):
    """Part of a text: as it stands, or a `mark` for what cannot be seen, or a `note` about what was left out."""

    text: str
    kind: str = ""


def numbers(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Label, value and unit of a record's numbers, in the order of a page."""
    places = {name: place for place, name in enumerate(NUMBERS)}
    names = sorted((name for name in found if name not in ("promoted", "decided")), key=lambda name: (places.get(name, len(places)), name))
    return [(label, value(found[name]), "" if found[name] is None else unit) for name in names for label, unit in [_label(name)]]


def _label(name: str) -> tuple[str, str]:
    if name.startswith("pass_at_"):
        return f"pass@{name.removeprefix('pass_at_')} on held-out tasks", ""
    if name.startswith("reward_"):
        return f"Mean of the reward {name.removeprefix('reward_')}", ""
    return NUMBERS.get(name, (name.replace("_", " "), ""))


def reason(name: str) -> str:
    """A drop or failure reason as words."""
    return REASONS.get(name, name)


def value(content: Any) -> str:
    """A number as people read it: thousands apart, four significant digits; None is said, never shown as 0."""
    if content is None:
        return "not measured"
    if isinstance(content, bool) or not isinstance(content, int | float):
        return str(content)
    return f"{content:,}" if isinstance(content, int) else f"{content:.4g}"


def decision(record: dict[str, Any]) -> str:
    """What came of a step in one word: its outcome, or for an evaluation the decision."""
    if record["outcome"]:
        return str(record["outcome"]).replace("_", " ")
    promoted = record["numbers"].get("promoted")
    return "done" if promoted is None or record["step"] == "start" else verdict(record["numbers"])


def verdict(numbers: Mapping[str, Any], under: str = "") -> str:
    """What the gate said, from an evaluation's numbers, whose names begin with `under`; evaluations without `decided` had decided."""
    if not numbers.get(f"{under}decided", 1):
        return "not enough"
    return "promote" if numbers[f"{under}promoted"] else "hold"


def pieces(text: str, limit: int) -> list[Piece]:
    """A text with control and format characters as marks, and its middle left out beyond `limit` characters."""
    if len(text) <= limit:
        return _marked(text)
    head, tail = text[: limit - limit // 3], text[len(text) - limit // 3 :]
    return [*_marked(head), Piece(f" … {len(text) - limit:,} characters left out … ", "note"), *_marked(tail)]


def line(text: object, limit: int = 200) -> str:
    """A text on one line, control characters shown, cut beyond `limit` characters."""
    return "".join(piece.text.replace("\n", "") for piece in pieces(str(text), limit))


def _marked(text: str) -> list[Piece]:
    found = groupby(text, lambda character: unicodedata.category(character) in HIDDEN)
    return [Piece("".join(map(_mark, part)), "mark") if hidden else Piece("".join(part)) for hidden, part in found]


def _mark(character: str) -> str:
    if character == "\n":
        return "↵\n"
    return character.encode("unicode_escape").decode("ascii")
