"""New tokens a second of the torch engine against transformers' `generate` and vLLM: `python benchmarks/rollout.py`.

From the ids of 8 prompts to the ids of 8 attempts at each, with log-probs where a side gives them (rlpipe and vLLM; `generate` gives none). Token counts are
forced and equal on all sides: in the rows of one length nothing ends an attempt but its length. In the spread row the attempts of the rlpipe run end where
the model ends them, by their seeds the same in every repeat, and the peers get those lengths: vLLM for each attempt, `generate` through a stopping criterion
(finished rows stay in its batch, as they do whenever it is used). vLLM runs in a process of its own, idle while others are measured, its prefix cache on and
emptied before each repeat.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import ATTEMPTS, Line, Machine, Setting, alternate, chat_prompts, num_shared, parser, repeats, report, seconds_of, setting, short_prompts, table
from vllm_peer import VllmPeer

ROWS = {
    "4": ("8 × 8, prompt 46, 4 new tokens", (3.5, 6.0), (2.0, 4.0)),
    "64": ("8 × 8, prompt 46, 64 new tokens", (3.0, 5.0), (1.2, 2.0)),
    "spread": ("8 × 8, prompt 64, up to 256 new tokens, spread", (3.0, 6.0), (1.1, 2.0)),
}
LONGEST = 256


class Ours:
    """The torch engine with one batch of requests."""

    def __init__(self, policy: Path, prompts: Sequence[Any], max_new_tokens: int, threads: int) -> None:
        from rlpipe.engines import Request, Sampling, Torch

        self.engine = Torch(dtype="bfloat16").open(policy, threads)
        sampling = Sampling(max_new_tokens, 1.0)
        self.requests = [Request(prompt.group_id, prompt.ids, tuple(range(100 * n, 100 * n + ATTEMPTS)), sampling) for n, prompt in enumerate(prompts)]
        self.lengths = self.run()

    def run(self) -> list[list[int]]:
        """The lengths of all attempts, by prompt."""
        self.engine.submit(self.requests)
        found = {(completion.request_id, completion.index): completion for completion in self.engine.stream()}
        if failed := [completion.error for completion in found.values() if completion.finish_reason not in ("stop", "length")]:
            raise SystemExit(f"rlpipe failed: {failed[0]}")
        return [[len(found[request.request_id, index].token_ids) for index in range(ATTEMPTS)] for request in self.requests]

    def timed(self) -> float:
        seconds = seconds_of(lambda: setattr(self, "last", self.run()))
        if self.last != self.lengths:
            raise SystemExit("the lengths changed between repeats, so the sides did not do the same work")
        return seconds


class Generate:
    """transformers' `generate`, bfloat16 weights, every attempt of every prompt in one batch."""

    def __init__(self, module: Path, prompts: Sequence[Any], lengths: Sequence[Sequence[int]], tokenizer: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(module, dtype=torch.bfloat16, local_files_only=True).eval()
        self.ids = torch.from_numpy(np.stack([prompt.ids for prompt in prompts]).astype(np.int64))
        self.limits = torch.tensor([length for row in lengths for length in row])
        self.pad = tokenizer.pad_token_id

    def timed(self) -> float:
        return seconds_of(self.run)

    def run(self) -> Any:
        """Ids of prompts and completions, `[attempts, width + longest]`, padded behind each row's end."""
        limits, width = self.limits, self.ids.shape[1]
        made = self.model.generate(
            input_ids=self.ids,
            attention_mask=self.ids.new_ones(self.ids.shape),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=ATTEMPTS,
            max_new_tokens=int(limits.max()),
            pad_token_id=self.pad,
            stopping_criteria=[lambda ids, scores, **_: limits <= ids.shape[1] - width],
        )
        if made.shape != (len(limits), width + int(limits.max())):
            raise SystemExit(f"generate returned {tuple(made.shape)}, not {len(limits)} rows of {width + int(limits.max())}")
        return made


def measure(name: str, made: Setting, vllm: VllmPeer, machine: Machine, num: int, longest: int) -> list[Line]:
    """The two lines of one row."""
    title, generate_wants, vllm_wants = ROWS[name]
    spread = name == "spread"
    prompts = chat_prompts(made.tokenizer) if spread else short_prompts(made.tokenizer)
    ours = Ours(made.policy if spread else made.endless, prompts, longest if spread else int(name), machine.threads)
    generate = Generate(made.module, prompts, ours.lengths, made.tokenizer)
    sides = {"rlpipe": ours.timed, "transformers": generate.timed}
    if not vllm.why_not:
        sides["vllm"] = lambda: vllm.generate([prompt.ids for prompt in prompts], ours.lengths, 0)
    found = alternate(sides, num)
    ours.engine.close()
    total = sum(map(sum, ours.lengths))
    floor = made.forward_flops(num_shared(prompts) + total - len(prompts) * ATTEMPTS, total) / machine.bf16
    if spread:
        every = sorted(length for row in ours.lengths for length in row)
        title += f" (median {every[len(every) // 2]}, mean {total / len(every):.0f}, {sum(length >= longest for length in every)} of {len(every)} at the limit)"
    peers = (("transformers generate", found["transformers"], generate_wants), ("vLLM", found.get("vllm", vllm.why_not or ""), vllm_wants))
    return [Line(title, peer, found["rlpipe"], theirs, *wants, total, floor) for peer, theirs, wants in peers]


def main() -> None:
    options = parser(__doc__, list(ROWS)).parse_args()
    machine = Machine(options.threads)
    with tempfile.TemporaryDirectory() as place:
        made = setting(Path(place), options.quick)
        facts = machine.lines(made.name)
        with VllmPeer(made.module, options.threads, Path(place) / "vllm.log") as vllm:
            lines = [line for name in options.rows for line in measure(name, made, vllm, machine, repeats(options), 16 if options.quick else LONGEST)]
    report(options, "Rollout: new tokens a second", facts, table(lines))


if __name__ == "__main__":
    main()
