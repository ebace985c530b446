"""Tokens a second of two ranks with half of the threads each against one process with all of them: `python benchmarks/ranks.py`.

Both sides train the same weights on the same 64 trajectories (8 groups; prompts of 64 tokens, completions of 32 to 256, spread as a real run's), one
optimizer step of all parameters after the other, through the same code: packing, forward, backward, exchange of gradients, clipping and optimizer.
The processes of both sides live side by side and take turns; who waits computes nothing. Losses of both sides are compared too: they are one result.
A forward takes 2,048 tokens, since the three processes keep their memory while they wait and must fit into 24 GB together.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from common import ATTEMPTS, PROMPTS, Line, Machine, alternate, parser, repeats, report, setting, table

ROWS = ("torch", "zero0", "zero1", "zero2", "zero3")
PROMPT, SHORTEST, LONGEST = 64, 32, 256
GO, STOP = "go", "stop"


def groups(vocabulary: int) -> list[Any]:
    """Trajectories drawn at random, the same in every process."""
    from rlpipe.trajectory import Group, Span, Trajectory

    draw = np.random.default_rng(0)
    found = []
    for number in range(PROMPTS):
        prompt = draw.integers(1, vocabulary, PROMPT)
        rows = []
        for index in range(ATTEMPTS):
            length = int(SHORTEST + (LONGEST - SHORTEST) * draw.beta(1, 2))
            ids = np.concatenate([prompt, draw.integers(1, vocabulary, length)]).astype(np.int32)
            logprobs = np.concatenate([np.full(PROMPT, np.nan), np.full(length, -np.log(vocabulary))]).astype(np.float32)
            spans = (Span("prompt", 0, PROMPT), Span("policy", PROMPT, len(ids), temperature=1.0, trained=True))
            rows.append(Trajectory(f"g{number}-{index}", f"g{number}", f"t{number}", index, 1, ids, spans=spans, logprobs=logprobs, reward=float(index % 2)))
        found.append(Group(f"g{number}", tuple(rows)))
    return found


def config(row: str, threads: int, dtype: str) -> Any:
    from rlpipe.train.section import Config

    backend = {"type": "torch"} if row == "torch" else {"type": "deepspeed", "zero_stage": int(row[-1])}
    return Config.model_validate(
        {"run": {"threads": threads}, "backend": {**backend, "dtype": dtype}, "groups_per_step": PROMPTS, "learning_rate": 1e-6, "micro_batch_tokens": 2048}
    )


def rank(row: str, threads: int, dtype: str, policy: Path) -> None:
    """One process of a side: an optimizer step each time rank 0 is told so; it answers with seconds and loss."""
    import torch

    from rlpipe.policies import causal_lm
    from rlpipe.train.fit import open_backend
    from rlpipe.train.lineage import Start
    from rlpipe.train.ranks import join

    torch.set_num_threads(threads)
    ranks, settings = join(policy, 600.0), config(row, threads, dtype)
    folder = policy / causal_lm.POLICY_MODULE
    made = groups(json.loads((folder / "config.json").read_text())["vocab_size"])
    backend = open_backend(settings, Start(folder, 0), made, ranks)
    while ranks.gather(sys.stdin.readline().strip() or STOP if ranks.first else None)[0] == GO:
        ranks.wait()
        seconds, loss = step(made, backend, settings)
        ranks.wait()
        if ranks.first:
            print(json.dumps({"seconds": seconds, "loss": loss}), flush=True)
    backend.close()


def step(made: Sequence[Any], backend: Any, settings: Any) -> tuple[float, float]:
    from rlpipe.train.signal import find_signal
    from rlpipe.train.update import update

    began = time.perf_counter()
    updated = update(find_signal(made, settings, list).groups, backend, settings, version=0, round_index=1, incoming=False)
    return time.perf_counter() - began, float(updated.numbers["loss"] or 0)


@contextmanager
def side(row: str, num: int, threads: int, dtype: str, policy: Path) -> Iterator[Callable[[], dict[str, float]]]:
    """The processes of one side; calling what this gives takes one step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--as-rank", row, str(threads), dtype, str(policy)]
    processes = []
    for number in range(num):
        place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ = {**os.environ, **{name: str(value) for name, value in place.items()}, "OMP_NUM_THREADS": str(threads)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} if number == 0 else {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        processes.append(subprocess.Popen(command, env=environ, text=True, **pipes))
    try:
        yield lambda: answer(processes[0])
    finally:
        processes[0].stdin.close()
        for process in processes:
            process.wait(60)


def answer(first: subprocess.Popen[str]) -> dict[str, float]:
    first.stdin.write(f"{GO}\n")
    first.stdin.flush()
    for line in first.stdout:
        if line.startswith("{"):  # libraries print to standard output too
            return json.loads(line)
    raise SystemExit(f"a rank ended with exit code {first.wait(60)}")


def compare(row: str, num: int, threads: int, dtype: str, policy: Path, amount: int) -> tuple[Line, float]:
    """The line of a backend, and the largest difference of the two sides' losses relative to their size."""
    losses: dict[str, list[float]] = {"one": [], "two": []}

    def timed(name: str, call: Callable[[], dict[str, float]]) -> float:
        found = call()
        losses[name].append(found["loss"])
        return found["seconds"]

    with ExitStack() as stack:
        sides = {name: stack.enter_context(side(row, count, max(1, threads // count), dtype, policy)) for name, count in (("one", 1), ("two", 2))}
        found = alternate({name: lambda name=name, call=call: timed(name, call) for name, call in sides.items()}, num)
    gap = max(abs(one - two) / max(abs(one), 1e-3) for one, two in zip(losses["one"], losses["two"], strict=True))
    work = f"{row}, 2 ranks × {max(1, threads // 2)} threads, {dtype}"
    return Line(work, f"1 process × {threads} threads", found["two"], found["one"], 0.8, 1.0, amount), gap


def main() -> None:
    options = parser(__doc__, ROWS).parse_args()
    threads, num = options.threads, repeats(options)
    machine = Machine(threads)
    amount = sum(row.num_sampled_tokens for group in groups(100) for row in group)
    lines, gaps = [], []
    with tempfile.TemporaryDirectory() as place:
        made = setting(Path(place), options.quick)
        for row in options.rows:
            line, gap = compare(row, num, threads, "float32" if options.quick else "bfloat16", made.policy, amount)
            lines.append(line)
            gaps.append(f"{row} {gap:.1e}")
        described = [*machine.lines(made.name), f"largest difference of losses between the sides, relative: {', '.join(gaps)}"]
    report(options, "Ranks", described, table(lines))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        rank(sys.argv[2], int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
    else:
        main()
