"""Peak resident memory of an update against TRL's `GRPOTrainer`, each in a process of its own: `python benchmarks/memory.py`.

16 completions of 1,024 tokens at 2 prompts of 64, all weights trained. A process loads its model, notes its resident memory, sets the kernel's high-water
mark back (`/proc/self/clear_refs`), makes two updates (the second one holds Adam's moments from the start) and reads the mark. Both the peak itself and what
it is above the loaded model are given; the ratio is of the peaks. TRL gets its completions through `rollout_func`, so that no generation is in its peak.
Besides TRL with all 16 rows in one forward stand its two settings that save memory for time: one row a forward, and gradient checkpointing.
`--rows largest` doubles TRL's batch until a process passes `--limit-gb` and is stopped; it wants a machine to itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trl_peer
from common import ATTEMPTS, Machine, chat_prompts, parser, report, setting

LENGTH, BATCH = 1024, 16
SIDES = {
    "rlpipe": {},
    "rlpipe, activation checkpointing": {"activation_checkpointing": True},
    "TRL, 16 rows a forward": {"rows_per_forward": 16},
    "TRL, 16 rows a forward, gradient checkpointing (its default)": {"rows_per_forward": 16, "checkpointing": True},
    "TRL, 1 row a forward": {"rows_per_forward": 1},
}
ROWS = ("update", "largest")
MIB = 1 << 20


def groups_of(prompts: Sequence[Any], length: int, vocabulary: int) -> list[Any]:
    """Groups of made-up completions, 8 a prompt: how much memory an update takes does not depend on which ids they are."""
    import numpy as np

    from rlpipe.engines import Completion
    from rlpipe.rollout.building import attempt
    from rlpipe.trajectory import Group

    draw, made = np.random.default_rng(0), []
    for prompt in prompts:
        rows = []
        for index in range(ATTEMPTS):
            ids = draw.integers(3, vocabulary, length).astype(np.int32)
            completion = Completion(prompt.group_id, index, ids, np.full(length, -8.0, dtype=np.float32), "length")
            rows.append(attempt(prompt, completion, "", round_index=1, policy_version=0, temperature=1.0))
        made.append(Group(prompt.group_id, tuple(rows)))
    return made


class Mark:
    """The high-water mark of resident memory, set back at the start."""

    def __init__(self) -> None:
        self.loaded = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")

    def result(self) -> dict[str, float]:
        return {"loaded": self.loaded, "peak": _status("VmHWM")}


def _status(key: str) -> float:
    """MiB."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)) / 1024


