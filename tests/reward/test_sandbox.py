from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlpipe.errors import ConfigError, ScorerError
from rlpipe.reward import sandbox
from rlpipe.reward.base import Attempt
from rlpipe.reward.batch import Call
from rlpipe.reward.custom import Custom
from rlpipe.reward.worker import Limits, Outcome
from rlpipe.tasks import Task
from tests.reward.rows import trajectory

SCRIPTED = Custom(path="tests.reward.bad_scorers:Scripted")
LIMITS = Limits(wall_seconds=2.0, cpu_seconds=60, memory_mb=256)
TIMEOUT = ("timeout", "over the limit of 2 s or 60 s of CPU")


@pytest.fixture(scope="module")
def box():
    made = sandbox.Sandbox()
    yield made
    made.close()


@pytest.fixture
def fresh_box():
    made = sandbox.Sandbox()
    yield made
    made.close()


def calls(*completions: str) -> list[Call]:
    task = Task(task_id="t0", prompt="?", reference="9")
    return [(0, (Attempt.of(trajectory(text)), task)) for text in completions]


def run(box: sandbox.Sandbox, *completions: str, limits: Limits = LIMITS, workers: int = 2, deadline_seconds: float = 60.0) -> list[Outcome]:
    return box.run([SCRIPTED], calls(*completions), limits, workers=workers, deadline_seconds=deadline_seconds)


def descendants(pid: int) -> set[int]:
    """Living processes below `pid`."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(entry.name)] = int(parent)
    found, fresh = set(), {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh}
        found |= fresh
    return found


def test_a29_hanging_scorers_cost_their_own_rows_only(fresh_box):
    before = descendants(os.getpid())
    started = time.monotonic()
    outcomes = run(fresh_box, "loop", "fine", "loop", "fine", "loop", "fine")
    assert time.monotonic() - started < 10
    assert [outcome.value for outcome in outcomes] == [None, 1.0, None, 1.0, None, 1.0]
    assert [outcome[1:] for outcome in outcomes[::2]] == [TIMEOUT] * 3
    assert len(descendants(os.getpid()) - before) <= 3  # the template and two workers
    assert [outcome.value for outcome in run(fresh_box, "fine", "fine")] == [1.0, 1.0]
    fresh_box.close()
    assert descendants(os.getpid()) <= before


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("memory", Outcome(None, "memory", "over the limit of 256 MB")),
        ("segfault", Outcome(None, "died", "signal SIGSEGV")),
        ("quit", Outcome(None, "died", "exit status 3")),
        ("sys_exit", Outcome(None, "error", "SystemExit: 4")),
        ("print", Outcome(0.25, "ok")),
        ("nan", Outcome(None, "error", "non_finite")),
        ("infinite", Outcome(None, "error", "non_finite")),
        ("nothing", Outcome(None, "error", "no_score")),
        ("text", Outcome(None, "error", "ValueError: could not convert string to float: 'high'")),
    ],
)
def test_a_bad_call_costs_its_own_result_only(box, completion, expected):
    assert run(box, "fine", completion, "fine", limits=LIMITS._replace(wall_seconds=20.0), workers=1) == [Outcome(1.0, "ok"), expected, Outcome(1.0, "ok")]


def test_an_exception_is_named_on_one_line_without_addresses(box):
    [outcome] = run(box, "raise_type_error")
    assert outcome == Outcome(None, "error", "TypeError: bad thing <tests.reward.bad_scorers.Scripted object at 0x…>")


def test_signals_grandchildren_and_the_interpreter_lock_do_not_outlive_the_limit(fresh_box):
    before = descendants(os.getpid())
    outcomes = run(fresh_box, "ignore_sigterm", "grandchild", "loop_without_gil_switch", "sleep", limits=LIMITS._replace(wall_seconds=1.0), workers=4)
    assert [outcome.status for outcome in outcomes] == ["timeout"] * 4
    fresh_box.close()
    assert descendants(os.getpid()) <= before


def test_what_scorers_leave_in_sessions_of_their_own_ends_with_the_workers_and_is_counted(fresh_box, caplog):
    before = descendants(os.getpid())
    [outcome] = run(fresh_box, "leaves_a_process", workers=1)
    assert outcome == Outcome(0.75, "ok")
    assert len(descendants(os.getpid()) - before) == 3  # the template, its worker and what was left
    assert run(fresh_box, "leaves_a_process_and_hangs", "fine", workers=1) == [Outcome(None, *TIMEOUT), Outcome(1.0, "ok")]
    left = descendants(os.getpid()) - before
    assert len(left) == 2  # both were left by the worker that is ended
    fresh_box.close()
    assert [record.getMessage() for record in caplog.records] == ["step=reward children_ended=2 reason=left_behind_by_a_scorer"]
    assert descendants(os.getpid()) <= before


def test_what_idle_workers_left_ends_when_the_sandbox_closes(fresh_box, caplog):
    before = descendants(os.getpid())
    run(fresh_box, "leaves_a_process", "leaves_a_process", "leaves_a_process")
    children = descendants(os.getpid()) - before
    fresh_box.close()
    assert "children_ended=3 " in caplog.text
    deadline = time.monotonic() + 5
    while (running := [pid for pid in children if has_command(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running == []


def has_command(pid: int) -> bool:
    """Whether it runs; one that is dead and not yet collected has no command line."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_cpu_time_is_limited_apart_from_wall_time(box):
    [outcome] = run(box, "loop", limits=LIMITS._replace(cpu_seconds=1, wall_seconds=30.0))
    assert outcome == Outcome(None, "timeout", "over the limit of 30 s or 1 s of CPU")


