"""A causal language model that attends over a tree of token runs. N = tokens of a pass, H = hidden width, V = vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlpipe.engines import cached_attention
from rlpipe.engines.cached_attention import Pass, Unfit
from rlpipe.engines.kv_store import Store
from rlpipe.engines.llama_forward import LlamaForward
from rlpipe.engines.runs import Decoding, Piece, Run, fresh_runs, prefill

TOKENS_PER_PASS = 2048
"""Most tokens of one forward: bounds what a prefill of long prompts takes."""
LOGIT_ROWS = 256
"""Most rows of logits at once: each takes vocabulary x 4 bytes, and as much again to draw from."""
PROBE = np.array([3, 1, 4, 1, 5, 9, 2, 6])


class TreeModel:
    """The decoder of a `transformers` model and its head, numbers as the trainer computes them.

    Raises:
        Unfit: the family attends in another way, or changes its logits after the head.
    """

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.module, self.dtype, self.device = module, dtype, module.device
        self.direct = LlamaForward(module, dtype) if LlamaForward.fits(module) else None
        try:
            self._check()
        except Unfit:
            self._use("sdpa")
            raise

    @torch.inference_mode()
    def hidden(self, tokens: Pass) -> torch.Tensor:
        """`[N, H]` last hidden states; keys and values of the tokens are stored on the way."""
        if self.direct is not None:
            return self.direct(tokens)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            found = self.module.get_decoder()(
                input_ids=tokens.ids[None], position_ids=tokens.positions[None], use_cache=False, tree=tokens, tree_dtype=self.dtype
            )
        return found.last_hidden_state[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, V]` float32 of hidden states `[R, H]`."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            return self.module.get_output_embeddings()(hidden.contiguous()).float()

    def score(self, rows: Sequence[np.ndarray], temperature: float) -> list[np.ndarray]:
        """`[T]` float32 log-probs per row by one forward of all of them, unpadded; NaN at 0."""
        hidden = self.hidden(self._alone(rows))
        found, end = [], 0
        for ids in rows:
            start, end = end, end + len(ids)
            targets = torch.from_numpy(ids[1:].astype(np.int64)).to(self.device)
            scored = [
                self._logprobs(hidden[start + i : min(start + i + LOGIT_ROWS, end - 1)], targets[i : i + LOGIT_ROWS], temperature)
                for i in range(0, len(targets), LOGIT_ROWS)
            ]
            found.append(np.concatenate([np.full(min(len(ids), 1), np.nan, dtype=np.float32), *scored]))
        return found

    @torch.inference_mode()
    def _logprobs(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float) -> np.ndarray:
        logprobs = torch.log_softmax(self.logits(hidden) / temperature, dim=-1)
        found: np.ndarray = logprobs.gather(1, targets[:, None])[:, 0].cpu().numpy()
        return found

    def _alone(self, rows: Sequence[np.ndarray]) -> Pass:
        """A pass of whole sequences of which nothing is kept."""
        ids = torch.from_numpy(np.concatenate(rows).astype(np.int64)).to(self.device)
        positions = torch.from_numpy(np.concatenate([np.arange(len(row)) for row in rows])).to(self.device)
        fresh = fresh_runs([len(row) for row in rows if len(row)], self.device)
        return Pass(ids, positions, (), fresh=fresh, longest=max(len(row) for row in rows))

    def _use(self, attention: str) -> None:
        self.module.config._attn_implementation = attention

    def _check(self) -> None:
        """Compare a prompt, a longer run and a decoded token with the model's own forward of the same tokens."""
        config = self.module.config.to_dict()
        kinds = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
        if kinds or not getattr(self.module, "_supports_attention_backend", False) or config.get("is_encoder_decoder"):
            raise Unfit(f"layers of kinds {sorted(kinds)}" if kinds else "no attention of one's own")
        ids = PROBE % self.module.config.vocab_size
        self._use("sdpa")
        with torch.inference_mode(), torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            expected = self.module(torch.from_numpy(ids).to(self.device)[None], use_cache=False).logits[0].float().softmax(-1)
        self._use(cached_attention.NAME)
        if self.direct is not None and self._gap(ids, expected) <= self._tolerance:
            return
        self.direct = None
        gap = self._gap(ids, expected)
        if not gap <= self._tolerance:
            raise Unfit(f"probabilities off by {gap:.3g}")

    @property
    def _tolerance(self) -> float:
        # In bfloat16 the log-probs of unlikely tokens differ by more than 1 between any two ways to compute them, probabilities by a few hundredths.
        return 1e-4 if self.dtype == torch.float32 else 0.3

    def _gap(self, ids: np.ndarray, expected: torch.Tensor) -> float:
        """The largest total variation distance between what a token may be followed by here and as expected, `[8, V]`."""
        return float((expected - self.logits(self._probed(ids)).softmax(-1)).abs().sum(-1).max()) / 2

    def _probed(self, ids: np.ndarray) -> torch.Tensor:
        prompt = Run(Store(4), 0)
        prompt.store.add(prompt, 4)
        more = Run(Store(4), 4, prompt)
        more.store.add(more, 3)
        first = self.hidden(prefill([Piece(prompt, 0, ids[:4]), Piece(more, 0, ids[4:7])], self.device))
        more.store.lengths[0] += 1
        return torch.cat([first, self.hidden(Decoding(self.device).step([more], [int(ids[7])]))])
