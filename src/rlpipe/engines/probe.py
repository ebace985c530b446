"""Whether an engine computes what a policy folder says: its log-probs of fixed sequences against a plain forward.

In-place weight updates can be silently wrong, a server can hold another policy or report log-probs by another convention.
What is expected is computed before an engine takes the memory. B = sequences, L = tokens of each, V = vocabulary.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlpipe.engines.base import Engine, Request, Sampling
from rlpipe.engines.served import trained_length
from rlpipe.errors import EngineError
from rlpipe.policies import causal_lm

log = logging.getLogger("rlpipe")

NUM_SEQUENCES = 8
LENGTH = 24
TEMPERATURE = 0.7
"""Of the tokens drawn: an engine that reports log-probs before the temperature shows itself."""
GOLDEN = 0.6180339887
"""Steps of this share of the vocabulary visit all parts of it evenly, whatever its size."""
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.5}
"""Of the mean gap. Measured with SmolLM2-135M on a CPU: 1e-5 in float32; 0.15 in bfloat16, where tokens out of nowhere differ by 6 at worst,
so that one gap says nothing. Other weights give several units, those of an optimizer step before are told apart in float32 alone."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the trainer's forward says of the fixed sequences.

    Attributes:
        token_ids: `[B, L]` int32.
        logprobs: `[B, L - 1]` float32, of each token but the first, at temperature 1.
        following: `[B, V]` float32, of every token that may follow, at `TEMPERATURE`.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    following: np.ndarray


def fixed_sequences(vocabulary: int, length: int) -> np.ndarray:
    """`[B, L]` int32 that depend on the size of the vocabulary alone and visit all of it."""
    steps = np.arange(NUM_SEQUENCES * length, dtype=np.float64).reshape(NUM_SEQUENCES, length)
    return np.floor(steps * GOLDEN % 1.0 * vocabulary).astype(np.int32)


def expectation(policy_folder: Path, dtype: Literal["bfloat16", "float32"], max_length: int | None = None) -> Expectation:
    """The trainer's log-probs of the fixed sequences, all weights in `dtype`, on this process's device.

    Args:
        policy_folder: holds `modules/policy`.
        max_length: most tokens that the engine takes; the sequences leave room for one more.
    """
    import torch

    module = _module(policy_folder, getattr(torch, dtype))
    limit = min(max_length or LENGTH + 1, trained_length(policy_folder) or LENGTH + 1)
    token_ids = fixed_sequences(int(module.config.get_text_config().vocab_size), min(LENGTH, limit - 1))
    found = _evaluated(module, token_ids)
    del module
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _module(policy_folder: Path, dtype: Any) -> Any:
    from rlpipe.policies.device import device

    module: Any = causal_lm.load_module(policy_folder / causal_lm.POLICY_MODULE, dtype)
    return module.requires_grad_(False).to(device())


def _evaluated(module: Any, token_ids: np.ndarray) -> Expectation:
    import torch

    ids = torch.from_numpy(token_ids.astype(np.int64)).to(module.device)
    with torch.inference_mode():
        logits = module(input_ids=ids, use_cache=False).logits.float()
        given = torch.log_softmax(logits[:, :-1], dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        following = torch.log_softmax(logits[:, -1] / TEMPERATURE, dim=-1)
    return Expectation(token_ids, given.cpu().numpy(), following.cpu().numpy())


def check(engine: Engine, expected: Expectation, dtype: str, tolerance: float | None = None, *, scores: bool = True) -> float:
    """The mean gap between the engine's log-probs and the expected ones.

    Args:
        engine: with nothing queued.
        tolerance: largest mean gap accepted; None takes that of `dtype`.
        scores: whether the engine can be asked for the log-probs of given tokens; else only tokens it draws are compared.

    Raises:
        EngineError: the gap is larger, or the engine gave no tokens.
    """
    limit = TOLERANCES[dtype] if tolerance is None else tolerance
    found = {"drawn": _drawn_gaps(engine, expected), **({"given": _given_gaps(engine, expected)} if scores else {})}
    for name, gaps in found.items():
        if not gaps.mean() <= limit:  # written so that NaN fails
            raise EngineError(
                f"the engine's log-probs of {name} tokens are not those of the policy folder: other weights, or counted otherwise",
                got=f"a gap of {gaps.mean():.3g} on average, {gaps.max():.3g} at most",
                accepted=f"{limit:g} on average in {dtype}",
                do="load the policy into a fresh engine; if the engine holds it and computes in another precision, set engine.dtype or engine.probe_tolerance",
            )
    mean = float(max(gaps.mean() for gaps in found.values()))
    log.info("probe=ok dtype=%s mean_gap=%.1e", dtype, mean)
    return mean


def _drawn_gaps(engine: Engine, expected: Expectation) -> np.ndarray:
    sampling = Sampling(1, TEMPERATURE)
    engine.submit([Request(f"probe/{row}", ids, (row,), sampling) for row, ids in enumerate(expected.token_ids)])
    gaps = {}
    for completion in engine.stream():
        row = int(completion.request_id.removeprefix("probe/"))
        if completion.finish_reason == "error":
            raise EngineError("the engine answers no request", got=completion.error, do="see the engine's log")
        gaps[row] = abs(float(completion.logprobs[0]) - float(expected.following[row, completion.token_ids[0]]))
    return np.array([gaps[row] for row in range(len(expected.token_ids))])


def _given_gaps(engine: Engine, expected: Expectation) -> np.ndarray:
    found = np.stack([logprobs[1:] for logprobs in engine.logprobs(list(expected.token_ids))])
    return np.abs(found - expected.logprobs)
