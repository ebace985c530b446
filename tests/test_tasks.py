import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe import artifact, params, tasks
from rlpipe.errors import ArtifactError, CheckError, ConfigError
from rlpipe.tasks import Task, TasksConfig

FIRST = '{"task_id": "a", "prompt": "1 + 1 =", "reference": "2"}\n'


def task(task_id="a", prompt="1 + 1 =", reference="2", **metadata):
    return Task(task_id=task_id, prompt=prompt, reference=reference, metadata=metadata)


def written(tmp_path, text):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_load_gives_the_rows_in_their_order(tmp_path):
    chat = '{"task_id": "b", "prompt": [{"role": "user", "content": "Hi"}], "reference": "Hello", "metadata": {"k": [1]}}\n'
    first, second = tasks.load(written(tmp_path, FIRST + "\n" + chat))
    assert (first.task_id, first.prompt, first.reference, first.metadata) == ("a", "1 + 1 =", "2", {})
    assert (second.prompt, second.metadata, second.text) == ([{"role": "user", "content": "Hi"}], {"k": [1]}, "user: Hi")


def test_line_separators_of_unicode_stay_inside_a_row(tmp_path):
    path = tmp_path / "tasks.jsonl"
    tasks.save(path, [task(prompt="one\u2028two\u0085three\r\nfour")])
    assert tasks.load(path)[0].prompt == "one\u2028two\u0085three\r\nfour"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no tasks"),
        ("\n \n", "holds no tasks"),
        (FIRST + FIRST, "line 2: the task_id was there before; got a, also in"),
        (FIRST + '{"task_id": "b", "prompt"\n', "line 2 is not JSON"),
        (FIRST + '{"task_id": "b", "prompt": "p", "reference": "1", "metadata": {"x": NaN}}\n', "line 2 is not JSON; got NaN is not JSON"),
        (FIRST + '{"task_id": "b", "prompt": "p", "prompt": "q", "reference": "1"}\n', "line 2 is not JSON; got the key prompt stands twice"),
        ('{"task_id": "a", "prompt": "p", "reference": ""}\n', "line 1: reference: Value error, the reference is empty"),
        ('{"task_id": "a", "prompt": "p", "reference": " \\n"}\n', "line 1: reference: Value error, the reference is empty"),
        ('{"task_id": "a", "prompt": "p", "reference": 2}\n', "line 1: reference: Input should be a valid string; got 2"),
        ('{"task_id": "a", "prompt": "", "reference": "2"}\n', "line 1: prompt"),
        ('{"task_id": "a", "prompt": [], "reference": "2"}\n', "line 1: prompt"),
        ('{"task_id": "a", "prompt": [{"role": "user"}], "reference": "2"}\n', "line 1: prompt"),
        ('{"task_id": "a", "prompt": "p"}\n', "line 1: column reference is missing; got task_id, prompt; accepted: task_id, prompt, reference, metadata"),
        ('{"task_id": "a", "prompt": "p", "answer": "2"}\n', "line 1: unknown column; got answer; accepted: task_id, prompt, reference, metadata"),
        ('["a"]\n', "line 1 is not a task; got list"),
        (b"\xff\xfe\x00", "neither Parquet nor UTF-8"),
    ],
)
def test_a_bad_file_is_refused_with_its_row_and_the_rule(tmp_path, text, message):
    with pytest.raises(CheckError) as caught:
        tasks.load(written(tmp_path, text))
    assert message in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="task file not found"):
        tasks.load(tmp_path / "none.jsonl")


@pytest.mark.parametrize("metadata", [['{"n": 3}', None], [{"n": 3}, None]])
def test_parquet_holds_the_same_tasks(tmp_path, metadata):
    columns = {"task_id": ["a", "b"], "prompt": ["p", "q"], "reference": ["1", "2"], "metadata": metadata}
    path = tmp_path / "tasks"  # Kubeflow gives no suffix
    pq.write_table(pa.table(columns), path)
    assert tasks.load(path) == [task("a", "p", "1", n=3), task("b", "q", "2")]


def test_parquet_of_chat_messages(tmp_path):
    path = tmp_path / "tasks.parquet"
    pq.write_table(pa.table({"task_id": ["a"], "prompt": [[{"role": "user", "content": "Hi"}]], "reference": ["1"]}), path)
    assert tasks.load(path)[0].prompt == [{"role": "user", "content": "Hi"}]


def test_parquet_with_a_wrong_column_or_cut_short(tmp_path):
    path = tmp_path / "tasks.parquet"
    pq.write_table(pa.table({"task_id": ["a"], "prompt": ["p"], "answer": ["1"]}), path)
    with pytest.raises(CheckError, match=r"row 1: unknown column; got answer"):
        tasks.load(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ArtifactError, match="is damaged"):
        tasks.load(path)


