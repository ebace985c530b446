"""The output head: exact logits, and log-probs of chosen tokens without ever holding all logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_BYTES = 128 << 20
"""Logits held at a time, in float32."""
KEPT_BYTES = 512 << 20
"""Probabilities kept in bfloat16 for the backward; what goes beyond is computed again."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What to read from the logits of N positions. U = distinct pairs of a position and a token, in order of positions.

    Attributes:
        rows: `[U]` int64 into N, rising.
        token_ids: `[U]` int64.
        temperatures: `[N, 1]`, what logits are divided by; None where all are 1.
        entropy: whether it is wanted.
        narrow: what the backward's products run in; None: the weight's own precision.
    """

    rows: torch.Tensor
    token_ids: torch.Tensor
    temperatures: torch.Tensor | None
    entropy: bool
    narrow: torch.dtype | None


def keep_exact(module: PreTrainedModel) -> None:
    """Add up logits in the head's own dtype under autocast too, and let the head be read with `Reading`.

    Logits near 20 are 0.125 apart in bfloat16: rounded there, sampling and training log-probs differ by up to 0.25
    although the hidden states agree (the finding of MiniMax-M1, https://arxiv.org/abs/2506.13585, section 3.2).
    A reading goes through the head's forward because ZeRO 3 has its weight whole only there.
    """
    head = module.get_output_embeddings()
    forward = head.forward

    def exact(hidden: torch.Tensor, reading: Reading | None = None) -> Any:
        kind = hidden.device.type
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with torch.autocast(kind, enabled=False), factors_in(narrow):
            hidden = hidden.to(head.weight.dtype)
            if reading is None:
                return forward(hidden)
            return _Read.apply(hidden, head.weight, getattr(head, "bias", None), reading)

    head.forward = exact


@contextmanager
def factors_in(narrow: torch.dtype | None) -> Iterator[None]:
    """Let a CPU's float32 products round their factors to bfloat16, where it has an instruction for them; sums and
    results stay float32. Engine and trainer alike: a third of the time, and the same numbers on both sides."""
    products = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009 (the stubs do not know it)
    before = products.fp32_precision
    products.fp32_precision = "bf16" if narrow == torch.bfloat16 else before
    try:
        yield
    finally:
        products.fp32_precision = before


class _Read(torch.autograd.Function):
    """`hidden [N, H]`, `weight [V, H]` -> log-probs `[U]` and entropy `[N]` in nats (empty unless wanted, without gradient).

    With p = softmax(logits / T) of a position, g the gradient of its log-probs and G their sum, the gradient of logits
    is (g at the tokens - G p) / T. The tokens' own entries are taken out of p and worked in apart, exactly: in bfloat16
    the 1 - p of a token that is nearly certain would be lost. Under autocast the factors of products are bfloat16, like
    those of every other layer, and the forward's sums float32.

    Gradients of hidden states and weight are off by 0.1 % under autocast (relative norm, SmolLM2-135M, against float64).

    Memory: logits and probabilities of one chunk, 2 x `CHUNK_BYTES` in float32 and half of it again in bfloat16, at any
    number of positions and any vocabulary; under autocast N x V x 2 bytes until the backward, at most `KEPT_BYTES`; the
    weight's gradient and, under autocast, the weight in bfloat16. Never a float32 tensor `[N, V]`.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, reading: Reading) -> tuple[torch.Tensor, torch.Tensor]:
        num, size = hidden.shape[0], weight.shape[0]
        kept = hidden.new_empty(_num_kept(num, size, reading) if any(ctx.needs_input_grad) else 0, size, dtype=reading.narrow)
        normalizer, entropy = hidden.new_empty(num, 1), hidden.new_empty(num if reading.entropy else 0)
        picked = hidden.new_empty(len(reading.rows))
        # two buffers for all chunks: memory the system hands out anew at every use costs more time than the work on it
        buffers = hidden.new_empty(2, min(_chunk(size), num), size)
        for rows, pairs in _chunks(num, size, reading):
            logits, logprobs = buffers[:, : rows.stop - rows.start]
            _logits(hidden[rows], weight, bias, reading, rows, out=logits)
            torch.log_softmax(logits, -1, out=logprobs)
            normalizer[rows] = logits[:, :1] - logprobs[:, :1]
            own = _flat(reading, rows, pairs, size)
            picked[pairs] = logprobs.flatten().index_select(0, own)
            if reading.entropy or rows.stop <= len(kept):
                probabilities = torch.exp(logprobs, out=logits)
                if reading.entropy:
                    entropy[rows] = -logprobs.mul_(probabilities).sum(-1)  # in place: a new product would cost more than the sum
                if rows.stop <= len(kept):
                    kept[rows] = probabilities
                    kept[rows].flatten().index_fill_(0, own, 0)
        ctx.reading = reading
        ctx.save_for_backward(hidden, weight, bias, normalizer, picked, kept)
        ctx.mark_non_differentiable(entropy)
        return picked, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        reading, (hidden, weight, bias, normalizer, picked, kept) = ctx.reading, ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            own, total = _shares(gradients[0], picked, normalizer, reading)
            sums = _of_pairs(ctx.needs_input_grad, own, hidden, weight, bias, reading)
            narrow = reading.narrow or weight.dtype
            narrow_weight, scaled = weight.to(narrow), (hidden * total).to(narrow)
            for rows, pairs in [(slice(0, len(kept)), None), *_chunks(len(hidden), len(weight), reading, len(kept))]:
                others = kept if pairs is None else _others(hidden, weight, bias, normalizer, reading, rows, pairs)
                if sums[0] is not None:
                    sums[0][rows] -= torch.mm(others, narrow_weight) * total[rows]
                if sums[1] is not None:
                    sums[1] -= torch.mm(others.t(), scaled[rows])
                if sums[2] is not None:
                    sums[2] -= torch.mv(others.t().to(total.dtype), total[rows, 0])
        return (*sums, None)


def _shares(gradient: torch.Tensor, picked: torch.Tensor, normalizer: torch.Tensor, reading: Reading) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of each pair's logit `[U, 1]`, and what all other logits of a position get times -p `[N, 1]`."""
    total = torch.zeros_like(normalizer).index_add_(0, reading.rows, gradient[:, None])
    own = gradient[:, None] - total.index_select(0, reading.rows) * picked.exp()[:, None]
    if reading.temperatures is None:
        return own, total
    return own / reading.temperatures.index_select(0, reading.rows), total / reading.temperatures


def _of_pairs(
    wanted: tuple[bool, ...], own: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, reading: Reading
) -> list[torch.Tensor | None]:
    """The pairs' part of the gradients of hidden states, weight and bias, where they are wanted."""
    sums = [torch.zeros_like(each) if want and each is not None else None for each, want in zip((hidden, weight, bias), wanted, strict=False)]
    if sums[0] is not None:
        sums[0].index_add_(0, reading.rows, weight.index_select(0, reading.token_ids) * own)
    if sums[1] is not None:
        sums[1].index_add_(0, reading.token_ids, hidden.index_select(0, reading.rows) * own)
    if sums[2] is not None:
        sums[2].index_add_(0, reading.token_ids, own[:, 0])
    return sums


def _others(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, normalizer: torch.Tensor, reading: Reading, rows: slice, pairs: slice
) -> torch.Tensor:
    """A chunk's probabilities computed again, 0 at the pairs, in the precision of products."""
    with factors_in(reading.narrow):
        logits = _logits(hidden[rows], weight, bias, reading, rows)
    probabilities = logits.sub_(normalizer[rows]).exp_()
    probabilities.flatten().index_fill_(0, _flat(reading, rows, pairs, len(weight)), 0)
    return probabilities.to(reading.narrow or hidden.dtype)


def _num_kept(num: int, size: int, reading: Reading) -> int:
    """Leading positions, in whole chunks, whose probabilities are kept."""
    if reading.narrow is None:
        return 0
    fitting, step = KEPT_BYTES // (reading.narrow.itemsize * size), _chunk(size)
    return num if num <= fitting else fitting // step * step


def _chunk(size: int) -> int:
    return max(1, CHUNK_BYTES // (4 * size))


def _chunks(num: int, size: int, reading: Reading, first: int = 0) -> Iterator[tuple[slice, slice]]:
    """Positions from the `first` on whose logits fit `CHUNK_BYTES`, with their pairs."""
    starts = list(range(first, num, _chunk(size)))
    pairs = [*torch.searchsorted(reading.rows, torch.tensor(starts, device=reading.rows.device)).tolist(), len(reading.rows)]
    for number, start in enumerate(starts):
        yield slice(start, min(start + _chunk(size), num)), slice(pairs[number], pairs[number + 1])


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, reading: Reading, rows: slice, out: torch.Tensor | None = None
) -> torch.Tensor:
    logits = torch.mm(hidden, weight.t(), out=out)
    if bias is not None:
        logits.add_(bias)
    return logits if reading.temperatures is None else logits.div_(reading.temperatures[rows])


def _flat(reading: Reading, rows: slice, pairs: slice, size: int) -> torch.Tensor:
    """Where a chunk's pairs are in its flattened logits."""
    return (reading.rows[pairs] - rows.start) * size + reading.token_ids[pairs]
