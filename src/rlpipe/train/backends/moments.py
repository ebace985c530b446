"""Adam's moments in float32, bfloat16 or int8. n = numbers of a parameter.

Bytes of both moments for each trained weight: float32 8, bfloat16 4, int8 2 + 8 / 256. Parameters of fewer than
`SMALL` numbers (norms, biases) keep float32 in any case: they weigh nothing and matter most.

Rounding is stochastic. A second moment moves by a thousandth of itself a step (beta2 0.999), a quarter of the distance
between neighbours in bfloat16 and less in int8: rounded to the nearest it would never move again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Width = Literal["float32", "bfloat16", "int8"]
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = "_scales"
"""Ends the first part of the names of int8 moments' scales: `exp_avg_scales/<parameter>`."""
BLOCK = 256
"""Numbers that share a scale, as in bitsandbytes; the paper has 2048."""
SMALL = 4096
DECADES = 7
GRID = 12
"""Trailing bits of a float32 that the grid on which codes are looked up leaves out."""
LOWEST = (127 - 24) << (23 - GRID)
"""First place on that grid: 2**-24; what is smaller is there too, as 0."""
PLACES = (24 << (23 - GRID)) + 1
NEAREST = 1 << (GRID - 1)
"""Noise that rounds to the nearest code."""