def test_saving_gives_the_same_bytes_and_the_same_tasks(tmp_path):
    rows = [task("a", "1 + 1 =", "2", z=1, a="ü"), task("b", [{"role": "user", "content": "Hi"}], "Hello")]
    tasks.save(tmp_path / "one", rows)
    tasks.save(tmp_path / "two", tasks.load(tmp_path / "one"))
    assert tasks.load(tmp_path / "two") == rows
    assert artifact.sha256(tmp_path / "one") == artifact.sha256(tmp_path / "two")
    assert json.loads((tmp_path / "one").read_text().splitlines()[0]) == {
        "task_id": "a", "prompt": "1 + 1 =", "reference": "2", "metadata": {"z": 1, "a": "ü"}
    }  # fmt: skip


@pytest.mark.parametrize("rows", [[], [task(), task()]])
def test_saving_what_could_not_be_loaded_is_refused_and_leaves_the_old_file(tmp_path, rows):
    tasks.save(tmp_path / "f", [task("old")])
    with pytest.raises(CheckError):
        tasks.save(tmp_path / "f", rows)
    assert tasks.load(tmp_path / "f") == [task("old")]
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a60_a_prompt_that_differs_in_case_and_spaces_is_overlap():
    train = [task("t1", "What is  ONE\nplus two?"), task("t2", "Else?")]
    with pytest.raises(CheckError) as caught:
        tasks.check_overlap(train, [task("e1", "New?"), task("e2", "what is one plus two? ")])
    assert "1 of 2 evaluation tasks are training tasks" in str(caught.value)
    assert "eval row 2 (e2) has the prompt of train row 1" in str(caught.value)


def test_a60_an_id_in_both_files_is_overlap():
    with pytest.raises(CheckError, match=r"eval row 1 has the id of train row 2 \(b\)"):
        tasks.check_overlap([task("a", "p"), task("b", "q")], [task("b", "r")])


def test_a60_no_eval_source_is_refused():
    with pytest.raises(ConfigError, match=r"tasks.eval is missing: held-out tasks are never split off"):
        params.section(TasksConfig, {"tasks": {"train": {"source": "add", "num": 8}}}, "tasks")


def test_disjoint_tasks_pass():
    tasks.check_overlap([task("a", "p")], [task("b", "q")])


def test_c06_numbers_written_as_text_are_parsed_or_refused_by_name():
    raw = {"tasks": {"train": {"source": "add", "num": "8"}, "eval": {"source": "add", "num": "x"}}}
    with pytest.raises(ConfigError, match=r"tasks.eval.num"):
        params.section(TasksConfig, raw, "tasks")
    raw["tasks"]["eval"]["num"] = 4
    assert params.section(TasksConfig, raw, "tasks").train.num == 8


def test_shared_text_beyond_the_common_instructions_is_a_warning():
    head = "Answer the question with one word. "
    story = "the quick brown fox jumps over the lazy dog near the river bank"
    train = [task("t1", f"{head}Tell me what {story} today?"), task("t2", f"{head}Which colour has the sky above London in spring?")]
    evaluation = [task("e1", f"{head}{story}!?"), task("e2", f"{head}How many legs do four cows and three hens have in all?")]
    (warning,) = tasks.overlap_warnings(train, evaluation)
    assert warning.startswith("eval row 1 (e1): 5 of 6 8-grams also in training prompts, first in train row 1")


def test_common_few_shot_examples_are_no_warning():
    head = "max(3, 9, 2) = 9\nmax(51, 20, 44) = 51\n"
    assert tasks.overlap_warnings([task("t", f"{head}max(17, 5, 61) =")], [task("e", f"{head}max(88, 4, 39) =")]) == []


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5), st.text())
def test_the_scan_takes_any_text(prompts, head):
    rows = [task(str(i), head + prompt) for i, prompt in enumerate(prompts)]
    assert len(tasks.overlap_warnings(rows, rows)) <= len(rows)


@given(st.text(), st.text())
def test_normalising_twice_changes_nothing_and_ignores_white_space(left, right):
    assert tasks.normalised(f"{left}  {right}") == tasks.normalised(f" {left}\n{right}")
    assert tasks.normalised(tasks.normalised(left)) == tasks.normalised(left)


def test_half_a_character_is_refused_where_tasks_are_written(tmp_path):
    with pytest.raises(CheckError, match="half a character"):
        tasks.save(tmp_path / "tasks.jsonl", [task(topic="a\ud800")])
    assert not (tmp_path / "tasks.jsonl").exists()