def test_cpu_time_of_earlier_calls_does_not_count(box):
    task = Task(task_id="t0", prompt="?", reference="9")
    burn = Custom(path="tests.reward.bad_scorers:Burns")
    outcomes = box.run([burn], [(0, (Attempt.of(trajectory()), task))] * 3, LIMITS._replace(cpu_seconds=1, wall_seconds=20.0), workers=1, deadline_seconds=30)
    assert [outcome.status for outcome in outcomes] == ["ok"] * 3


def test_a_scorer_that_forks_answers_once(box):
    assert run(box, "fork_twice", "fine", "fine", workers=1) == [Outcome(0.5, "ok"), Outcome(1.0, "ok"), Outcome(1.0, "ok")]


@pytest.mark.parametrize("completion", ["answer_for_another", "answer_with_garbage"])
def test_an_answer_out_of_turn_is_found_out(box, completion):
    died = Outcome(None, "died", "answered out of turn")
    assert run(box, completion, "fine", workers=1) == [died, Outcome(1.0, "ok")]


def test_the_batch_has_a_deadline_of_its_own(box):
    started = time.monotonic()
    outcomes = run(box, *["sleep"] * 40, "fine", limits=LIMITS._replace(wall_seconds=30.0), deadline_seconds=1.0)
    assert time.monotonic() - started < 5
    assert {outcome[1:] for outcome in outcomes} == {("timeout", "the batch was over its deadline of 1 s")}
    assert run(box, "fine") == [Outcome(1.0, "ok")]


def test_outcomes_stand_in_order_whatever_the_number_of_workers(box):
    completions = ["fine", "nan", "quit", "fine", "print", "raise_type_error", "fine", "segfault", "fine", "fine"] * 3 + ["memory"]
    slow_machine = LIMITS._replace(wall_seconds=20.0)
    assert run(box, *completions, limits=slow_machine, workers=1) == run(box, *completions, limits=slow_machine, workers=3)


def test_workers_stay_between_batches(box):
    run(box, *["fine"] * 8)
    pids = [worker.pid for worker in box.workers]
    run(box, *["fine"] * 8)
    assert [worker.pid for worker in box.workers] == pids


def test_a_worker_killed_while_idle_costs_nothing(box):
    run(box, "fine", "fine")
    for worker in box.workers:
        os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert run(box, "fine", "fine", "fine") == [Outcome(1.0, "ok")] * 3


def test_a_template_killed_from_outside_is_said_and_replaced(box):
    run(box, "fine")
    os.kill(box._template.pid, signal.SIGKILL)
    with pytest.raises(ScorerError, match="scoring processes are gone"):
        run(box, "segfault")
    assert run(box, "fine") == [Outcome(1.0, "ok")]


def test_no_calls_give_no_outcomes(box):
    assert run(box) == []


def test_threads_take_turns(box):
    found = []
    threads = [threading.Thread(target=lambda: found.append(run(box, "fine", "print"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[Outcome(1.0, "ok"), Outcome(0.25, "ok")]] * 4


@pytest.mark.parametrize("path", ["no_such_module:Name", "tests.reward.bad_scorers:NoSuchName"])
def test_a_reward_that_cannot_be_loaded_is_named(box, path):
    with pytest.raises(ConfigError, match=r"a reward cannot be loaded; got .*(no_such_module|NoSuchName)"):
        box.run([Custom(path=path)], calls("fine"), LIMITS, workers=1, deadline_seconds=10)


def test_children_import_nothing_heavy(box):
    [outcome] = box.run([Custom(path="tests.reward.bad_scorers:num_heavy_modules")], calls("fine"), LIMITS, workers=1, deadline_seconds=10)
    assert outcome == Outcome(0.0, "ok")


PARENT = """
import sys
from rlpipe.reward import sandbox
from rlpipe.reward.worker import Limits
from tests.reward.test_sandbox import SCRIPTED, calls
box = sandbox.shared()
box.run([SCRIPTED], calls("fine", "fine"), Limits(60.0, 60, 256), workers=2, deadline_seconds=60)
print("ready", flush=True)
box.run([SCRIPTED], calls(sys.argv[1], sys.argv[1]), Limits(60.0, 60, 256), workers=2, deadline_seconds=60)
"""


@pytest.mark.parametrize(("completion", "number"), [("loop_without_gil_switch", signal.SIGKILL), ("ignore_sigterm", signal.SIGINT), ("fine", None)])
def test_no_child_outlives_the_parent(tmp_path, completion, number):
    # The children's command lines carry their module path, so a path of this test's own marks them
    environment = {**os.environ, "PYTHONPATH": f"{Path.cwd()}:{tmp_path}"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, completion], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    if number is not None:
        assert len(descendants(parent.pid)) == 3
        time.sleep(0.2)
        parent.send_signal(number)
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while marked(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marked(tmp_path) == []


def marked(path: Path) -> list[int]:
    """Living processes whose command line names `path`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(path).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found
