"""vLLM in a process of its own, since it changes what belongs to a process: one JSON line in, one out; kept warm between repeats.

    python benchmarks/vllm_peer.py MODULE_FOLDER

Asked `{"prompts": [[id, …], …], "lengths": [[n, …], …], "seed": s}` it makes for each prompt one attempt a length and answers
`{"seconds": …, "tokens": …}`. An end token ends nothing, so that token counts are forced. Prompts that were computed for an earlier
question are forgotten first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}
"""No process between the question and the engine, and no core set aside or tied down."""


class VllmPeer:
    """The other end of the process. `why_not` says why there is none."""

    def __init__(self, module: Path, threads: int, log: Path) -> None:
        self.log = log
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(threads)}
        with log.open("w") as errors:
            self._child = subprocess.Popen(
                [sys.executable, __file__, str(module)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        ready = self._answer()
        self.why_not = None if ready else f"vllm does not start: {self._last_words()}"

    def generate(self, prompts: Sequence[Sequence[int]], lengths: Sequence[Sequence[int]], seed: int) -> float:
        """Seconds of one batch."""
        assert self._child.stdin
        print(json.dumps({"prompts": [list(map(int, ids)) for ids in prompts], "lengths": lengths, "seed": seed}), file=self._child.stdin, flush=True)
        answer = self._answer()
        wanted = sum(map(sum, lengths))
        if not answer or answer["tokens"] != wanted:
            sys.exit(f"vllm made {answer and answer['tokens']} tokens, not {wanted}: {self._last_words()}")
        return float(answer["seconds"])

    def _answer(self) -> dict[str, Any] | None:
        assert self._child.stdout
        line = self._child.stdout.readline()
        return json.loads(line) if line else None

    def _last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:160] if lines else "it said nothing"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._child.stdin
        self._child.stdin.close()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def serve(module: str) -> None:
    """Answer until the questions end."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    from vllm import LLM

    llm = LLM(model=module, dtype="bfloat16", max_model_len=1024, enforce_eager=True, enable_prefix_caching=True, disable_log_stats=True)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_generate(llm, **json.loads(line))), file=answers, flush=True)


def _generate(llm: Any, prompts: list[list[int]], lengths: list[list[int]], seed: int) -> dict[str, float]:
    from vllm import SamplingParams

    asked, how = [], []
    for number, (ids, wanted) in enumerate(zip(prompts, lengths, strict=True)):
        # Attempts of one length are one request, which is vLLM's own way to share a prompt; others share it through the prefix cache.
        same = len(set(wanted)) == 1
        for index, length in enumerate(wanted[:1] if same else wanted):
            asked.append({"prompt_token_ids": ids})
            how.append(
                SamplingParams(
                    n=len(wanted) if same else 1,
                    temperature=1.0,
                    max_tokens=length,
                    ignore_eos=True,
                    logprobs=0,
                    detokenize=False,
                    seed=seed + 100 * number + index,
                )
            )
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache was not reset")
    began = time.perf_counter()
    outputs = llm.generate(asked, how, use_tqdm=False)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens": sum(len(completion.token_ids) for output in outputs for completion in output.outputs)}


if __name__ == "__main__":
    serve(sys.argv[1])
