"""Whether the weights that a training wrote are whole, looked at before anybody is told that it succeeded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.errors import ArtifactError

if TYPE_CHECKING:
    import torch


def check_whole(folder: Path, before: Path) -> None:
    """Refuse weights of which only a rank's part or a placeholder was written, or that are not finite.

    Args:
        folder: Hugging Face folder that was just written.
        before: the one that training began with; a tensor of the same name has the same shape.

    Raises:
        ArtifactError: names the first tensor that is not as it should be.
    """
    shapes = {name: tuple(part.get_shape()) for name, part in _parts(before)}
    names = []
    for name, part in _parts(folder):
        names.append(name)
        if fault := _fault(part[:], shapes.get(name)):
            raise ArtifactError("the trained weights were not written whole", got=f"{name} {fault}", do="run the step again, or set backend.type: torch")
    if not names:
        raise ArtifactError("the trained weights were not written whole", got=f"no tensor in {folder}", do="run the step again")


def _fault(tensor: torch.Tensor, wanted: tuple[int, ...] | None) -> str | None:
    import torch

    if tensor.numel() == 0 or (wanted is not None and tensor.shape != wanted):
        return f"of shape {list(tensor.shape)}" + (f" where {list(wanted)} was loaded" if wanted is not None else "")
    return None if torch.isfinite(tensor).all() else "is not finite"


def _parts(folder: Path) -> Iterator[tuple[str, Any]]:
    """Name and slice of each tensor in a folder's safetensors files."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, file.get_slice(name)
