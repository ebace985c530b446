"""Seconds of an update and of a whole training step against TRL's `GRPOTrainer`: `python benchmarks/update.py`.

Row `first`: both sides sample 8 attempts of 4 tokens at the same 8 prompts and train on them. TRL's update is its step (from `on_step_begin` to
`on_step_end`, so with rewards, advantages, clipping and optimizer) less the seconds inside its `_generate`; rlpipe's is advantages, packing, forward,
backward, clipping and optimizer. The whole step adds the rollout on both sides, and on rlpipe's the hand-over of the weights to the engine.
Row `long`: both train on the same 64 completions of 256 tokens, sampled once by rlpipe; TRL gets them through its `rollout_func`.
Rewards are 1, 0, 1, … in every group, so that no side may leave one out. Steps alternate in one process, the first of each untimed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import trl_peer
from common import ATTEMPTS, PROMPTS, Line, Machine, Setting, chat_prompts, num_shared, parser, repeats, report, setting, short_prompts, table
from training import Trainer, alternating_rewards, open_training, train_config, update

ROWS = ("first", "long")
LONG = 256
TRL_ROWS_PER_FORWARD = {"first": 64, "long": 8}
"""Completions in one forward of TRL. All at once where that is little; 64 long ones at once would take tens of GB."""


def floor(made: Setting, machine: Machine, prompts: Sequence[Any], length: int) -> float:
    """Forward and backward of what prompts share once and every completion, and one pass of AdamW over weights, gradient and moments."""
    predicted = PROMPTS * ATTEMPTS * length
    tokens = num_shared(prompts) + predicted - PROMPTS * ATTEMPTS
    return 3 * made.forward_flops(tokens, predicted) / machine.bf16 + 7 * 4 * (made.body + made.head) / machine.memory


def rollout_floor(made: Setting, machine: Machine, prompts: Sequence[Any], length: int) -> float:
    predicted = PROMPTS * ATTEMPTS * length
    return made.forward_flops(num_shared(prompts) + predicted - PROMPTS * ATTEMPTS, predicted) / machine.bf16


def first(made: Setting, machine: Machine, num: int, scratch: Path) -> list[Line]:
    """The update and the whole step of the first case."""
    prompts, length = short_prompts(made.tokenizer), 4
    ours = Trainer(made.endless, train_config(machine.threads, learning_rate=1e-6), alternating_rewards, length)
    ours.open(prompts)
    found = pairs(made, machine, scratch, prompts, length, "first", num, lambda: ours.step(prompts))
    ours.close()
    case = f"8 × 8, prompt {len(prompts[0].ids)}, 4 new tokens"
    bound = floor(made, machine, prompts, length)
    return [
        Line(f"update, {case}", "TRL's step less its rollout", found["update"], found["trl update"], 5, 12, None, bound),
        Line(f"whole step, {case}", "TRL's step", found["step"], found["trl step"], 5, 10, None, bound + rollout_floor(made, machine, prompts, length)),
    ]


def long(made: Setting, machine: Machine, num: int, scratch: Path, length: int) -> list[Line]:
    """The update on long completions, the same on both sides."""
    prompts = chat_prompts(made.tokenizer)
    config = train_config(machine.threads, learning_rate=1e-6)
    sampler = Trainer(made.endless, config, alternating_rewards, length)
    groups = sampler.score(sampler.rollout(prompts))
    sampler.close()
    backend = open_training(config, made.endless, groups)

    def step() -> tuple[float, float]:
        seconds = update(groups, backend, config, 0)
        return seconds, seconds

    found = pairs(made, machine, scratch, prompts, length, "long", num, step, fixed(groups))
    backend.close()
    case = f"8 × 8, prompt {len(prompts[0].ids)}, completion {length}"
    return [Line(f"update, {case}", "TRL's step less its rollout", found["update"], found["trl update"], 1.7, 3, None, floor(made, machine, prompts, length))]


def fixed(groups: Sequence[Any]) -> Callable[..., dict[str, Any]]:
    """A `rollout_func` that returns these groups' tokens, in the order of the prompts."""
    rows = [row for group in groups for row in group]
    split = [(row.token_ids[: row.num_prompt_tokens].tolist(), row.token_ids[row.num_prompt_tokens :].tolist()) for row in rows]
    return lambda prompts, trainer: {"prompt_ids": [before for before, _ in split], "completion_ids": [after for _, after in split], "logprobs": None}


def pairs(
    made: Setting,
    machine: Machine,
    scratch: Path,
    prompts: Sequence[Any],
    length: int,
    row: str,
    num: int,
    step: Callable[[], tuple[float, float]],
    rollout: Callable[..., dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Seconds of `num` steps of both sides, in turn; without TRL the reason in place of its numbers."""
    import torch

    found: dict[str, Any] = {"update": [], "step": [], "trl update": [], "trl step": []}
    if trl_peer.WHY_NOT:
        timed = [step() for _ in range(num + 1)][1:]
        return {"step": [s for s, _ in timed], "update": [u for _, u in timed], "trl update": trl_peer.WHY_NOT, "trl step": trl_peer.WHY_NOT}

    def after_step(seconds: float, generating: float) -> bool:
        whole, updating = step()
        for name, value in (("step", whole), ("update", updating), ("trl step", seconds), ("trl update", seconds - generating)):
            found[name].append(value)
        torch.set_num_threads(machine.threads)
        return False

    rewards = lambda completions, **_: [float(i % 2) for i in range(len(completions))]  # noqa: E731
    texts = [{"prompt": prompt.text} for prompt in prompts]
    trainer = trl_peer.trainer(
        made.module,
        scratch,
        texts,
        rewards,
        prompts_per_step=PROMPTS,
        max_new_tokens=length,
        max_steps=num + 1,
        rows_per_forward=TRL_ROWS_PER_FORWARD[row],
        rollout=rollout,
    )
    torch.set_num_threads(machine.threads)
    trl_peer.train(trainer, after_step)
    return {name: values[1:] for name, values in found.items()}


def measure(options: argparse.Namespace, scratch: Path) -> None:
    machine, made = Machine(options.threads), setting(scratch, options.quick)
    facts = machine.lines(made.name)
    lines = first(made, machine, repeats(options), scratch / "trl") if "first" in options.rows else []
    if "long" in options.rows:
        lines += long(made, machine, repeats(options), scratch / "trl", 16 if options.quick else LONG)
    report(options, "Update: seconds", [*facts, *(line.strip() for line in (trl_peer.__doc__ or "").splitlines()[2:] if line.strip())], table(lines))


def main() -> None:
    options = parser(__doc__, ROWS).parse_args()
    with tempfile.TemporaryDirectory() as place:
        measure(options, Path(place))


if __name__ == "__main__":
    main()
