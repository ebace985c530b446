"""Each bad input ends with one clear message and its documented exit code, and leaves nothing the next run believes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpipe import artifact, cli
from tests.integration.conftest import MICRO, run

TASK = '{{"task_id": "{0}", "prompt": "sort {0}=", "reference": "{0}", "metadata": {{}}}}\n'


@pytest.fixture
def copy(micro: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished micro run that may be damaged, as the current folder."""
    workdir = tmp_path / "copy"
    shutil.copytree(micro, workdir)
    monkeypatch.chdir(workdir)
    return workdir


def message(capfd: pytest.CaptureFixture) -> str:
    """The one message: the lines from `rlpipe:` on, without a traceback."""
    error = capfd.readouterr().err
    assert "Traceback" not in error
    assert error.count("rlpipe: ") == 1
    return error[error.index("rlpipe: ") :]


@pytest.mark.parametrize(
    ("assignment", "code", "words"),
    [
        ("train.learning_rat=1", 2, ["unknown key train.learning_rat", "learning_rate"]),
        ("train.learning_rate=abc", 2, ["train.learning_rate", "abc"]),
        ("rollout.top_p=0.9", 2, ["top_p", "0.9"]),
        ("rollout.num_attempts=1", 2, ["num_attempts is 1", "grpo", "reinforce"]),
        ("rollout.num_tasks=17", 2, ["17", "16"]),
        ("model.path=no/such/folder", 2, ["no/such/folder"]),
        ("engine.type=onnx", 2, ["engine", "torch", "vllm"]),
        ("tasks.train.source=no_such_tasks", 2, ["no_such_tasks", "max_of_three"]),
        ("tasks.eval.num=1000000", 2, ["1000000"]),
        ("kubeflow=3", 2, ["kubeflow"]),
        ("rounds=[]", 2, ["rounds"]),
    ],
)
def test_wrong_params(tmp_path: Path, capfd: pytest.CaptureFixture, assignment: str, code: int, words: list[str]) -> None:
    assert run(tmp_path, "--set", assignment) == code
    text = message(capfd)
    assert [word for word in words if word not in text] == []
    assert not (tmp_path / "rounds/01/trajectories").exists()


