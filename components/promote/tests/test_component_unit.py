"""Component `promote` through its own function, on real artifacts."""

from pathlib import Path
from typing import Any

import pytest

from ...conftest import Made, Store, call, copied, fingerprints
from ..component import promote


def test_the_alias_names_the_promoted_policy(measured: dict[str, Any], trained: dict[str, Any], common: dict[str, Any], tmp_path: Path, store: Store) -> None:
    """Case B13 too: promoted twice, it is still one version."""
    counts = store.counts()
    for folder in (tmp_path / "first", tmp_path / "second"):
        version, made = call(promote, folder, evaluation=measured["evaluation"], **common)
        champion = store.client().get_model_version_by_alias("rlpipe-policy", "champion")
        assert str(champion.version) == version
        assert champion.tags["sha256"] == fingerprints(trained)["policy"]
        assert f"registered version: {version}" in Path(made["summary"].path).read_text()
    assert store.counts() == counts


def test_without_tracking_there_is_no_version(measured: dict[str, Any], common: dict[str, Any], tmp_path: Path) -> None:
    version, made = call(promote, tmp_path, evaluation=measured["evaluation"], **{**common, "tracking": {"enabled": False}})
    assert version == ""
    assert "registered version: none" in Path(made["summary"].path).read_text()


def test_a_missing_evaluation_is_refused(begun: Made, common: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B01."""
    damaged = copied(begun["evaluation"], tmp_path)
    (Path(damaged.path) / "evaluation.json").unlink()
    with pytest.raises(SystemExit) as ended:
        call(promote, tmp_path, evaluation=damaged, **common)
    assert ended.value.code == 6
    assert "evaluation.json cannot be read" in capsys.readouterr().err
