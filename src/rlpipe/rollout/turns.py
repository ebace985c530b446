"""Turns of a conversation that is rendered anew before each of them, and the rows of tokens that come of it.

A chat template may drop or rewrite what was said before (reasoning, white space, roles). What was sampled stays as it was
sampled all the same: a row grows by new tokens only, and where the template says something else than the row holds, the
conversation forks into a new row that begins with what the policy is shown from there on. N = tokens of a row so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlpipe.engines.base import Completion
from rlpipe.rollout.building import STATUS, Segment, assemble
from rlpipe.rollout.prompts import encode

Segments = tuple[Segment, ...]
"""One row: tokens of one source after the other, see `rlpipe.rollout.building.assemble`."""


def continuation(tokenizer: Any, token_ids: np.ndarray, rendered: str) -> np.ndarray | None:
    """The ids `[n]` int32 to append to `token_ids` `[N]`, so that they say `rendered`; None where they cannot: fork.

    The ids so far are compared as ids and, where tokens would be cut otherwise, as text: `rendered` may be tokenised otherwise
    than the policy chose to write it. Special tokens count, nothing is cleaned up, and nothing is added to what the template writes.
    """
    whole = encode(tokenizer, rendered)
    if np.array_equal(whole[: len(token_ids)], token_ids):
        return whole[len(token_ids) :]
    new = encode(tokenizer, rendered[len(decode(tokenizer, token_ids)) :])
    # Whether it begins as the ids do, and whether the tokenizer begins a text with a space of its own.
    return new if decode(tokenizer, np.concatenate([token_ids, new])) == rendered else None


def show(tokenizer: Any, rows: Sequence[Segments], rendered: str, turn: int, source: str = "environment") -> tuple[Segments, ...]:
    """The rows after the policy was shown `rendered`, the conversation so far: the last of them holds its ids.

    New tokens go to the last row and come from `source`; a closing mark after a completion that was cut is among them. A fork
    is one row more, whose prompt is the whole of `rendered`; so is the first row. Neither is trained.
    """
    if rows:
        new = continuation(tokenizer, ids_of(rows[-1]), rendered)
        if new is not None:
            return (*rows[:-1], (*rows[-1], Segment(source, new, turn=turn)))
    return (*rows, (Segment("prompt", encode(tokenizer, rendered), turn=turn),))


def say(rows: Sequence[Segments], completion: Completion, turn: int, policy_version: int, temperature: float) -> tuple[Segments, ...]:
    """The rows after the policy's answer to the last of them: its ids and log-probs as sampled, trained if it ended by itself or at its length."""
    trained = STATUS[completion.finish_reason] in ("completed", "truncated")
    said = Segment("policy", completion.token_ids, completion.logprobs, turn, policy_version, temperature, trained)
    return (*rows[:-1], (*rows[-1], said))


def ids_of(row: Segments) -> np.ndarray:
    """`[N]` int32: what the policy is given next."""
    return assemble(row)[0]


def decode(tokenizer: Any, token_ids: np.ndarray) -> str:
    """What the ids say, special tokens included."""
    return str(tokenizer.decode(token_ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))
