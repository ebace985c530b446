"""Matrix weights laid out once as the CPU's matrix kernel wants them, where it would do so at every call. I = inputs, O = outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlpipe.policies.head import factors_in


def available(device: torch.device) -> bool:
    """Whether this build of torch has oneDNN's packed products for the device."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(inputs: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`inputs @ weight.T + bias` of a packed weight of the inputs' dtype."""
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    return found


def _packed(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(device="cpu", dtype=dtype).contiguous())
    return found


class PackedLinear(torch.nn.Module):
    """`x @ weight.T + bias` in one dtype, whatever autocast says; only the packed weight takes memory.

    `weight` keeps name, shape and dtype of what was packed, without content, and `transposed` says that it is stored
    `[I, O]`, as GPT-2's layers do. Results are those of the plain product, bit for bit in bfloat16.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, transposed: bool = False) -> None:
        super().__init__()
        self.dtype, self.transposed = dtype, transposed
        self.weight = torch.nn.Parameter(torch.empty(weight.shape, dtype=dtype, device="meta"), requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        self.pack(weight)

    def pack(self, weight: torch.Tensor) -> None:
        """Take another weight of the same shape."""
        self.packed = _packed(weight.t() if self.transposed else weight, self.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return product(inputs.to(self.dtype), self.packed, self.bias)


class Stacked:
    """Products of the same inputs as one: weights `[O, I]` and biases one below the other, packed once."""

    def __init__(self, layers: Sequence[Any], dtype: torch.dtype) -> None:
        self.dtype = dtype
        biases = [layer.bias for layer in layers]
        self.bias = None if biases[0] is None else torch.cat([bias.detach().to(dtype) for bias in biases])
        self._packed = _packed(torch.cat([layer.weight.detach() for layer in layers]), dtype)

    def put(self, first: int, weight: torch.Tensor) -> None:
        """Put another weight in the rows from `first` on."""
        weights = self._packed.to_dense()
        weights[first : first + len(weight)] = weight
        self._packed = _packed(weights, self.dtype)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[N, O]` of inputs `[N, I]` in this dtype."""
        return product(inputs, self._packed, self.bias)


class StackedLinear(PackedLinear):
    """One of the layers in a `Stacked`, for whoever calls it by itself; its bias is a part of the stack's."""

    def __init__(self, layer: Any, stack: Stacked, first: int) -> None:
        torch.nn.Module.__init__(self)
        self.dtype, self.transposed, self.stack, self.first = stack.dtype, False, stack, first
        self.last = first + len(layer.weight)
        self.weight = torch.nn.Parameter(torch.empty(layer.weight.shape, dtype=stack.dtype, device="meta"), requires_grad=False)
        self.bias = None if stack.bias is None else torch.nn.Parameter(stack.bias[first : self.last], requires_grad=False)

    def pack(self, weight: torch.Tensor) -> None:
        self.stack.put(self.first, weight.detach().to(device="cpu", dtype=self.dtype))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.stack(inputs.to(self.dtype))[..., self.first : self.last]


def stacked(layers: Sequence[Any], dtype: torch.dtype) -> list[StackedLinear]:
    """Linear layers of the same inputs, all with a bias or none, that share one product."""
    stack, found, first = Stacked(layers, dtype), list[StackedLinear](), 0
    for layer in layers:
        found.append(StackedLinear(layer, stack, first))
        first = found[-1].last
    return found


class PackedHead:
    """A head's forward with a packed copy of its weight, which may be tied to the embedding and stays; `dtype` is the engine's."""

    def __init__(self, head: Any, dtype: torch.dtype) -> None:
        self.head, self.dtype = head, dtype
        self.pack()

    def pack(self) -> None:
        """Copy the head's weight again."""
        with factors_in(self.dtype):
            self._packed = _packed(self.head.weight, self.head.weight.dtype)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        with factors_in(self.dtype):
            return product(hidden.to(self.head.weight.dtype), self._packed, self.head.bias)