@dataclass(slots=True)
class Moment:
    """One moment of one parameter.

    Attributes:
        values: `[n]` float32 or bfloat16, or codes as uint8.
        scales: `[ceil(n / BLOCK)]` float32, the largest magnitude of each block; with codes only.
        signed: whether codes stand for numbers of both signs.
    """

    values: torch.Tensor
    scales: torch.Tensor | None
    signed: bool

    def read(self, start: int, end: int) -> torch.Tensor:
        """Numbers `start` to `end` in float32, a copy; `start` is a multiple of `BLOCK`."""
        import torch

        part = self.values[start:end]
        if self.scales is None:
            return part.to(torch.float32, copy=True)
        scales = self.scales[start // BLOCK : -(-end // BLOCK)].repeat_interleave(BLOCK)[: end - start]
        return codebook(self.signed).to(part.device).index_select(0, part.int()) * scales

    def write(self, start: int, numbers: torch.Tensor, noise: torch.Tensor) -> None:
        """Replace the numbers from `start` on, a multiple of `BLOCK`, rounded by `noise`: `[n]` int32, all bits random."""
        import torch

        part = self.values[start : start + len(numbers)]
        if self.scales is not None:
            scales = _scales(numbers)
            self.scales[start // BLOCK :][: len(scales)] = scales
            part.copy_(_codes(numbers, scales, noise, self.signed))
        elif part.dtype == torch.bfloat16:
            part.copy_(((numbers.view(torch.int32) + (noise & 0xFFFF)) >> 16).to(torch.int16).view(torch.bfloat16))
        else:
            part.copy_(numbers)


def zeros(like: torch.Tensor, width: Width, moment: str) -> Moment:
    """The moment of a parameter that has seen no step."""
    import torch

    num = like.numel()
    kind = torch.float32 if num < SMALL else {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}[width]
    signed = moment == MOMENTS[0]
    zero = int(codebook(signed).eq(0).nonzero()) if kind == torch.uint8 else 0
    scales = torch.zeros(-(-num // BLOCK), device=like.device) if kind == torch.uint8 else None
    return Moment(torch.full((num,), zero, dtype=kind, device=like.device), scales, signed)


def stored(moment: Moment, name: str, parameter: str, shape: torch.Size) -> Iterator[tuple[str, torch.Tensor]]:
    """A moment as tensors with names, in the width it has."""
    yield f"{name}/{parameter}", moment.values.view(shape)
    if moment.scales is not None:
        yield f"{name}{SCALES}/{parameter}", moment.scales


def restored(tensors: Mapping[str, torch.Tensor], name: str, like: torch.Tensor, parameter: str) -> Moment:
    """The moment that `stored` gave these names, a copy on the device of `like`."""
    values, scales = tensors[f"{name}/{parameter}"], tensors.get(f"{name}{SCALES}/{parameter}")
    return Moment(values.to(like.device, copy=True).flatten(), None if scales is None else scales.to(like.device, copy=True), name == MOMENTS[0])


def in_width(tensors: Mapping[str, torch.Tensor], width: Width) -> dict[str, torch.Tensor]:
    """Stored moments in another width, rounded to the nearest; those that have it already as they are."""
    import torch

    found: dict[str, torch.Tensor] = {}
    for key, values in tensors.items():
        name, _, parameter = key.partition("/")
        if name not in MOMENTS:
            continue
        target = zeros(values, width, name)
        if values.dtype == target.values.dtype:
            found |= {each: tensors[each] for each in (key, f"{name}{SCALES}/{parameter}") if each in tensors}
            continue
        numbers = restored(tensors, name, values, parameter).read(0, values.numel())
        if target.scales is None:
            target.values.copy_(numbers)
        else:
            target.write(0, numbers, torch.full_like(numbers, NEAREST, dtype=torch.int32))
        found |= stored(target, name, parameter, values.shape)
    return found


@cache
def codebook(signed: bool) -> torch.Tensor:
    """`[256]` ascending: the dynamic tree of Dettmers et al. 2022, https://arxiv.org/abs/2110.02861, section 1.3.

    Each decade below 1 has twice as many numbers as the one under it, evenly spread; and there are 0 and 1. All are
    rounded to the grid of `_steps`, so that a number that is a code stays one.
    """
    import torch

    numbers = [0.0, 1.0]
    for i in range(DECADES):
        count = 2 ** (i if signed else i + 1)
        decade = [(0.1 + 0.9 * (j + 0.5) / count) * 10.0 ** (i + 1 - DECADES) for j in range(count)]
        numbers += decade + [-number for number in decade if signed]
    bits = torch.tensor(sorted(numbers)).view(torch.int32)
    return ((bits + (1 << (GRID - 1))) >> GRID << GRID).view(torch.float32)


@cache
def _steps(signed: bool) -> torch.Tensor:
    """By place on a grid of float32's leading bits: the code below in the upper half, 2**16 times the way to the next in the lower.

    `[2 * PLACES]` for signed numbers, those above 0 first, and `[PLACES]` for others.
    """
    import torch

    grid = (torch.arange(LOWEST, LOWEST + PLACES, dtype=torch.int32) << GRID).view(torch.float32)
    grid[0] = 0.0
    grid, table = torch.cat([grid, -grid]) if signed else grid, codebook(signed)
    below = (torch.searchsorted(table, grid, right=True) - 1).clamp_(0, 254)
    way = ((grid - table[below]) / (table[below + 1] - table[below])).clamp_(0, 1)
    whole = way == 1  # 2**16 does not fit into half a word
    return (below + whole << 16 | (way * (1 << 16)).int() * ~whole).int()


def _scales(numbers: torch.Tensor) -> torch.Tensor:
    """`[ceil(n / BLOCK)]`: the largest magnitude of each block of `[n]`."""
    import torch

    return torch.nn.functional.pad(numbers, (0, -len(numbers) % BLOCK)).view(-1, BLOCK).abs().amax(dim=1)


def _codes(numbers: torch.Tensor, scales: torch.Tensor, noise: torch.Tensor, signed: bool) -> torch.Tensor:
    """`[n]` codes, each one of the two around its number. A second moment above 0 never becomes 0, which would divide by `eps` alone."""
    import torch

    wide = scales.clamp_min(torch.finfo(torch.float32).tiny).repeat_interleave(BLOCK)[: len(numbers)]
    bits = (numbers / wide).view(torch.int32)
    place = ((((bits & 0x7FFFFFFF) + (noise & (1 << GRID) - 1)) >> GRID) - LOWEST).clamp_(min=0)
    if signed:
        place += (bits < 0).int() * PLACES
    step = _steps(signed).to(numbers.device).index_select(0, place)
    codes = (step >> 16) + ((noise >> 16) + (1 << 15) < (step & 0xFFFF)).int()
    return codes if signed else torch.maximum(codes, (numbers > 0).int())


def num_bytes(num: int, width: Width) -> float:
    """Bytes that both moments of a parameter of `num` numbers take."""
    if num < SMALL or width == "float32":
        return 8 * num
    return 4 * num if width == "bfloat16" else 2 * num + 2 * 4 * math.ceil(num / BLOCK)
