"""When a completion ends: end ids, stop texts, length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlpipe.engines.base import FinishReason, Sampling


def end_ids(tokenizer: Any, config: Any, generation_config: Any = None) -> frozenset[int]:
    """Ids that end a completion: those of the generation config, else of the model's config, and the tokenizer's."""
    of_model = config.eos_token_id
    if generation_config is not None and generation_config.eos_token_id is not None:
        of_model = generation_config.eos_token_id
    several = of_model if isinstance(of_model, list | tuple) else [of_model]
    return frozenset(int(i) for i in (*several, tokenizer.eos_token_id) if i is not None)


class Ending:
    """Decides after each token whether a completion has ended."""

    def __init__(self, tokenizer: Any, end_ids: frozenset[int]) -> None:
        self.tokenizer, self.end_ids = tokenizer, end_ids

    def reason(self, token_ids: Sequence[int], sampling: Sampling) -> FinishReason | None:
        """Why the completion ends with its last token, or None while it goes on."""
        last = token_ids[-1]
        if last in self.end_ids or last in sampling.stop_token_ids or self._completes_stop(token_ids, sampling.stop):
            return "stop"
        return "length" if len(token_ids) >= sampling.max_new_tokens else None

    def _completes_stop(self, token_ids: Sequence[int], stop: Sequence[str]) -> bool:
        if not stop:
            return False
        # A token is at least one byte, so a stop text lies in its last bytes' worth of tokens; three more hold a cut character or an empty token.
        longest = max(len(text.encode()) for text in stop)
        window = longest + 3
        while True:
            text = self.tokenizer.decode(list(token_ids[-window:]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if window >= len(token_ids) or len(text) >= longest:
                return any(end in text for end in stop)
            window *= 2
