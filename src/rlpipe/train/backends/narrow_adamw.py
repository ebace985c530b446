"""AdamW (Loshchilov and Hutter 2017, https://arxiv.org/abs/1711.05101) whose moments are held in few bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from rlpipe import seeds
from rlpipe.train.backends.moments import MOMENTS, Moment, Width, zeros

CHUNK = 1 << 16
"""Numbers of a parameter that are stepped at once: only so many stand in float32, a megabyte or two in all. A multiple of the moments' block."""


class NarrowAdamW(torch.optim.Optimizer):
    """Steps as `torch.optim.AdamW` does, in float32 on a chunk of a parameter at a time.

    Args:
        groups: parameter groups with `weight_decay`, which are contiguous and float32.
        betas: decay of both moments.
        eps: added to the root of the second.
        width: what moments are held in.
        seed: the noise of rounding depends on it, the number of steps taken and the parameter's place, and on nothing else,
            so that every rank rounds alike, and a state that was saved goes on as if never put aside.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], betas: tuple[float, float], eps: float, width: Width, seed: int) -> None:
        super().__init__(list(groups), {"lr": 0.0, "betas": betas, "eps": eps})
        self.width, self.seed = width, seed

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient; `closure` is not called."""
        place = 0
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    self._step(value, group, place)
                place += 1

    def _step(self, value: torch.Tensor, group: dict[str, Any], place: int) -> None:
        state = self.state[value]
        if not state:
            state.update({"step": 0, **{moment: zeros(value, self.width, moment) for moment in MOMENTS}})
        state["step"] += 1
        generator = torch.Generator(value.device).manual_seed(seeds.seed(self.seed, "moments", state["step"], place))
        weights, gradient = value.view(-1), value.grad.reshape(-1)  # type: ignore[union-attr]
        for start in range(0, len(weights), CHUNK):
            part = slice(start, start + CHUNK)
            _move(weights[part], gradient[part], start, state, group, generator)


def _move(weights: torch.Tensor, gradient: torch.Tensor, start: int, state: dict[str, Any], group: dict[str, Any], generator: torch.Generator) -> None:
    """Step one chunk that begins at number `start` of its parameter."""
    (beta1, beta2), rate = group["betas"], group["lr"]
    moments: tuple[Moment, Moment] = (state[MOMENTS[0]], state[MOMENTS[1]])
    first, second = (moment.read(start, start + len(weights)) for moment in moments)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (second / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
    weights.mul_(1 - rate * group["weight_decay"]).addcdiv_(first, root, value=-rate / (1 - beta1 ** state["step"]))
    for moment, numbers, noise in zip(moments, (first, second), _noise(len(weights), weights.device, generator), strict=True):
        moment.write(start, numbers, noise)


def _noise(num: int, device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Twice `[num]` int32 of 32 random bits each, two out of every draw."""
    drawn = torch.empty(num, dtype=torch.int64, device=device).random_(-(2**63), None, generator=generator).view(torch.int32)
    return drawn[:num], drawn[num:]
