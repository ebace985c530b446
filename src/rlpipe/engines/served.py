"""What engines share that draw by their own random numbers and stop by their own rules: what an attempt is asked for, and what comes of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlpipe.engines.base import Begun, Completion, FinishReason, Request
from rlpipe.engines.stopping import Ending, end_ids
from rlpipe.errors import EngineError
from rlpipe.policies import causal_lm
from rlpipe.policies.adapters import adapter_folder
from rlpipe.seeds import seed

REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
NOTHING = Begun(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))


@dataclass(frozen=True, slots=True)
class Asked:
    """One attempt of a request, as it is asked for."""

    request: Request
    index: int

    @property
    def begun(self) -> Begun:
        """What the attempt has already."""
        return self.request.begun[self.index] if self.request.begun else NOTHING

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt and what the attempt has already."""
        return [*self.request.prompt_ids.tolist(), *self.begun.token_ids.tolist()]

    @property
    def max_tokens(self) -> int:
        """Tokens still to come."""
        return self.request.sampling.max_new_tokens - len(self.begun.token_ids)

    @property
    def seed(self) -> int:
        """The attempt's seed; another one after each place it was put aside at, since these engines begin their streams anew."""
        own, length = self.request.seeds[self.index], len(self.begun.token_ids)
        return seed(own, length) if length else own

    def completion(self, token_ids: np.ndarray, logprobs: np.ndarray, reason: str, ending: Ending) -> Completion:
        """The attempt as a completion, what it had before included.

        Args:
            token_ids: `[n]`, the new tokens.
            logprobs: `[n]`, theirs.
            reason: the engine's word for how it ended.
            ending: finds stop texts that begin before the new tokens, where the engine did not look.
        """
        had = len(self.begun.token_ids)
        ids = np.concatenate([self.begun.token_ids, token_ids]).astype(np.int32)
        scores = np.concatenate([self.begun.logprobs, logprobs]).astype(np.float32)
        known = REASONS.get(reason, "error")
        error = f"the engine ended it as {reason}" if known == "error" else None
        if had and known != "error" and (end := self._spanning_stop(ids, ending)):
            ids, scores, known = ids[:end], scores[:end], "stop"
        return Completion(self.request.request_id, self.index, ids, scores, known, error)

    def _spanning_stop(self, ids: np.ndarray, ending: Ending) -> int | None:
        """Where a stop text ends that began in what the attempt had before."""
        had, longest = len(self.begun.token_ids), max((len(text.encode()) for text in self.request.sampling.stop), default=0)
        ends = range(had + 1, min(len(ids), had + longest) + 1)
        return next((end for end in ends if ending.reason(ids[:end].tolist(), self.request.sampling) == "stop"), None)


def attempts(request: Request) -> list[Asked]:
    """One per seed."""
    return [Asked(request, index) for index in range(len(request.seeds))]


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends a completion of one policy."""

    ending: Ending
    token_ids: tuple[int, ...]

    def stop_token_ids(self, request: Request) -> list[int]:
        """Every id that ends an attempt of this request."""
        return sorted({*self.token_ids, *request.sampling.stop_token_ids})


def ends_of(policy_folder: Path) -> Ends:
    """The end ids of `policy_folder/modules/policy` and its tokenizer's stop texts."""
    from transformers import AutoConfig, GenerationConfig

    model = policy_folder / causal_lm.POLICY_MODULE
    tokenizer = causal_lm.load_tokenizer(model)
    generation = GenerationConfig.from_pretrained(model) if (model / "generation_config.json").is_file() else None
    found = end_ids(tokenizer, AutoConfig.from_pretrained(model), generation)
    return Ends(Ending(tokenizer, found), tuple(sorted(found)))


def trained_length(policy_folder: Path) -> int | None:
    """Most tokens that the model of a policy folder was made for; None where its config does not say."""
    from transformers import AutoConfig

    found = getattr(AutoConfig.from_pretrained(policy_folder / causal_lm.POLICY_MODULE).get_text_config(), "max_position_embeddings", None)
    return None if found is None else int(found)


@contextmanager
def plain_weights(policy_folder: Path, dtype: Literal["bfloat16", "float32"]) -> Iterator[Path]:
    """Within it lies a Hugging Face folder of plain weights: the policy's own, or one with its adapter added, stored in `dtype`."""
    import torch

    model = policy_folder / causal_lm.POLICY_MODULE
    if adapter_folder(model) is None:
        yield model
        return
    with tempfile.TemporaryDirectory(prefix="rlpipe-merged-") as scratch:
        causal_lm.save_module(Path(scratch), causal_lm.load_module(model).to(getattr(torch, dtype)), model)
        yield Path(scratch)


def folder_only(weights: Path | Mapping[str, Any], engine: str) -> Path:
    """The policy folder that was given.

    Raises:
        EngineError: tensors were given.
    """
    if isinstance(weights, Mapping):
        do = "write a policy folder (rlpipe.policies.causal_lm.save) and load that, or use engine.type: torch"
        raise EngineError(f"{engine} reads its weights from a policy folder", got=f"{len(weights)} tensors", accepted="a policy folder", do=do)
    return weights
