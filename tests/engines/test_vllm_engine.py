"""The vLLM engine against the torch engine on the same weights; and its absence."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from rlpipe.engines import Request, Sampling, Torch, Vllm
from tests.factories import tiny_model

ROOT = Path(__file__).parents[2]

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: make install-vllm")


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


@needs_vllm
@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_agrees_with_torch_before_and_after_a_new_policy(tmp_path: Path) -> None:
    for seed in (0, 1):
        tiny_model(tmp_path / str(seed) / "modules" / "policy", seed=seed)
    queued = [
        Request("hot", ids(1, 2, 3), (1, 2, 3), Sampling(8, 1.0)),
        Request("cool", ids(1, 2, 3, 4), (4, 5), Sampling(8, 0.5)),
        Request("greedy", ids(5, 6), (6,), Sampling(8, 0.0)),
        Request("long", ids(*[1] * 125), (7,), Sampling(8, 1.0)),
        Request("stop", ids(1, 2, 3), (1,), Sampling(60, 1.0, stop=("a", "b", "c", "d", "e"))),
    ]
    with Vllm(dtype="float32").open(tmp_path / "0", 1) as engine:
        assert engine.max_length == 128
        for seed in (0, 1):
            if seed:
                engine.load(tmp_path / "1")
            engine.submit(queued)
            found = {(c.request_id, c.index): c for c in engine.stream()}
            assert len(found) == 8
            assert found["long", 0].finish_reason == "error"
            assert len({tuple(found["hot", i].token_ids) for i in range(3)}) == 3
            with Torch(dtype="float32").open(tmp_path / str(seed), 1) as torch_engine:
                for request in queued:
                    for index in range(len(request.seeds)):
                        completion = found[request.request_id, index]
                        sequence = np.concatenate([request.prompt_ids, completion.token_ids])
                        (expected,) = torch_engine.logprobs([sequence], request.sampling.temperature or 1.0)
                        np.testing.assert_allclose(completion.logprobs, expected[len(request.prompt_ids) :], atol=1e-4)
                torch_engine.submit([queued[2]])
                assert next(iter(torch_engine.stream())).token_ids.tolist() == found["greedy", 0].token_ids.tolist()
                np.testing.assert_allclose(engine.logprobs([ids(1, 2, 3)])[0], torch_engine.logprobs([ids(1, 2, 3)])[0], atol=1e-4)
            if found["stop", 0].finish_reason == "stop":
                assert found["stop", 0].token_ids[-1] in (0, *range(11, 16))
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True, check=False).stdout
    assert "vllm" not in children.lower()
    assert "multiprocessing" not in children


STUBBED = """
    import sys
    from pathlib import Path
    import numpy as np
    from rlpipe.engines import Request, Sampling, Torch, Vllm
    from rlpipe.errors import EngineError

    policy = Path(sys.argv[1])
    with Torch().open(policy, 1) as engine:
        engine.submit([Request("a", np.array([1, 2], dtype=np.int32), (1,), Sampling(3, 1.0))])
        assert len(list(engine.stream())) == 1
    try:
        Vllm().open(policy, 1)
    except EngineError as error:
        sys.stdout.write(str(error))
"""


def test_f11_broken_optional_packages_leave_the_cpu_path_alone(tmp_path: Path) -> None:
    tiny_model(tmp_path / "policy" / "modules" / "policy")
    for name in ("deepspeed", "vllm"):
        (tmp_path / "stubs" / name).mkdir(parents=True)
        (tmp_path / "stubs" / name / "__init__.py").write_text("raise RuntimeError('no CUDA runtime\\nfound')\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path / 'stubs'}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(STUBBED), str(tmp_path / "policy")]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout == ("vllm does not import; got RuntimeError: no CUDA runtime found; do: run `make install-vllm`, or set engine.type: torch")


def test_engine_configs_import_neither_torch_nor_vllm() -> None:
    code = "import sys, rlpipe.engines; sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'transformers', 'pyarrow')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
