"""Component `preflight` through its own function, on real artifacts."""

from pathlib import Path
from typing import Any

import pytest

from ...conftest import ROOT, as_floats, call
from ..component import preflight


@pytest.fixture
def arguments(sections: dict[str, Any]) -> dict[str, Any]:
    return {**{name: section for name, section in sections.items() if name != "snapshot"}, "num_rounds": 1}


def test_it_writes_the_params_that_the_sections_are_of(arguments: dict[str, Any], tmp_path: Path) -> None:
    """Cases B04 and B13 too: numbers that became floats, and a second time, give the same."""
    from rlpipe import params, steps

    key, made = call(preflight, tmp_path / "first", **arguments)
    written = params.read_yaml(Path(made["params"].path))
    given = steps.resolved(params.read_yaml(ROOT / "configs/micro.yaml"))
    assert {name: value for name, value in written.items() if name != "kubeflow"} == given
    assert "failed" not in Path(made["summary"].path).read_text()
    changed = {name: as_floats(value) for name, value in arguments.items()}
    again, same = call(preflight, tmp_path / "second", **changed)
    assert again == key
    assert Path(same["params"].path).read_bytes() == Path(made["params"].path).read_bytes()


def test_sections_that_contradict_each_other_are_refused(arguments: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        call(preflight, tmp_path, **{**arguments, "rollout": {**arguments["rollout"], "num_attempts": 1}})
    assert ended.value.code in (2, 15)
    assert "rollout.num_attempts is 1" in capsys.readouterr().err


def test_everything_that_is_missing_is_named_at_once(
    arguments: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    secret = {"name": "hub", "env": {"token": "NO_SUCH_TOKEN"}, "tasks": []}
    model = {**arguments["model"], "model": {"path": "/no/such/folder", "char_lm": {}}}
    with pytest.raises(SystemExit) as ended:
        call(preflight, tmp_path, **{**arguments, "kubeflow": {**arguments["kubeflow"], "secrets": [secret]}, "model": model})
    said = capsys.readouterr().err
    assert ended.value.code == 15
    assert "NO_SUCH_TOKEN" in said
    assert "/no/such/folder" in said
    assert Path(tmp_path / "summary").read_text().startswith("# Preflight: 2 of ")
