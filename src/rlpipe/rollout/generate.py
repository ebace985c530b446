"""Groups of attempts from an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlpipe.engines.base import Completion, Engine, Request, Sampling, unserved
from rlpipe.rollout.building import attempt
from rlpipe.rollout.prompts import Prompt
from rlpipe.seeds import seed
from rlpipe.trajectory import Group

RETRIES = 2


@dataclass(frozen=True, slots=True)
class Origin:
    """What the seeds and the spans of a round's attempts say of their origin."""

    run_seed: int
    round_index: int
    policy_version: int


def generate(engine: Engine, tokenizer: Any, prompts: Sequence[Prompt], sampling: Sampling, num_attempts: int, origin: Origin) -> Iterator[Group]:
    """One group per prompt, in order, `num_attempts` trajectories each; all prompts are submitted together.

    Attempts that the engine could not make are made again `RETRIES` times, with the same seeds, and are then kept with
    status `infra_error` and no tokens, so that nothing later takes them for an answer.
    """
    requests = [_request(prompt, sampling, num_attempts, origin) for prompt in prompts]
    completions = collect(engine, requests)
    temperature = sampling.temperature or 1.0
    for prompt in prompts:
        rows = []
        for index in range(num_attempts):
            completion = completions[prompt.group_id, index]
            text = tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            rows.append(attempt(prompt, completion, text, round_index=origin.round_index, policy_version=origin.policy_version, temperature=temperature))
        yield Group(prompt.group_id, tuple(rows))


def collect(engine: Engine, requests: Sequence[Request]) -> dict[tuple[str, int], Completion]:
    """The completion of every attempt by (request id, index), whatever order the engine returns them in."""
    found = {(completion.request_id, completion.index): completion for request in requests for completion in unserved(request, "error", "nothing came back")}
    missing = {request.request_id: list(range(len(request.seeds))) for request in requests}
    for _ in range(1 + RETRIES):
        engine.submit([request.only(missing[request.request_id]) for request in requests if missing[request.request_id]])
        for completion in engine.stream():
            index = missing[completion.request_id][completion.index]
            found[completion.request_id, index] = replace(completion, index=index)
        missing = {name: [i for i in indices if found[name, i].finish_reason == "error"] for name, indices in missing.items()}
        if not any(missing.values()):
            break
    return {key: _without_tokens(completion) if completion.finish_reason == "error" else completion for key, completion in found.items()}


def _request(prompt: Prompt, sampling: Sampling, num_attempts: int, origin: Origin) -> Request:
    seeds = tuple(seed(origin.run_seed, origin.round_index, prompt.group_id, index, 0) for index in range(num_attempts))
    return Request(prompt.group_id, prompt.ids, seeds, sampling)


def _without_tokens(completion: Completion) -> Completion:
    return replace(completion, token_ids=completion.token_ids[:0], logprobs=completion.logprobs[:0])
