import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe import params, preflight, reasoning_gym_tasks, task_sources, tasks, workspace
from rlpipe.errors import ConfigError
from rlpipe.session import Session
from rlpipe.tasks import Task

BUILT_IN = sorted(task_sources.GENERATORS)


def problems(name, split, seed, **options):
    return {tuple(sorted(task.metadata["numbers"])) for task in task_sources.make(name, split, 150, seed, options)}


def test_max_of_three_is_the_completion_prompt_of_the_default_run():
    task = task_sources.generator("max_of_three", {}).task((51, 7, 44))
    assert task.prompt == "max(3, 9, 2) = 9\nmax(51, 20, 44) = 51\nmax(51, 7, 44) ="
    assert (task.task_id, task.reference, task.metadata) == ("max_of_three-51-7-44", "51", {"source": "max_of_three", "numbers": [51, 7, 44]})


def test_sort_three_is_the_prompt_of_the_character_model():
    task = task_sources.generator("sort_three", {}).task((5, 20, 14))
    assert (task.prompt, task.reference) == ("sort 5 20 14=", "5 14 20")
    assert task_sources.generator("sort_three", {"shots": 1}).task((5, 20, 14)).prompt == "sort 3 9 2=2 3 9\nsort 5 20 14="


def test_add():
    task = task_sources.generator("add", {"shots": 1}).task((30, 12))
    assert (task.prompt, task.reference) == ("3 + 4 = 7\n30 + 12 =", "42")


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_reference_is_right_and_the_empty_answer_is_not(name, split):
    right = {"max_of_three": max, "add": sum, "sort_three": sorted}[name]
    for task in task_sources.make(name, split, 100, 0):
        expected = right(task.metadata["numbers"])
        assert task.reference == (" ".join(map(str, expected)) if name == "sort_three" else str(expected))
        assert task.reference.strip() != ""


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_same_arguments_give_the_same_tasks_and_more_only_add(name):
    made = task_sources.make(name, "train", 60, 3)
    assert made == task_sources.make(name, "train", 60, 3)
    assert made[:20] == task_sources.make(name, "train", 20, 3)
    assert made != task_sources.make(name, "train", 60, 4)
    assert len({task.task_id for task in made}) == len({task.prompt for task in made}) == 60


@settings(max_examples=20, deadline=None)
@given(name=st.sampled_from(BUILT_IN), train_seed=st.integers(0, 2**40), eval_seed=st.integers(0, 2**40))
def test_no_training_seed_meets_an_evaluation_seed_in_any_order(name, train_seed, eval_seed):
    assert not problems(name, "train", train_seed) & problems(name, "eval", eval_seed)
    assert not problems(name, "train", train_seed) & problems(name, "eval", train_seed)


def test_both_parts_together_are_every_problem_once():
    source = task_sources.generator("sort_three", {"high": 6})
    train, held_out = source.num_available("train"), source.num_available("eval")
    assert train + held_out == 6 * 5 * 4 == source.num_problems()
    made = task_sources.make("sort_three", "train", train, 0, {"high": 6}) + task_sources.make("sort_three", "eval", held_out, 0, {"high": 6})
    assert len({task.prompt for task in made}) == 120


def test_solved_examples_are_never_problems():
    source = task_sources.generator("add", {"high": 4, "shots": 1})
    assert source.num_available("train") + source.num_available("eval") == 4 * 4 - 2  # 3 + 4 and 4 + 3
    assert source.split_of((4, 3)) is None


@pytest.mark.parametrize(("name", "options"), [("sort_three", {"high": 6}), ("add", {"low": 0, "high": 5, "shots": 0})])
def test_asking_for_more_than_there_are_names_how_many_there_are(name, options):
    available = task_sources.generator(name, options).num_available("eval")
    with pytest.raises(ConfigError, match=f"got {available + 1}; accepted: at most {available};"):
        task_sources.make(name, "eval", available + 1, 0, options)
    assert len(task_sources.make(name, "eval", available, 0, options)) == available


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("max_of_three", "train", None), "need a number"),
        (("max_of_three", "test", 3), "unknown split"),
        (("max_of_three", "train", 3, 0, {"hi": 3}), "unknown key options of max_of_three.hi; accepted in options of max_of_three: low, high, shots"),
        (("max_of_three", "train", 3, 0, {"high": 2}), "needs 3 different numbers"),
        (("max_of_three", "train", 3, 0, {"shots": 5}), "shots"),
        (("nowhere/tasks.jsonl", "train", 3), "task file not found; got nowhere/tasks.jsonl"),
    ],
)
def test_what_cannot_be_made_is_refused(arguments, message):
    with pytest.raises(ConfigError) as caught:
        task_sources.make(*arguments)
    assert message in str(caught.value)


