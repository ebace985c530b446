"""The user's own rewards, task files and models in the working folder: found, checked early, and seen when they change."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe import artifact, cli, params, versioning, workspace
from tests.integration.conftest import MICRO, run

REWARD = "reward.rewards=[{type: custom, path: 'my_package.rewards:Polite', args: {word: '1'}}]"
MODULE = """
class Polite:
    def __init__(self, word):
        self.word = word

    def __call__(self, trajectory, task):
        return TIMES * float(trajectory.completion.count(self.word))
"""


def write_reward(workdir: Path, times: str = "1.0") -> None:
    """`my_package.rewards:Polite` in `workdir`; other text of the same length for another factor of the same length."""
    (workdir / "my_package").mkdir(parents=True, exist_ok=True)
    (workdir / "my_package/rewards.py").write_text(MODULE.replace("TIMES", times))


def sampled_reward(workdir: Path) -> float:
    return json.loads((workdir / "reports/run.json").read_text())["rounds"][0]["sampled_reward"]


def up_to_date(text: str) -> list[str]:
    return re.findall(r"step=(\w+) round=\d+ state=up-to-date", text)


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with an own reward."""
    write_reward(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_edited_reward_scores_and_trains_again_and_dvc_sees_it(workdir: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(workdir, "--set", REWARD) == 0
    assert versioning.status(workdir) == {}
    before = sampled_reward(workdir)
    assert before > 0
    write_reward(workdir, "2.0")
    assert set(versioning.status(workdir)) == {"reward@0"}
    caplog.clear()
    assert run(workdir, "--set", REWARD) == 0
    assert up_to_date(caplog.text) == ["model", "start", "rollout", "filter"]
    assert sampled_reward(workdir) == 2 * before
    assert versioning.status(workdir) == {}
    manifest = artifact.read_manifest(workdir / "rounds/01/scored")
    assert list(manifest["own_code"]) == ["my_package.rewards:Polite"]
    assert str(workdir) not in (workdir / "dvc.yaml").read_text() + json.dumps(manifest)


def test_a_file_beside_the_reward_counts_too(workdir: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(workdir, "--set", REWARD) == 0
    (workdir / "my_package/words.py").write_text("WORDS = ['please']\n")
    caplog.clear()
    assert run(workdir, "--set", REWARD) == 0
    assert up_to_date(caplog.text) == ["model", "start", "rollout", "filter", "train", "evaluate"]
    assert "my_package/words.py" in params.read_yaml(workdir / "dvc.yaml")["stages"]["reward"]["do"]["deps"]
    assert versioning.status(workdir) == {}


@pytest.mark.slow
def test_the_reward_lies_in_the_folder_of_another_workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the console script, whose `sys.path` has no current folder."""
    write_reward(tmp_path / "elsewhere", "3.0")
    write_reward(tmp_path / "here", "1.0")
    command = [str(Path(sys.executable).parent / "rlpipe"), "run", "--params", str(MICRO), "--set", REWARD]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--workdir", str(tmp_path / "elsewhere")], cwd=tmp_path / "here", env=environment, check=True)
    subprocess.run(command, cwd=tmp_path / "here", env=environment, check=True)
    assert sampled_reward(tmp_path / "elsewhere") == 3 * sampled_reward(tmp_path / "here")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("my_package.reward:Polite", ["my_package.reward:Polite", "no module"]),
        ("nowhere:Polite", ["nowhere:Polite", "no module"]),
        ("my_package.rewards:Polit", ["has no Polit", "rewards.py"]),
        ("my_package.broken:Polite", ["is not Python", "broken.py"]),
    ],
)
@pytest.mark.parametrize("section", ["reward", "evaluate"])
def test_a_reward_that_is_not_there_is_refused_before_anything_is_made(
    workdir: Path, capfd: pytest.CaptureFixture, section: str, path: str, words: list[str]
) -> None:
    (workdir / "my_package/broken.py").write_text("class Polite\n")
    assert run(workdir / "run", "--set", f"{section}.rewards=[{{type: custom, path: '{path}'}}]") == 2
    text = capfd.readouterr().err
    assert [word for word in words if word not in text] == []
    assert not (workdir / "run/models").exists()
    assert not (workdir / "run/rounds").exists()


def test_a_step_command_refuses_it_too(workdir: Path, capfd: pytest.CaptureFixture) -> None:
    assert cli.main(["rollout", "--params", str(MICRO), "--set", "reward.rewards=[{type: custom, path: 'nowhere:Polite'}]"]) == 2
    assert "nowhere:Polite" in capfd.readouterr().err


def test_dvc_sees_edited_task_files(workdir: Path) -> None:
    assert cli.main(["tasks", "make", "sort_three", "--split", "train", "--num", "16", "--out", "mine.jsonl"]) == 0
    assert run(workdir, "--set", "tasks.train={source: mine.jsonl}") == 0
    assert versioning.status(workdir) == {}
    lines = (workdir / "mine.jsonl").read_text().splitlines(keepends=True)
    (workdir / "mine.jsonl").write_text("".join(reversed(lines)))
    assert set(versioning.status(workdir)) == {"tasks"}
    assert run(workdir, "--set", "tasks.train={source: mine.jsonl}") == 0
    assert versioning.status(workdir) == {}


def deps(workdir: Path, stage: str) -> list[str]:
    return params.read_yaml(workdir / "dvc.yaml")["stages"][stage].get("deps", [])


def test_only_files_in_the_folder_become_deps(workdir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (workdir / "my_model").mkdir()
    for folder in (workdir, outside):
        (folder / "mine.jsonl").touch()
    sources = f"tasks={{train: {{source: mine.jsonl}}, eval: {{source: '{outside}/mine.jsonl'}}}}"
    workspace.prepare(workdir, MICRO, [sources, f"model.path={workdir}/my_model", "model.char_lm={}"], None)
    assert (deps(workdir, "model"), deps(workdir, "tasks")) == (["my_model"], ["mine.jsonl"])
    workspace.prepare(workdir, MICRO, [f"model.path={outside}", "model.char_lm={}"], None)
    assert (deps(workdir, "model"), deps(workdir, "tasks")) == ([], [])


def test_a_pipeline_written_by_hand_is_left_alone(workdir: Path) -> None:
    (workdir / "dvc.yaml").write_text("stages: {}\n")
    workspace.prepare(workdir, MICRO, [REWARD], None)
    assert (workdir / "dvc.yaml").read_text() == "stages: {}\n"
