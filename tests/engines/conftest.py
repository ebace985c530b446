"""Policies with random weights that several files decode with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.factories import tiny_model

FAMILIES = ("llama", "qwen2", "gpt2", "mistral")


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One a family, and `other`: a Llama with other weights."""
    root = tmp_path_factory.mktemp("policies")
    for family in FAMILIES:
        tiny_model(root / family / "modules" / "policy", family)
    tiny_model(root / "other" / "modules" / "policy", seed=1)
    return {path.name: path for path in root.iterdir()}
