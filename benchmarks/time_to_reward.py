"""Seconds of training to 0.80 held-out greedy accuracy on `max_of_three`, rlpipe and TRL: `python benchmarks/time_to_reward.py`.

Every run is a process of its own, the sides in turn: one run a learning rate, then three seeds at each side's best. A step of both takes 8 of the same 512
tasks with 8 attempts of up to 4 tokens, ended by a line break on both sides, scored by `exact_match`, all weights trained. The clock runs from the first step
on (model and libraries loaded) and stands still while 200 held-out tasks are answered greedily every `--every` steps, by the same engine for both sides.
A side without 0.80 after `--limit` seconds counts as over it. `rlpipe loop` is the library's parts in one process, on-policy at every step; `rlpipe run` is
the command with the shipped params, 8 steps a round, its records' seconds less evaluation: everything it writes, checks and tracks is in it.
Of both it holds that one step more or less of the clock's step decides where the target is met, so compare medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trl_peer
from common import ATTEMPTS, PROMPTS, Machine, parser, report, setting
from training import Trainer, train_config

ROWS = ("loop", "run", "trl")
NAMES = {"loop": "rlpipe loop", "run": "rlpipe run", "trl": "TRL"}
RATES = (1e-5, 2e-5, 4e-5)
SEEDS = (1, 2, 3)
TRAIN_TASKS, HELD_OUT = 512, 200


class Watch:
    """Adds up training seconds; every few steps it asks the held-out tasks outside them."""

    def __init__(self, policy: Path, asked: dict[str, Any]) -> None:
        from rlpipe import task_sources
        from rlpipe.engines import Torch
        from rlpipe.policies import causal_lm
        from rlpipe.rollout.prompts import render

        self.asked, self.steps, self.seconds, self.curve = asked, 0, 0.0, []
        self.tasks = task_sources.generator("max_of_three", {}).make("eval", asked["held_out"], 1)
        self.tokenizer = causal_lm.load_tokenizer(policy / causal_lm.POLICY_MODULE)
        self.prompts = [render(self.tokenizer, task, task.task_id) for task in self.tasks]
        self.engine = Torch(dtype="bfloat16", chunk_groups=64).open(policy, asked["threads"])

    def after_step(self, seconds: float, module: Any) -> bool:
        """Whether training is over: the target is met, or the limit passed."""
        self.steps, self.seconds = self.steps + 1, self.seconds + seconds
        over = self.seconds >= self.asked["limit"] or self.steps >= self.asked["max_steps"]
        if self.steps % self.asked["every"] and not over:
            return False
        self.curve.append((self.steps, round(self.seconds, 1), self.accuracy(module)))
        print(f"{self.asked['side']} rate={self.asked['rate']:g} step={self.steps} seconds={self.seconds:.0f} greedy={self.curve[-1][2]:.3f}", file=sys.stderr)
        return over or self.curve[-1][2] >= self.asked["target"]

    def accuracy(self, module: Any) -> float:
        """Share of the held-out tasks that the greedy completion answers."""
        from rlpipe.engines import Request, Sampling

        self.engine.load({name: value.detach() for name, value in module.named_parameters()})
        self.engine.submit([Request(prompt.task_id, prompt.ids, (0,), Sampling(4, 0.0, ("\n",))) for prompt in self.prompts])
        said = {completion.request_id: self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True) for completion in self.engine.stream()}
        return statistics.mean(right(said[task.task_id], task.reference) for task in self.tasks)

    def result(self) -> dict[str, Any]:
        met = self.curve and self.curve[-1][2] >= self.asked["target"] and self.curve[-1][1] <= self.asked["limit"]
        return {"seconds": self.curve[-1][1] if met else None, "curve": self.curve}


def right(completion: str, reference: str) -> float:
    """1 or 0, by the rule of the reward `exact_match`."""
    from rlpipe.reward.base import up_to
    from rlpipe.reward.exact_match import ExactMatch

    rule = ExactMatch()
    return float(rule.normalised(up_to(completion, rule.until)) == rule.normalised(reference))


def train_tasks() -> list[Any]:
    from rlpipe import task_sources

    return task_sources.generator("max_of_three", {}).make("train", TRAIN_TASKS, 0)


def run_loop(asked: dict[str, Any], policy: Path) -> dict[str, Any]:
    """rlpipe's own parts: rollout, scoring in child processes, update, weights to the engine."""
    import random

    from rlpipe.reward.exact_match import ExactMatch
    from rlpipe.reward.scoring import Scorer
    from rlpipe.reward.section import RewardSection
    from rlpipe.rollout.prompts import render
    from rlpipe.trajectory import groups_of

    tasks = train_tasks()
    by_id = {task.task_id: task for task in tasks}
    random.Random(asked["seed"]).shuffle(tasks)
    scorer = Scorer(RewardSection(rewards=(ExactMatch(),), group_filters=()))

    def score(groups: Sequence[Any]) -> list[Any]:
        return groups_of(scorer.score([row for group in groups for row in group], by_id))

    config = train_config(asked["threads"], learning_rate=asked["rate"], run={"threads": asked["threads"], "seed": asked["seed"]})
    ours = Trainer(policy, config, score, 4, ("\n",), asked["seed"])
    watch = Watch(policy, asked)
    prompts = [render(ours.tokenizer, task, f"01/{task.task_id}/0") for task in tasks]
    ours.open(prompts[:PROMPTS])
    done = False
    while not done:
        start = watch.steps * PROMPTS % len(prompts)
        seconds, _ = ours.step(prompts[start : start + PROMPTS])
        done = watch.after_step(seconds, ours.backend.module)
    ours.close()
    return watch.result()


