"""What a run leaves behind never misleads the next one."""

import json
import shutil
from pathlib import Path

import pytest

from rlpipe import artifact, cli
from rlpipe.workspace import locked
from tests.integration.conftest import run


def rounds(workdir: Path) -> list[int]:
    return [row["round"] for row in json.loads((workdir / "reports/run.json").read_text())["rounds"]]


def test_fewer_rounds_show_fewer_rounds(tmp_path: Path) -> None:
    assert run(tmp_path, "--rounds", "3") == 0
    assert rounds(tmp_path) == [1, 2, 3]
    assert run(tmp_path, "--rounds", "1") == 0
    assert rounds(tmp_path) == [1]


def test_a_refused_run_changes_nothing(micro: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "copy"
    shutil.copytree(micro, workdir)
    before = (workdir / "params.yaml").read_bytes()
    with locked(workdir):
        assert run(workdir, "--set", "train.learning_rate=0.7") == 2
    assert (workdir / "params.yaml").read_bytes() == before


def test_edited_params_are_kept(micro: Path, tmp_path: Path) -> None:
    workdir = tmp_path / "copy"
    shutil.copytree(micro, workdir)
    edited = (workdir / "params.yaml").read_text().replace("num_tasks: 6", "num_tasks: 4")
    (workdir / "params.yaml").write_text(edited)
    assert run(workdir) == 0
    assert (workdir / "params.yaml.1.orig").read_text() == edited


def test_a_symlinked_working_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert run(tmp_path / "link") == 0
    artifact.verify(tmp_path / "real/rounds/01/policy")


def test_weights_of_another_model_are_refused(micro: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    import torch
    from safetensors.torch import save_file

    shutil.copytree(micro / "models/start", tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    save_file({"foo": torch.zeros(1)}, tmp_path / "model/model.safetensors", {"format": "pt"})
    assert run(tmp_path / "run", "--set", f"model={{path: {tmp_path / 'model'}}}") == 2
    assert "are not those of its config.json" in capfd.readouterr().err


def test_replay_leaves_the_run_alone(micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workdir = tmp_path / "copy"
    shutil.copytree(micro, workdir)
    monkeypatch.chdir(workdir)
    before = {path: path.read_bytes() for path in sorted(workdir.rglob("*")) if path.is_file() and path.parts[-2] in ("01", "policy")}
    assert cli.main(["replay", "rounds/01/scored", "--from", "rounds/00/policy", "--out", "again", "--set", "train.learning_rate=0.3"]) == 0
    assert {path: path.read_bytes() for path in before} == before
    assert cli.main(["replay", "rounds/01/scored", "--from", "rounds/00/policy", "--out", "rounds/01/policy"]) == 2


def test_a_working_folder_that_is_a_file(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file") == 2
    assert "not a folder" in capfd.readouterr().err


def test_tasks_that_do_not_fit_the_model(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert run(tmp_path, "--set", "rollout.max_new_tokens=100000") == 2
    assert "no task of this round fits the model" in capfd.readouterr().err
    assert run(tmp_path, "--set", "evaluate.max_new_tokens=100000") == 2
    assert "evaluation tasks do not fit the model" in capfd.readouterr().err


def test_no_signal_says_why(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert run(tmp_path, "--set", "reward.rewards=[{type: regex_format, pattern: '(?s).*'}]", "--set", "run.no_signal=stop") == 4
    assert "zero_signal=6" in capfd.readouterr().err
