"""A server in processes of its own: how it starts, how it fails, and that nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rlpipe.engines import Request, Sampling, Vllm, probe
from rlpipe.engines.vllm_server import Server, VllmServerEngine, command
from rlpipe.errors import EngineError
from rlpipe.policies import causal_lm
from rlpipe.processes import alive
from tests.engines.test_vllm_engine import QUEUED, ask, expected_logprobs
from tests.factories import tiny_model

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: make install-vllm")

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    time.sleep(600)
print("ready", flush=True)
time.sleep(600)
"""
HOLDER = """
import sys, time
from rlpipe.engines.vllm_server import Server
server = Server([sys.executable, "-c", "import os, time; os.fork(); time.sleep(600)"], {})
print(server.process.pid, flush=True)
time.sleep(600)
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def group(pid: int) -> set[int]:
    """The processes of a process group that are alive."""
    return {process.pid for process in alive() if process.group == pid}


def wait_for(condition: object, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)


def test_a_server_that_ends_is_reported_with_the_end_of_its_log() -> None:
    server = Server(python("print('loading'); raise SystemExit('no room for the weights')"), {})
    with pytest.raises(EngineError, match=r"the vLLM server ended; got exit code 1; its log ends: .*no room for the weights; do: see"):
        server.wait_until_healthy("http://127.0.0.1:9/health", 60)
    server.close()
    assert group(server.process.pid) == set()


def test_a_server_that_does_not_get_healthy_in_time_is_given_up() -> None:
    server = Server(python("import time; print('compiling', flush=True); time.sleep(600)"), {})
    wait_for(lambda: "compiling" in server.tail())
    with pytest.raises(EngineError, match=r"did not start in time; got not healthy within 0.1 s; its log ends: compiling; do: raise engine.start_seconds"):
        server.wait_until_healthy("http://127.0.0.1:9/health", 0.1)
    server.close()
    server.close()
    assert group(server.process.pid) == set()


@pytest.mark.slow
def test_f04_a_hung_server_and_its_children_are_gone_at_close() -> None:
    """Case F04: told to end first, then killed; the server ignores the one and is stopped besides."""
    server = Server(python(STUBBORN), {})
    wait_for(lambda: "ready" in server.tail())
    found = group(server.process.pid)
    assert len(found) == 3
    for pid in found - {server.process.pid}:
        os.kill(pid, signal.SIGSTOP)
    server.close()
    assert group(server.process.pid) == set()


def test_f04_what_a_killed_server_leaves_is_ended_and_the_engine_says_so() -> None:
    """Case F04: the server dies, its child stays; the child is ended before anybody closes."""
    server = Server(python("import os, time; child = os.fork(); child and print(os.getpid(), flush=True); time.sleep(600)"), {})
    wait_for(lambda: server.tail().isdigit())
    assert len(group(server.process.pid)) == 3
    os.kill(int(server.tail()), signal.SIGKILL)
    wait_for(lambda: group(server.process.pid) == set())
    with pytest.raises(EngineError, match="the vLLM server ended; got exit code 9"):
        server.check()
    server.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_f04_nothing_is_left_when_the_parent_dies(number: signal.Signals) -> None:
    """Case F04."""
    parent = subprocess.Popen(python(HOLDER), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    wait_for(lambda: len(group(pid)) == 3)
    parent.send_signal(number)
    parent.wait()
    wait_for(lambda: group(pid) == set())


def test_f04_a_guard_that_was_killed_leaves_nothing_after_close() -> None:
    """Case F04."""
    server = Server(python("import time; time.sleep(600)"), {})
    wait_for(lambda: len(group(server.process.pid)) == 2)
    os.kill(server.process.pid, signal.SIGKILL)
    wait_for(lambda: server.process.poll() is not None)
    server.close()
    wait_for(lambda: group(server.process.pid) == set())
    assert server.process.returncode == -signal.SIGKILL


def test_settings_reach_the_command_line(tmp_path: Path) -> None:
    config = Vllm(served="server", dtype="float32", tensor_parallel_size=2, pipeline_parallel_size=3, data_parallel_size=4, max_model_len=99, block_size=32)
    words = command(config, tmp_path, 1234)
    options = dict(pairwise(words))
    wanted = {
        "-m": "vllm.entrypoints.openai.api_server",
        "--model": str(tmp_path),
        "--host": "127.0.0.1",
        "--port": "1234",
        "--dtype": "float32",
        "--tensor-parallel-size": "2",
        "--pipeline-parallel-size": "3",
        "--data-parallel-size": "4",
        "--max-model-len": "99",
        "--block-size": "32",
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
    }
    assert {name: options[name] for name in wanted} == wanted
    assert "--enable-prefix-caching" in words
    assert "--max-model-len" not in command(Vllm(served="server"), tmp_path, 1234)


@needs_vllm
@pytest.mark.vllm
@pytest.mark.recipes
def test_a_real_vllm_server_agrees_with_training_and_is_gone_when_killed(tmp_path: Path) -> None:
    """Cases A21, F04, F05: log-probs within 1e-4 in float32; a server killed under way fails the stream by name and leaves no process."""
    tiny_model(tmp_path / "0" / "modules" / "policy")
    with Vllm(dtype="float32", served="server", block_size=32, retries=1).open(tmp_path / "0", 1) as engine:
        assert isinstance(engine, VllmServerEngine)
        assert engine.max_length == 128
        found = ask(engine, *QUEUED)
        assert len(found) == 11
        assert (found["long", 0].finish_reason, found["unknown", 0].finish_reason) == ("error", "error")
        module = causal_lm.load_module(tmp_path / "0" / "modules" / "policy")
        for request in QUEUED:
            for completion in (found[request.request_id, index] for index in range(len(request.seeds))):
                if completion.finish_reason != "error":
                    np.testing.assert_allclose(completion.logprobs, expected_logprobs(module, request, completion), atol=1e-4)
        assert len({tuple(found["hot", i].token_ids) for i in range(3)}) == 3
        assert probe.check(engine, probe.expectation(tmp_path / "0", "float32"), "float32") < 1e-5
        server = engine._server
        assert server is not None
        started = group(server.process.pid)
        assert len(started) >= 3
        for pid in started - {server.process.pid}:
            os.kill(pid, signal.SIGKILL)
        engine.submit([Request("late", QUEUED[0].prompt_ids, (1,), Sampling(8, 1.0))])
        with pytest.raises(EngineError, match="the vLLM server ended; got exit code 9; its log ends"):
            list(engine.stream())
    assert group(server.process.pid) == set()