def run_trl(asked: dict[str, Any], policy: Path) -> dict[str, Any]:
    """TRL's trainer; the line break is one of its end tokens."""
    watch = Watch(policy, asked)
    line_break = watch.tokenizer("\n", add_special_tokens=False)["input_ids"][-1:]
    with tempfile.TemporaryDirectory() as scratch:
        made = trl_peer.trainer(
            policy / "modules" / "policy",
            Path(scratch),
            [{"prompt": task.prompt, "reference": task.reference} for task in train_tasks()],
            lambda completions, reference, **_: [right(*pair) for pair in zip(completions, reference, strict=True)],
            prompts_per_step=PROMPTS,
            max_new_tokens=4,
            max_steps=asked["max_steps"],
            rows_per_forward=PROMPTS * ATTEMPTS,
            learning_rate=asked["rate"],
            seed=asked["seed"],
            shuffle=True,
            stop_ids=line_break,
        )
        trl_peer.train(made, lambda seconds, _: watch.after_step(seconds, made.model))
    return watch.result()


def run_command(asked: dict[str, Any], model: Path) -> dict[str, Any]:
    """`rlpipe run` in a folder of its own, rounds as shipped until the target is met."""
    sets = [f"run.seed={asked['seed']}", f"run.threads={asked['threads']}", f"train.learning_rate={asked['rate']}", f"run.stop.target={asked['target']}"]
    if asked["quick"]:
        sets += ["rollout.num_tasks=8", "tasks.train.num=16", "tasks.eval.num=8"]
    with tempfile.TemporaryDirectory() as place:
        command = [Path(sys.executable).with_name("rlpipe"), "run", "--rounds", "1" if asked["quick"] else "10", "--set", f"model.path={model}"]
        done = subprocess.run([*map(str, command), *(part for one in sets for part in ("--set", one))], cwd=place, stdout=sys.stderr, check=False)
        if done.returncode:
            sys.exit(f"rlpipe run ended with exit code {done.returncode}")
        rounds = json.loads((Path(place) / "reports" / "run.json").read_text())["rounds"]
    spent, curve = 0.0, []
    for number, row in enumerate(rounds, start=1):
        spent += row["seconds"] - row["seconds_evaluate"]
        curve.append((number, round(spent, 1), row["greedy_accuracy"]))
        if row["greedy_accuracy"] >= asked["target"] or spent > asked["limit"]:
            break
    met = curve[-1][2] >= asked["target"] and curve[-1][1] <= asked["limit"]
    return {"seconds": curve[-1][1] if met else None, "curve": curve}