def test_a_file_of_the_users_own(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [Task(task_id=str(i), prompt=f"p{i}", reference="r") for i in range(3)]
    tasks.save(path, rows)
    assert task_sources.make(str(path), "train", None) == rows
    assert task_sources.make(str(path), "eval", 2) == rows[:2]
    with pytest.raises(ConfigError, match="too few tasks; got 4; accepted: at most 3"):
        task_sources.make(str(path), "train", 4)
    with pytest.raises(ConfigError, match="takes no options"):
        task_sources.make(str(path), "train", 1, 0, {"high": 3})


def test_a_relative_file_lies_in_the_working_folder_or_in_the_current_one(tmp_path, monkeypatch):
    workdir, current = tmp_path / "work", tmp_path / "current"
    task = {name: Task(task_id=name, prompt=f"ask {name}", reference="r") for name in ("work", "current")}
    for folder in (workdir, current):
        folder.mkdir()
        tasks.save(folder / "t.jsonl", [task[folder.name]])
    monkeypatch.chdir(current)
    assert task_sources.make("t.jsonl", "train", None, folders=[workdir]) == [task["work"]]
    assert task_sources.make("t.jsonl", "train", None) == [task["current"]]
    (workdir / "t.jsonl").rename(workdir / "plain")
    assert task_sources.make("t.jsonl", "train", None, folders=[workdir]) == [task["current"]]
    assert task_sources.make("plain", "train", None, folders=[workdir]) == [task["work"]]


def test_what_the_step_itself_wrote_is_no_source(tmp_path):
    (tmp_path / "tasks").mkdir()
    tasks.save(tmp_path / "tasks/train.jsonl", [Task(task_id="a", prompt="p", reference="r")])
    with pytest.raises(ConfigError, match=r"task file not found; got tasks/train\.jsonl"):
        task_sources.make("tasks/train.jsonl", "train", None, folders=[tmp_path])


def test_a_file_in_the_working_folder_counts_wherever_the_run_is_started(tmp_path, monkeypatch):
    """Params name it as it was given, the tasks are its rows, DVC watches it, and preflight finds it."""
    workdir, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    workdir.mkdir()
    elsewhere.mkdir()
    row = Task(task_id="a", prompt="p", reference="r")
    tasks.save(workdir / "t.jsonl", [row])
    monkeypatch.chdir(elsewhere)
    raw = workspace.prepare(workdir, Path("configs/micro.yaml"), ["tasks.train={source: t.jsonl}"], 1)
    assert params.read_yaml(workdir / "params.yaml")["tasks"]["train"]["source"] == "t.jsonl"
    assert "t.jsonl" in params.read_yaml(workdir / "dvc.yaml")["stages"]["tasks"]["deps"]
    assert tasks.load(Session(workdir, raw).make_tasks("train")) == [row]
    assert preflight.tasks_are_there(raw, [workdir])[0] == preflight.Finding("tasks train", True, "t.jsonl is there")


@pytest.mark.parametrize("name", ["reasoning_gym:chain_sum", "countdown", "spell_backward", "gsm_symbolic"])
def test_reasoning_gym_accepts_its_reference_and_not_the_empty_answer(name):
    pytest.importorskip("reasoning_gym")
    for task in task_sources.make(name, "train", 5, 1):
        assert reasoning_gym_tasks.score(task, task.reference) == 1.0
        assert reasoning_gym_tasks.score(task, "") <= 0.01


def test_reasoning_gym_parts_never_meet_and_are_the_same_twice(tmp_path):
    pytest.importorskip("reasoning_gym")
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    train, held_out = (task_sources.make("chain_sum", split, 30, 0, options) for split in ("train", "eval"))
    tasks.check_overlap(train, held_out)
    assert train == task_sources.make("reasoning_gym:chain_sum", "train", 30, 0, options)
    tasks.save(tmp_path / "t", train)
    assert tasks.load(tmp_path / "t") == train
    assert train[0].metadata["generator"] == "chain_sum"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("propositional_logic", {}, "propositional_logic gives no single answer; got answer None"),
        ("rearc", {}, "does not accept its own reference from a file"),
        ("max_of_tree", {}, "unknown task source; got max_of_tree; accepted: max_of_three, sort_three, add, a JSONL"),
        ("chain_sum", {"terms": 3}, "options of chain_sum do not fit"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "options of chain_sum do not fit"),
        ("chain_sum", {"seed": 3}, "seed is set by the source"),
        ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "allow_negation": False}, "too few different eval questions; got 400"),
    ],
)
def test_reasoning_gym_refusals(name, options, message):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError) as caught:
        task_sources.make(name, "eval", 400 if "too few" in message else 2, 0, options)
    assert message in str(caught.value)


def test_importing_the_sources_imports_no_generator_library():
    code = "import sys, rlpipe.task_sources; print([name for name in ('reasoning_gym', 'torch', 'pyarrow') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
