"""What a step leaves behind is ended and named, what serves every step is not; `rlpipe ps` shows what is alive."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlpipe import cli, layout, processes
from rlpipe.execute import Call, execute
from rlpipe.params import Section
from rlpipe.reward import sandbox
from rlpipe.reward.exact_match import ExactMatch
from rlpipe.reward.scoring import RewardSection, Scorer
from rlpipe.step import Out, Report, signature
from rlpipe.steps import Step
from rlpipe.tasks import Task
from tests.reward.rows import trajectory

DEAF = "import signal, subprocess, time; signal.signal(15, signal.SIG_IGN); subprocess.Popen(['sleep', '301']); print('up', flush=True); time.sleep(300)"
AT_WORK = """
import sys, time
from pathlib import Path
from rlpipe import workspace
with workspace.locked(Path()):
    print("up", flush=True)
    time.sleep(300)
"""


def run(config: Section, *, out: Out, round_index: int) -> Report:
    """Do what the test says."""
    (out / "x.txt").write_text("x")
    started.append(work[0]())
    return Report()


work: list[Callable[[], object]] = []
started: list[object] = []


@pytest.fixture
def step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], dict]:
    """Runs a step that calls a function."""
    monkeypatch.setitem(layout.CODE, "toy", ("errors.py",))
    monkeypatch.setattr(processes, "TERMINATE_SECONDS", 0.5)
    monkeypatch.setattr(processes, "OWN_EXIT_SECONDS", 0.5)

    def executed(function: Callable[[], object]) -> dict:
        work[:], started[:] = [function], []
        return execute(Call(Step("toy", run, signature(run), ""), Section(), {"out": tmp_path / "out"}, 1, tmp_path))

    return executed


def named(name: str, argument: str) -> list[int]:
    """Living processes of this name with this argument."""
    return [process.pid for process in processes.alive() if process.name == name and argument in processes.arguments(process.pid)]


def test_f04_a_sleeping_child_is_ended_and_named(step, caplog: pytest.LogCaptureFixture) -> None:
    """Case F04."""
    record = step(lambda: subprocess.Popen(["sleep", "300"]))
    assert record["children_ended"] == ["sleep"]
    assert named("sleep", "300") == []
    lines = [entry.message for entry in caplog.records if entry.levelname == "WARNING"]
    assert lines == ["step=toy children_ended=1 names=sleep reason=left_behind"]


def test_f04_a_child_that_does_not_listen_is_killed_with_its_group(step) -> None:
    """Case F04."""

    def leave() -> object:
        child = subprocess.Popen([sys.executable, "-c", DEAF], start_new_session=True, stdout=subprocess.PIPE)
        child.stdout.readline()
        return child

    record = step(leave)
    assert len(record["children_ended"]) == 2
    assert record["children_ended"][1] == "sleep"
    assert started[0].pid not in {process.pid for process in processes.alive()}
    assert named("sleep", "301") == []


def test_f04_a_child_whose_parent_died_is_found(step) -> None:
    """Case F04: as the workers of an engine whose own process crashed."""
    assert step(lambda: subprocess.run(["sh", "-c", "sleep 302 & exit 0"], check=True))["children_ended"] == ["sleep"]
    assert named("sleep", "302") == []


def test_children_of_a_step_that_fails_are_ended_too(step) -> None:
    def fail() -> None:
        subprocess.Popen(["sleep", "303"])
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        step(fail)
    assert named("sleep", "303") == []


def test_what_ran_before_and_what_ends_by_itself_is_left_alone(step) -> None:
    before = subprocess.Popen(["sleep", "304"])
    record = step(lambda: subprocess.Popen(["sleep", "0.1"]))
    assert record["children_ended"] == []
    assert before.poll() is None
    before.kill()
    before.wait()


def test_the_scoring_processes_go_on_to_serve(step) -> None:
    scorer = Scorer(RewardSection(rewards=(ExactMatch(),)))
    task = Task(task_id="t0", prompt="?", reference="9")
    sandbox.shared().close()

    def score() -> float | None:
        return scorer.score([trajectory("9")], [task])[0].reward

    record = step(score)
    template = sandbox.shared().pid
    assert (record["children_ended"], started) == ([], [1.0])
    assert template is not None
    assert score() == 1.0
    assert sandbox.shared().pid == template


@pytest.fixture
def at_work(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """A process with rlpipe's command line that holds the lock of `tmp_path`."""
    script = tmp_path / "bin" / "rlpipe"
    script.parent.mkdir()
    script.write_text(AT_WORK)
    with subprocess.Popen([sys.executable, str(script), "rollout", "--round-index", "3"], cwd=tmp_path, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"up\n"
        yield child
        child.kill()


def test_ps_shows_what_is_alive_and_who_holds_the_folder(at_work: subprocess.Popen, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["ps", "--workdir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith(f"{at_work.pid} ")]
    assert re.fullmatch(rf"{at_work.pid} +0:0\d:\d\d +\d+ MB +3 +rlpipe rollout +{re.escape(str(tmp_path))}", line)
    assert out.splitlines()[-1] == f"lock of the working folder: held by pid {at_work.pid}"


def test_ps_where_nothing_is_at_work(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["ps", "--workdir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "lock of the working folder: free"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (["rlpipe", "run"], True),
        (["/opt/bin/python3.11", "/opt/bin/rlpipe", "run"], True),
        (["python", "-m", "rlpipe.cli", "train"], True),
        (["ls", "src/rlpipe"], False),
        (["python", "train.py"], False),
        ([], False),
    ],
)
def test_a_command_line_of_rlpipe(command: list[str], found: bool) -> None:
    assert processes._is_rlpipe(command) == found


def test_a_process_is_named_with_its_start(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "305"])
    (found,) = [process for process in processes.alive() if process.pid == child.pid]
    assert found.identity == (child.pid, found.started)
    child.kill()
    time.sleep(0.1)
    assert child.pid not in {process.pid for process in processes.alive()}  # dead, though not yet collected
    child.wait()