def test_missing_params_file(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert cli.main(["run", "--params", str(tmp_path / "none.yaml"), "--workdir", str(tmp_path)]) == 2
    assert "params file not found" in message(capfd)


@pytest.mark.parametrize(
    ("lines", "code", "word"),
    [
        ("", 3, "empty"),
        (TASK.format("1") + TASK.format("1"), 3, "1"),
        ('{"task_id": "a", "prompt": "x=", "reference": "", "metadata": {}}\n', 3, "reference"),
        ("not json\n", 3, "line 1"),
        ('{"task_id": "a", "prompt": "x="}\n', 3, "reference"),
    ],
    ids=["empty", "duplicate id", "empty reference", "no JSON", "no reference"],
)
def test_wrong_tasks(tmp_path: Path, capfd: pytest.CaptureFixture, lines: str, code: int, word: str) -> None:
    (tmp_path / "mine.jsonl").write_text(lines)
    assert run(tmp_path, "--set", f"tasks.train={{source: {tmp_path / 'mine.jsonl'}}}") == code
    assert word in message(capfd)


def test_missing_tasks(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert run(tmp_path, "--set", f"tasks.train={{source: {tmp_path / 'none.jsonl'}}}") in (2, 6)
    assert "none.jsonl" in message(capfd)


def test_a60_train_and_eval_share_a_prompt(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    (tmp_path / "train.jsonl").write_text("".join(TASK.format(i) for i in range(10, 30)))
    (tmp_path / "eval.jsonl").write_text(TASK.format("7") + '{"task_id": "other", "prompt": "SORT  12=", "reference": "12", "metadata": {}}\n')
    sources = f"tasks={{train: {{source: {tmp_path}/train.jsonl}}, eval: {{source: {tmp_path}/eval.jsonl}}}}"
    assert run(tmp_path, "--set", sources) == 3
    text = message(capfd)
    assert "eval row 2 (other) has the prompt of train row 3" in text


def test_no_eval_tasks(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert run(tmp_path, "--set", "tasks={train: {source: sort_three, num: 16}}") == 2
    assert "eval" in message(capfd)


def test_model_folder_without_tokenizer(tmp_path: Path, micro: Path, capfd: pytest.CaptureFixture) -> None:
    shutil.copytree(micro / "models/start", tmp_path / "model", ignore=shutil.ignore_patterns("token*", "special*", "chat*"))
    assert run(tmp_path / "run", "--set", f"model={{path: {tmp_path / 'model'}}}") == 2
    assert "tokenizer" in message(capfd)


def test_prompt_longer_than_the_model_is_listed_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(TASK.format(i) for i in range(10, 25)) + TASK.format("1" * 300))
    sources = f"tasks.train={{source: {tmp_path}/train.jsonl}}"
    assert run(tmp_path / "run", "--set", sources, "--set", "rollout.num_tasks=16") == 0
    (rejected,) = artifact.read_manifest(tmp_path / "run/rounds/01/trajectories")["facts"]["rejected_prompts"]
    assert "306" in json.dumps(rejected)


def test_truncated_shard(copy: Path, capfd: pytest.CaptureFixture) -> None:
    shard = copy / "rounds/01/scored/part-00000.parquet"
    content = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(content[: len(content) // 2])
    assert cli.main(["train", "--round-index", "1", "--fresh"]) == 6
    text = message(capfd)
    assert "part-00000.parquet is damaged" in text
    assert f"{len(content)} bytes" in text


def test_folder_without_manifest(copy: Path, capfd: pytest.CaptureFixture) -> None:
    (copy / "rounds/01/kept/manifest.json").unlink()
    assert cli.main(["reward", "--round-index", "1", "--fresh"]) == 6
    assert "kept has no manifest.json: it is unfinished" in message(capfd)
    assert cli.main(["fingerprint", "rounds/01/kept"]) == 6


def test_missing_input(copy: Path, capfd: pytest.CaptureFixture) -> None:
    assert cli.main(["train", "--round-index", "1", "--scored", "nowhere"]) == 6
    assert "input scored not found; got nowhere" in message(capfd)


def test_a_dataset_that_breaks_a_rule(copy: Path, capfd: pytest.CaptureFixture) -> None:
    """A log-prob above 0 on a sampled token: the column, the rule and the trajectory are named, and the step stops."""
    folder = copy / "rounds/01/scored"
    shard = folder / "part-00000.parquet"
    table = pq.read_table(shard)
    rows = table.to_pylist()
    rows[3]["logprobs"][-1] = 0.5
    shard.unlink()
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), shard)
    facts = artifact.read_manifest(folder)
    artifact.write_manifest(folder, **{name: value for name, value in facts.items() if name not in ("files", "fingerprint", "schema_version")})
    assert cli.main(["train", "--round-index", "1", "--fresh"]) == 3
    text = message(capfd)
    assert rows[3]["trajectory_id"] in text
    assert "log" in text


@pytest.mark.parametrize(("scorer", "reason"), [("raises", "TypeError"), ("not_a_number", "non_finite")])
def test_a58_too_many_unscorable(tmp_path: Path, capfd: pytest.CaptureFixture, scorer: str, reason: str) -> None:
    reward = f"reward.rewards=[{{type: custom, path: 'tests.integration.scorers:{scorer}'}}]"
    assert run(tmp_path, "--set", reward) == 5
    text = message(capfd)
    assert reason in text
    assert "24" in text
    assert not (tmp_path / "rounds/01/scored").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_full_disk(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Case B20: round 2 lies on a disk of 16 kB: exit 7, one message, nothing half-written; with room again the run goes on."""
    assert run(tmp_path) == 0
    disk = tmp_path / "rounds/02"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk], check=True)
    try:
        capfd.readouterr()
        assert run(tmp_path, "--rounds", "2") == 7
        assert "the disk is full" in message(capfd)
        assert not (disk / "trajectories/manifest.json").exists()
    finally:
        subprocess.run(["umount", disk], check=True)
    assert run(tmp_path, "--rounds", "2") == 0
    artifact.verify(tmp_path / "rounds/02/policy")


@pytest.mark.slow
def test_ctrl_c(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlpipe.cli", "run", "--params", str(MICRO), "--workdir", str(tmp_path), "--rounds", "40"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not (tmp_path / "rounds/01/scored").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in error
    assert "Traceback" not in error


def test_two_runs_in_one_folder(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    from rlpipe.workspace import locked

    with locked(tmp_path):
        assert run(tmp_path) == 2
    assert "another run is at work" in message(capfd)


def test_step_help_lists_exit_codes(capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capfd.readouterr().out
    for code in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 130):
        assert f"\n  {code} " in out
