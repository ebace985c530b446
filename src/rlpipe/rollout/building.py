"""Trajectories out of segments: who wrote which tokens, and which of them are trained. T = tokens of a trajectory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlpipe.engines.base import Completion, FinishReason
from rlpipe.errors import EngineError
from rlpipe.rollout.prompts import Prompt
from rlpipe.trajectory import Span, Trajectory

STATUS: dict[FinishReason, str] = {"stop": "completed", "length": "truncated", "abort": "aborted", "error": "infra_error"}
"""How an attempt went is the engine's word; the ids are never looked at."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one source.

    Attributes:
        token_ids: `[n]` int32.
        logprobs: `[n]` float32 of sampled tokens; None where nothing was sampled.
    """

    source: str
    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    turn: int = 0
    policy_version: int = 0
    temperature: float = 1.0
    trained: bool = False


def assemble(segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray, tuple[Span, ...]]:
    """Token ids `[T]` int32, log-probs `[T]` float32 with NaN where nothing was sampled, and the spans; empty segments leave no span.

    Raises:
        ValueError: a policy segment without a log-prob per token, another source with log-probs, or a trained segment that nobody chose.
    """
    tokens, logprobs, spans = [np.empty(0, dtype=np.int32)], [np.empty(0, dtype=np.float32)], []
    end = 0
    for segment in segments:
        start, end = end, end + len(segment.token_ids)
        if (segment.source == "policy") != (segment.logprobs is not None):
            raise ValueError(f"log-probs belong to policy segments and to no other, got a {segment.source} segment")
        if segment.trained and segment.source not in ("policy", "demonstration"):
            raise ValueError(f"a {segment.source} segment cannot be trained: the policy did not choose its tokens")
        known = np.full(end - start, np.nan, dtype=np.float32) if segment.logprobs is None else segment.logprobs
        if len(known) != end - start:
            raise ValueError(f"{len(known)} log-probs for {end - start} tokens")
        if end > start:
            tokens.append(segment.token_ids)
            logprobs.append(known)
            spans.append(
                Span(segment.source, start, end, segment.turn, policy_version=segment.policy_version, temperature=segment.temperature, trained=segment.trained)
            )
    return np.concatenate(tokens).astype(np.int32), np.concatenate(logprobs).astype(np.float32), tuple(spans)


def attempt(prompt: Prompt, completion: Completion, text: str, *, round_index: int, policy_version: int, temperature: float) -> Trajectory:
    """The trajectory of one single-turn attempt; trained if it ended by itself or at its length.

    Raises:
        EngineError: a sampled token's log-prob is not finite, so what was sampled says nothing of the policy.
    """
    if not np.isfinite(completion.logprobs).all():
        got = f"{np.count_nonzero(~np.isfinite(completion.logprobs))} of {len(completion.logprobs)} tokens of {prompt.group_id}/{completion.index}"
        do = "see whether the policy's weights are finite; if training spoiled them, lower train.learning_rate"
        raise EngineError("the engine sampled tokens whose log-probs are not finite", got=got, do=do)
    status = STATUS[completion.finish_reason]
    usable = status in ("completed", "truncated")
    said = Segment("policy", completion.token_ids, completion.logprobs, policy_version=policy_version, temperature=temperature, trained=usable)
    token_ids, logprobs, spans = assemble([Segment("prompt", prompt.ids, temperature=temperature), said])
    return Trajectory(
        trajectory_id=f"{prompt.group_id}/{completion.index}",
        group_id=prompt.group_id,
        task_id=prompt.task_id,
        index=completion.index,
        round=round_index,
        token_ids=token_ids,
        logprobs=logprobs,
        spans=spans,
        status=status,
        status_reason=completion.error,
        finish_reason=completion.finish_reason,
        prompt=prompt.text,
        completion=text,
    )
