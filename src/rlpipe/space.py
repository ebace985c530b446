"""How much disk a run wants, and whether it is there."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpipe.params import Model, validated
from rlpipe.probing import Answer

GIGABYTE = 10**9
POLICIES_AT_ONCE = 3
"""The round's policy, the one before it, and the copy that is written or recorded."""
TEMPORARY_BYTES = GIGABYTE // 4
SMOLLM2_PARAMETERS = 134_515_008


def wanted(model: Model, *, keeps_moments: bool) -> tuple[int, str]:
    """Bytes that a run wants in its working folder, and what for: three policies and 1 GB; only 1 GB where the model's size cannot be told.

    A policy is counted with float32 weights, and with Adam's two moments where they are kept.
    """
    count = _num_parameters(model.path, model.char_lm)
    if count is None:
        return GIGABYTE, "the model's size cannot be told"
    return POLICIES_AT_ONCE * 4 * count * (3 if keeps_moments else 1) + GIGABYTE, "three policies and 1 GB"


def free(folder: Path, num_bytes: int, what: str) -> Answer:
    """Whether the file system of a folder, which need not exist yet, can be written and has so many bytes free."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not os.access(place, os.W_OK):
        return Answer(False, f"{place} cannot be written", "give it to the user that this runs as, or choose another folder")
    left = shutil.disk_usage(place).free
    said = f"{left / GIGABYTE:.1f} GB free in {place}, {num_bytes / GIGABYTE:.1f} GB wanted: {what}"
    return Answer(left >= num_bytes, said, None if left >= num_bytes else "free space, or choose a larger volume")


def _num_parameters(path: str, char_lm: Mapping[str, Any]) -> int | None:
    """Weights of the start model; None where it is not here to be counted."""
    from rlpipe.policies import fetch, smollm2
    from rlpipe.testbeds.char_lm import CharLM

    if path == fetch.CHAR_LM:
        return validated(CharLM, char_lm, "model.char_lm").num_parameters
    return SMOLLM2_PARAMETERS if path == smollm2.NAME else _counted(Path(path).expanduser())


def _counted(folder: Path) -> int | None:
    from safetensors import SafetensorError, safe_open

    total = 0
    try:
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="np") as weights:
                total += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118 (safe_open is no mapping)
    except (OSError, SafetensorError):
        return None
    return total or None