def child(asked: dict[str, Any]) -> dict[str, float]:
    """Two updates of one side in this process."""
    import torch

    from rlpipe.policies import causal_lm

    torch.set_num_threads(asked["threads"])
    endless = Path(asked["endless"])
    module = endless / causal_lm.POLICY_MODULE
    tokenizer = causal_lm.load_tokenizer(module)
    vocabulary = json.loads((module / "config.json").read_text())["vocab_size"]
    groups = groups_of(chat_prompts(tokenizer, num=asked["batch"] // ATTEMPTS), asked["length"], vocabulary)
    return (_ours if asked["side"] == "rlpipe" else _theirs)(asked, endless, groups)


def _ours(asked: dict[str, Any], endless: Path, groups: list[Any]) -> dict[str, float]:
    from training import alternating_rewards, open_training, train_config, update

    config = train_config(asked["threads"], **asked["changes"])
    backend = open_training(config, endless, groups)
    mark = Mark()
    for version in range(2):
        update(alternating_rewards(groups), backend, config, version)
    return mark.result()


def _theirs(asked: dict[str, Any], endless: Path, groups: list[Any]) -> dict[str, float]:
    from update import fixed

    with tempfile.TemporaryDirectory() as scratch:
        made = trl_peer.trainer(
            endless / "modules" / "policy",
            Path(scratch),
            [{"prompt": group.trajectories[0].prompt} for group in groups],
            lambda completions, **_: [float(i % 2) for i in range(len(completions))],
            prompts_per_step=len(groups),
            max_new_tokens=asked["length"],
            max_steps=2,
            rollout=fixed(groups),
            **asked["changes"],
        )
        mark = Mark()
        trl_peer.train(made, lambda *_: False)
        return mark.result()


def run_child(asked: dict[str, Any], limit_gb: float) -> dict[str, float] | str:
    """The child's numbers, or why there are none. A child over the limit is killed before the machine is short of memory."""
    with tempfile.TemporaryFile("w+") as answers, tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen([sys.executable, __file__, "--child", json.dumps(asked)], stdout=answers, stderr=words, text=True)
        while process.poll() is None:
            if _resident(process.pid) > limit_gb * 1e9:
                process.kill()
                process.wait()
                return f"over {limit_gb:g} GB"
            time.sleep(0.05)
        answers.seek(0)
        words.seek(0)
        lines = [line for line in answers.read().splitlines() if line.startswith("{")]
        last = [line for line in words.read().splitlines() if line.strip()][-1:]
        return json.loads(lines[-1]) if process.returncode == 0 and lines else f"failed with exit code {process.returncode}: {''.join(last)[:160]}"


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


def measure(options: argparse.Namespace, endless: Path) -> str:
    common = {"endless": str(endless), "threads": options.threads, "length": 64 if options.quick else LENGTH}
    text = [f"Batch {BATCH}, completion {common['length']}, prompt 64. MiB; ratio: peak of TRL with 16 rows a forward over the line's.", ""]
    if "update" in options.rows:
        text += _updates(common, options.limit_gb)
    if "largest" in options.rows:
        text += ["", _largest(common, options.limit_gb)]
    return "\n".join(text)


def _updates(common: dict[str, Any], limit_gb: float) -> list[str]:
    found: dict[str, dict[str, float] | str] = {}
    for name, changes in SIDES.items():
        side = "rlpipe" if name.startswith("rlpipe") else "trl"
        missing = trl_peer.WHY_NOT if side == "trl" else None
        found[name] = missing or run_child({**common, "side": side, "batch": BATCH, "changes": changes}, limit_gb)
        print(f"{name}: {found[name]}", file=sys.stderr)
    peer = found["TRL, 16 rows a forward"]
    lines = ["| side | loaded | peak | above loaded | ratio |", "| --- | --- | --- | --- | --- |"]
    for name, got in found.items():
        if isinstance(got, str):
            lines.append(f"| {name} | {got} | | | |")
            continue
        ratio = f"{peer['peak'] / got['peak']:.2f}×" if isinstance(peer, dict) else ""
        lines.append(f"| {name} | {got['loaded']:.0f} | {got['peak']:.0f} | {got['peak'] - got['loaded']:.0f} | {ratio} |")
    return [*lines, "", "Wanted of rlpipe against TRL with 16 rows a forward: at least half the peak (2×), aim a quarter (4×)."]


def _largest(common: dict[str, Any], limit_gb: float) -> str:
    """Double TRL's batch, all of it in one forward, until it no longer fits."""
    if trl_peer.WHY_NOT:
        return f"Largest batch of TRL: {trl_peer.WHY_NOT}"
    batch, fitting = ATTEMPTS, 0
    while True:
        got = run_child({**common, "side": "trl", "batch": batch, "changes": {"rows_per_forward": batch}}, limit_gb)
        print(f"TRL, batch {batch}: {got}", file=sys.stderr)
        if isinstance(got, str):
            return f"Largest batch that TRL fits in {limit_gb:g} GB in one forward: {fitting or 'none'}; {batch}: {got}."
        fitting, batch = batch, 2 * batch


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(json.loads(sys.argv[2]))), flush=True)
        return
    options_of = parser(__doc__, ROWS)
    options_of.add_argument("--limit-gb", type=float, default=20.0, help="a process that holds more is stopped")
    options = options_of.parse_args()
    with tempfile.TemporaryDirectory() as place:
        made = setting(Path(place), options.quick)
        report(options, "Peak memory of an update", Machine(options.threads).lines(made.name), measure(options, made.endless))


if __name__ == "__main__":
    main()
