"""Keys and values of what has been computed, in place. K = key heads, D = head width."""

from __future__ import annotations

from typing import Protocol

import torch


class Owner(Protocol):
    """Whose tokens a slot holds; told when the slot moves."""

    slot: int


class Store:
    """Runs of tokens, one slot each: per layer two tensors `[slots, K, capacity, D]`, filled from slot 0 without gaps.

    A run is written where it stays. One that ends gives its slot to the last run, so one run is copied and no other moves.
    Memory is taken at the first write; pages of tokens that never come are not touched on a CPU.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lengths: list[int] = []
        self._owners: list[Owner] = []
        self._num_slots = 0
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, owner: Owner, length: int = 0) -> None:
        """Give the owner a slot for a run of `length` tokens, which the next passes write."""
        owner.slot = len(self.lengths)
        self.lengths.append(length)
        self._owners.append(owner)
        if len(self.lengths) > self._num_slots:
            self._num_slots = max(len(self.lengths), 2 * self._num_slots)

    def remove(self, owner: Owner) -> None:
        """Take the owner's slot away; the last run moves into it."""
        last, slot = len(self.lengths) - 1, owner.slot
        length, mover = self.lengths.pop(), self._owners.pop()
        if slot == last:
            return
        for keys, values in self._layers.values():
            keys[slot, :, :length].copy_(keys[last, :, :length])
            values[slot, :, :length].copy_(values[last, :, :length])
        self.lengths[slot], self._owners[slot], mover.slot = length, mover, slot

    def write(self, layer: int, slot: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put `[K, n, D]` keys and values at `start` of one run."""
        into_keys, into_values = self._of(layer, keys, values)
        into_keys[slot, :, start : start + keys.shape[1]] = keys
        into_values[slot, :, start : start + keys.shape[1]] = values

    def append(self, layer: int, at: int | torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put one token into each of the first B runs, `[K, B, D]` keys and values, at one place for all or at `[B]` places."""
        into_keys, into_values = self._of(layer, keys, values)
        runs: slice | torch.Tensor = slice(keys.shape[1]) if isinstance(at, int) else torch.arange(keys.shape[1], device=keys.device)
        into_keys[runs, :, at] = keys.transpose(0, 1)
        into_values[runs, :, at] = values.transpose(0, 1)

    def read(self, layer: int, first: int, last: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views `[last - first, K, length, D]` of the runs from `first` to before `last`."""
        keys, values = self._layers[layer]
        return keys[first:last, :, :length], values[first:last, :, :length]

    def _of(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's tensors with room for all slots; keys and values `[K, n, D]` say how wide."""
        found = self._layers.get(layer)
        if found is None or len(found[0]) < self._num_slots:
            grown = tuple(torch.zeros(self._num_slots, new.shape[0], self.capacity, new.shape[2], dtype=new.dtype, device=new.device) for new in (keys, values))
            for old, new in zip(found or (), grown, strict=False):
                new[: len(old)] = old
            self._layers[layer] = found = (grown[0], grown[1])
        return found
