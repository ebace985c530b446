"""Weights that were not written whole are refused before the step says it succeeded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlpipe.errors import ArtifactError
from rlpipe.train.whole import check_whole

WHOLE = {"norm": torch.ones(3), "head": torch.zeros(2, 3, dtype=torch.bfloat16)}


def written(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": torch.empty(0)}, r"not written whole; got norm of shape \[0\] where \[3\] was loaded"),
        ({"head": torch.zeros(3, dtype=torch.bfloat16)}, r"got head of shape \[3\] where \[2, 3\] was loaded"),
        ({"extra": torch.empty(0)}, r"got extra of shape \[0\]"),
        ({"norm": torch.tensor([1.0, float("nan"), 1.0])}, "got norm is not finite"),
    ],
)
def test_f01_a_placeholder_in_the_written_weights_is_refused(tmp_path: Path, changes: dict[str, torch.Tensor], message: str) -> None:
    """Case F01: the weights of a rank's part, or none."""
    before = written(tmp_path / "before", WHOLE)
    check_whole(written(tmp_path / "good", {**WHOLE, "extra": torch.ones(1)}), before)
    with pytest.raises(ArtifactError, match=message):
        check_whole(written(tmp_path / "bad", {**WHOLE, **changes}), before)


def test_f01_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """Case F01."""
    before = written(tmp_path / "before", WHOLE)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"got no tensor in .*empty"):
        check_whole(tmp_path / "empty", before)