def run_child(asked: dict[str, Any], place: Path) -> dict[str, Any]:
    """One run in a process of its own."""
    asked = {**asked, "policy": str(place / "policy"), "model": str(place / "model")}
    done = subprocess.run([sys.executable, __file__, "--child", json.dumps(asked)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{NAMES[asked['side']]} ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def child(asked: dict[str, Any]) -> dict[str, Any]:
    if asked["side"] == "run":
        return run_command(asked, Path(asked["model"]))
    import torch

    torch.set_num_threads(asked["threads"])
    return {"loop": run_loop, "trl": run_trl}[asked["side"]](asked, Path(asked["policy"]))


def measure(options: argparse.Namespace, place: Path) -> str:
    base = {name: getattr(options, name) for name in ("threads", "limit", "every", "target", "quick")}
    base |= {"max_steps": 1 if options.quick else 1000, "held_out": 8 if options.quick else HELD_OUT}
    sides = [side for side in options.rows if side != "trl" or not trl_peer.WHY_NOT]
    rates, seeds = (options.rates[:1], SEEDS[:1]) if options.quick else (options.rates, tuple(options.seeds))
    tuned = {(side, rate): run_child({**base, "side": side, "rate": rate, "seed": 0}, place) for rate in rates for side in sides}
    best = {side: min(rates, key=lambda rate: _order(tuned[side, rate])) for side in sides}
    last = {(side, seed): run_child({**base, "side": side, "rate": best[side], "seed": seed}, place) for seed in seeds for side in sides}
    lines = [f"Target {options.target}, limit {options.limit:g} s of training, evaluated every {options.every} steps (`rlpipe run`: every 8).", ""]
    lines += ["| side | " + " | ".join(f"rate {rate:g}" for rate in rates) + " | best | seeds at the best | median |", "| --- " * (len(rates) + 4) + "|"]
    for side in sides:
        ends = [last[side, seed] for seed in seeds]
        middle = _seconds(sorted(ends, key=lambda end: end["seconds"] or float("inf"))[len(ends) // 2], options.limit)
        cells = [*(_seconds(tuned[side, rate], options.limit) for rate in rates), f"{best[side]:g}", "; ".join(_seconds(end, options.limit) for end in ends)]
        lines.append(f"| {NAMES[side]} | {' | '.join(cells)} | {middle} |")
    if "trl" in options.rows and trl_peer.WHY_NOT:
        lines.append(f"| TRL | {trl_peer.WHY_NOT} |" + " |" * (len(rates) + 2))
    return "\n".join([*lines, "", "Wanted of rlpipe against TRL: at least 5×, aim 12×."])


def _order(end: dict[str, Any]) -> tuple[float, float]:
    """Soonest at the target; among those that never were, the most accurate."""
    return (end["seconds"] or float("inf"), -max((point[2] for point in end["curve"]), default=0.0))


def _seconds(end: dict[str, Any], limit: float) -> str:
    reached = max((point[2] for point in end["curve"]), default=0.0)
    if end["seconds"] is not None:
        return f"{end['seconds']:.0f} s ({reached:.2f})"
    steps, spent, _ = end["curve"][-1]
    return f"> {limit:g} s ({reached:.2f})" if spent >= limit else f"not by step {steps}, {spent:.0f} s ({reached:.2f})"


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(json.loads(sys.argv[2]))), flush=True)
        return
    options_of = parser(__doc__, ROWS)
    options_of.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="learning rates of both sides")
    options_of.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), help="of the runs at each side's best rate")
    options_of.add_argument("--limit", type=float, default=600.0, help="seconds of training after which a run is stopped")
    options_of.add_argument("--every", type=int, default=2, help="steps between two evaluations")
    options_of.add_argument("--target", type=float, default=0.8, help="held-out greedy accuracy")
    options = options_of.parse_args()
    with tempfile.TemporaryDirectory() as place:
        made = setting(Path(place), options.quick)
        report(options, "Seconds to a reward", Machine(options.threads).lines(made.name), measure(options, Path(place)))


if __name__ == "__main__":
    main()
