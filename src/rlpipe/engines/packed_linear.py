"""Matrix weights laid out once as the CPU's matrix kernel wants them, where it would do so at every call. I = inputs, O = outputs."""

from __future__ import annotations

from typing import Any

import torch


def available(device: torch.device) -> bool:
    """Whether this build of torch has oneDNN's packed products for the device."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


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
        laid = weight.detach().to(device="cpu", dtype=self.dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight((laid.t() if self.transposed else laid).contiguous())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs.to(self.dtype), self._packed, self.bias, "none", [], "")
        return found


class PackedHead:
    """A head's forward with a packed copy of its weight, which may be tied to the embedding and stays."""

    def __init__(self, head: Any) -> None:
        self.head = head
        self.pack()

    def pack(self) -> None:
        """Copy the head's weight again."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.head.weight.detach().contiguous())

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden.to(self.head.weight.dtype), self._packed, self.head.bias, "none", [], "")
        return found
