"""What ails a working folder, with the real git and DVC (cases C12, C13, C14, C16, W34)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlpipe import cli, doctor, params, versioning, workspace


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with a run's params, a policy recorded by DVC, and a remote that has it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    place = tmp_path / "work"
    place.mkdir()
    git(tmp_path, "init", "work")
    workspace.prepare(place, Path("configs/micro.yaml"), [], 1)
    (place / "dvc.yaml").write_text("stages:\n  start:\n    cmd: echo start\n    outs: [rounds/00/policy]\n")
    policy = place / "rounds" / "00" / "policy"
    policy.mkdir(parents=True)
    (policy / "a.bin").write_text("a")
    (policy / "b.bin").write_text("b")
    versioning.commit(place, ["start"])
    dvc(place, "remote", "add", "-d", "store", str(tmp_path / "store"))
    versioning.close(place)
    dvc(place, "push")
    (place / ".gitignore").write_text("/rounds/\n/.rlpipe/\n")
    git(place, "add", "-A")
    git(place, "commit", "-m", "start")
    return place


def dvc(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "dvc", *arguments], cwd=folder, check=True, capture_output=True)


def found(folder: Path, name: str, raw: dict[str, Any] | None = None) -> doctor.Finding:
    (one,) = [one for one in doctor.findings(raw or params.read_yaml(folder / "params.yaml"), folder) if one.name == name]
    return one


def test_nothing_ails_a_folder_that_is_as_it_should_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", "--workdir", str(folder)]) == 0
    told = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert [name for name, one in told.items() if not one["ok"]] == []
    assert told["remote"]["detail"] == "store has all 1 outputs of dvc.lock"


def test_c12_what_the_remote_lost_is_named_whatever_dvc_remembers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = next(path for path in (folder.parent / "store").rglob("*") if path.is_file() and path.read_bytes() == b"b")
    lost.unlink()
    assert cli.main(["doctor", "--workdir", str(folder)]) == 15
    out = capsys.readouterr().out
    assert "rounds/00/policy (1 of its files)" in out
    assert "do: `dvc push -r store` where the cache still has them" in out
    listing = next(path for path in (folder.parent / "store").rglob("*.dir"))
    listing.unlink()
    assert found(folder, "remote").detail == "rounds/00/policy"


def test_c16_an_output_that_git_tracks_is_named(folder: Path) -> None:
    assert found(folder, "outputs in git").ok
    git(folder, "add", "-f", "rounds/00/policy/a.bin")
    one = found(folder, "outputs in git")
    assert (one.ok, one.detail) == (False, "rounds/00/policy/a.bin")


def test_c13_a_reward_that_git_does_not_know_is_named(folder: Path) -> None:
    (folder / "mine.py").write_text("def polite(attempt, task): return 1.0\n")
    raw = params.read_yaml(folder / "params.yaml")
    raw["reward"]["rewards"] = [{"type": "custom", "path": "mine:polite"}]
    one = found(folder, "inputs in git", raw)
    assert (one.ok, one.detail) == (False, "mine.py")
    git(folder, "add", "mine.py")
    assert found(folder, "inputs in git", raw).ok


def test_c14_a_lock_with_both_sides_of_a_merge_is_explained(folder: Path) -> None:
    lock = folder / "dvc.lock"
    lock.write_text("<<<<<<< ours\n" + lock.read_text() + "=======\nschema: '2.0'\n>>>>>>> theirs\n")
    one = found(folder, "remote")
    assert not one.ok
    assert "remove dvc.lock and run again" in str(one.do)


def test_a_run_at_work_is_named(folder: Path) -> None:
    with workspace.locked(folder):
        assert not found(folder, "lock").ok
    assert found(folder, "lock").ok
