"""vLLM as an OpenAI-compatible server on this machine, a fresh one for every policy, gone with all its processes at close."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from rlpipe.engines import probe
from rlpipe.engines.guard import GRACE_SECONDS
from rlpipe.engines.openai_client import Client
from rlpipe.engines.openai_engine import OpenAIEngine
from rlpipe.engines.served import folder_only, plain_weights
from rlpipe.errors import EngineError
from rlpipe.policies.device import num_cores

if TYPE_CHECKING:
    import torch

    from rlpipe.engines import Vllm

HOST, MODEL = "127.0.0.1", "policy"
POLL_SECONDS = 0.2
TAIL_BYTES = 1500
PORT_TRIES = 3
TAKEN = "address already in use"
REMEDY = "see the end of its log, given here; run `make install-vllm`, or set engine.type: torch"
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class Server:
    """A command that serves HTTP on a port of this machine, under `rlpipe.engines.guard`.

    Args:
        command: what to run; its log is kept without a name on disk.
        environ: what is added to this process's environment.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        guarded = [sys.executable, "-m", "rlpipe.engines.guard", *command]
        self.process = subprocess.Popen(
            guarded, stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT, env={**os.environ, **environ}, start_new_session=True
        )

    def tail(self) -> str:
        """The end of the log, in one line."""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode("utf-8", errors="replace")
        return " | ".join(line.strip() for line in text.splitlines() if line.strip())

    def check(self) -> None:
        """Raise EngineError, with the log's end, if the server ended."""
        if (code := self.process.poll()) is not None:
            raise EngineError("the vLLM server ended", got=f"exit code {code}; its log ends: {self.tail()}", do=REMEDY)

    def check_soon(self) -> None:
        """The same for a server that does not answer: one that died is not gone before what it left behind is."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS + 1)
        self.check()

    def wait_until_healthy(self, url: str, seconds: float) -> None:
        """Wait for status 200.

        Raises:
            EngineError: the server ended, or took longer.
        """
        until = time.monotonic() + seconds
        opener = build_opener(ProxyHandler({}))
        while True:
            self.check()
            # whatever else listens there meanwhile, or does not yet
            with suppress(URLError, OSError), opener.open(url, timeout=5) as response:
                if response.status == 200:
                    return
            if time.monotonic() > until:
                got = f"not healthy within {seconds:g} s; its log ends: {self.tail()}"
                raise EngineError("the vLLM server did not start in time", got=got, do="raise engine.start_seconds, or see why it hangs")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the whole process group: told to first, then killed; harmless twice."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS + 5)
        # a guard that was killed leaves its group; one that ended well leaves none
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


class VllmServerEngine(OpenAIEngine):
    """A vLLM server behind the engine seam; see `rlpipe.engines.base.Engine`.

    Raises:
        EngineError: vllm is not installed, does not start, or does not compute what the policy folder says.
    """

    def __init__(self, config: Vllm, policy_folder: Path, threads: int = 0) -> None:
        if find_spec("vllm") is None:
            raise EngineError("vllm is not installed", do="run `make install-vllm`, or set engine.type: torch")
        self.vllm, self.threads = config, threads
        self._server: Server | None = None
        self._begin(config.max_concurrency, policy_folder)

    def load(self, weights: Path | Mapping[str, torch.Tensor]) -> None:
        """Replace the weights: the running server is ended and a fresh one started."""
        folder = folder_only(weights, "vLLM")
        self._drop()
        config = self.vllm
        expected = probe.expectation(folder, config.dtype, config.max_model_len)
        key = secrets.token_hex(16)
        with self._dropped_on_failure():
            with plain_weights(folder, config.dtype) as model:
                server, base_url = self._start(model, key)
            client = Client(base_url, key, config.timeout_seconds, config.retries, server.check_soon)
            self._connect(client, MODEL, folder, config.max_model_len)
            self.logprob_gap = probe.check(self, expected, config.dtype, config.probe_tolerance)

    def _start(self, model: Path, key: str, tries: int = PORT_TRIES) -> tuple[Server, str]:
        """A server that is up, and its base address."""
        environ = ENVIRONMENT | {"VLLM_API_KEY": key, "VLLM_CPU_KVCACHE_SPACE": str(self.vllm.kv_cache_gib)}
        environ |= {"OMP_NUM_THREADS": str(self.threads or num_cores())}
        port = _free_port()
        self._server = server = Server(command(self.vllm, model, port), environ)
        try:
            server.wait_until_healthy(f"http://{HOST}:{port}/health", self.vllm.start_seconds)
        except EngineError:
            # another process may take the port before the server does
            if TAKEN not in server.tail() or tries == 1:
                raise
            self._end_server()
            return self._start(model, key, tries - 1)
        return server, f"http://{HOST}:{port}/v1"

    def _drop(self) -> None:
        super()._drop()
        self._end_server()

    def _end_server(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None


def command(config: Vllm, model: Path, port: int) -> list[str]:
    """The server's command line. `vllm serve` would be the same, but fails where the package has another name, as `vllm-cpu`."""
    import torch

    options: dict[str, object] = {
        "model": model,
        "served-model-name": MODEL,
        "host": HOST,
        "port": port,
        "dtype": config.dtype,
        "tensor-parallel-size": config.tensor_parallel_size,
        "pipeline-parallel-size": config.pipeline_parallel_size,
        "data-parallel-size": config.data_parallel_size,
        "gpu-memory-utilization": config.gpu_memory_utilization,
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "seed": 0,
        "uvicorn-log-level": "warning",
        **({"max-model-len": config.max_model_len} if config.max_model_len is not None else {}),
        **({"block-size": config.block_size} if config.block_size is not None else {}),
    }
    switches = ["enable-prefix-caching", "disable-log-stats", *([] if torch.cuda.is_available() else ["enforce-eager"])]
    given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *given, *(f"--{name}" for name in switches)]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])
