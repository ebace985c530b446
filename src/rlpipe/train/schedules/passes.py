"""The order in which groups are trained, and where optimizer steps begin."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from rlpipe.seeds import seed


def optimizer_steps(keys: Sequence[Hashable], groups_per_step: int, epochs: int, drop_last: bool, seed_parts: tuple[int | str, ...]) -> Iterator[list[int]]:
    """Positions of the groups of each optimizer step.

    Every pass over the groups has its own order, which depends on the keys and the seed and not on the order given. The last
    step of a pass may be smaller; with `drop_last` it is left out.
    """
    by_key = sorted(range(len(keys)), key=lambda i: repr(keys[i]))
    for epoch in range(epochs):
        order = np.random.default_rng(seed("train", *seed_parts, epoch)).permutation(len(keys))
        for start in range(0, len(keys), groups_per_step):
            chosen = order[start : start + groups_per_step]
            if len(chosen) == groups_per_step or not drop_last:
                yield [by_key[i] for i in sorted(chosen)]


def num_dropped(num_groups: int, groups_per_step: int, drop_last: bool) -> int:
    """Groups that each pass leaves out."""
    return num_groups % groups_per_step if drop_last else 0
