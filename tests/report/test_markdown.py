"""Markdown summaries are short, and nothing in them breaks a table or becomes HTML."""

from __future__ import annotations

from rlpipe.preflight import Finding
from rlpipe.report import markdown
from tests.report.factories import record

ROWS = [
    {"round": 0, "start/greedy_accuracy": 0.3, "start/promoted": 1.0, "start/seconds": 14.346},
    {
        "round": 1,
        "rollout/num_groups": 64.0,
        "rollout/mean_completion_tokens": 3.928,
        "rollout/seconds": 10.0,
        "reward/sampled_reward": 0.193,
        "reward/num_groups_with_signal": 42.0,
        "evaluate/greedy_accuracy": 0.38,
        "evaluate/promoted": 0.0,
        "evaluate/seconds": 2.25,
    },
    {"round": 2, "rollout/num_groups": 64.0},
]


def test_summary_of_a_step() -> None:
    made = record("evaluate", numbers={"promoted": 1, "policy_version": 12, "greedy_accuracy": 0.5, "reward_a|b": None}, reasons={"x|<y>": 3})
    assert markdown.summary(made).splitlines() == [
        "# Evaluate, round 1: promote",
        "",
        "| Number | Value |",
        "| --- | ---: |",
        "| Greedy accuracy on held-out tasks | 0.5 |",
        "| Policy version (optimizer steps) | 12 |",
        r"| Mean of the reward a\|b | not measured |",
        "",
        "| Dropped, left out or failed | Count |",
        "| --- | ---: |",
        r"| x\|&lt;y&gt; | 3 |",
    ]


def test_summary_without_signal_says_so() -> None:
    assert markdown.summary(record("train", outcome="no_signal")) == "# Train, round 1: no signal\n"


def test_run_summary_has_the_rounds() -> None:
    status = {"state": "SUCCEEDED", "run_id": "4f7a", "task": "post-training", "error": None}
    assert markdown.run_summary(status, ROWS).splitlines() == [
        "# Run succeeded",
        "",
        "Run: 4f7a  ",
        "Of: post-training",
        "",
        "| Round | Greedy accuracy | Sampled reward | Mean length (tokens) | Groups with signal | Seconds | Decision |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 0 | 0.300 | - | - | - | 14.3 | champion |",
        "| 1 | 0.380 | 0.193 | 3.928 | 42/64 | 12.2 | hold |",
        "| 2 | - | - | - | -/64 | - | - |",
    ]


def test_findings_of_preflight() -> None:
    found = [Finding("model", True, "there"), Finding("tracking", False, "a|b <c>", "start it")]
    assert markdown.findings(found).splitlines() == [
        "# Preflight: 1 of 2 checks failed",
        "",
        "| Check | State | Found | Do |",
        "| --- | --- | --- | --- |",
        "| model | ok | there |  |",
        r"| tracking | FAILED | a\|b &lt;c&gt; | start it |",
    ]


def test_run_summary_of_a_failure_quotes_the_error_without_a_password() -> None:
    """Case B07: an error may name a URI with a password in it."""
    error = "cannot reach https://user:marker-secret@host/x\n\n<script>alert(1)</script> | # not a heading"
    text = markdown.run_summary({"state": "FAILED", "error": error}, None)
    assert "marker-secret" not in text
    assert text.splitlines() == [
        "# Run failed",
        "",
        "Error:",
        "",
        r"> cannot reach https://\*\*\*@host/x",
        ">",
        r"> &lt;script&gt;alert(1)&lt;/script&gt; \| \# not a heading",
        "",
        "The rounds are not known: tracking could not be asked.",
    ]
