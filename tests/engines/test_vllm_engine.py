"""vLLM in this process against what training computes from the same weights; and its absence."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rlpipe.engines import Begun, Completion, Request, Sampling, Torch, Vllm, probe
from rlpipe.engines.base import Engine
from rlpipe.errors import EngineError
from rlpipe.policies import adapters, causal_lm
from tests.factories import tiny_model

ROOT = Path(__file__).parents[2]

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: make install-vllm")


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def expected_logprobs(module: Any, request: Request, completion: Completion) -> np.ndarray:
    """`[C]`, log-softmax(logits / temperature) of a completion's tokens by the model that training loads."""
    sequence = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int64))
    with torch.inference_mode():
        logits = module(input_ids=sequence[None], use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
    logprobs = torch.log_softmax(logits / (request.sampling.temperature or 1.0), dim=-1)
    return logprobs.gather(1, sequence[len(request.prompt_ids) :, None])[:, 0].numpy()


def ask(engine: Engine, *requests: Request) -> dict[tuple[str, int], Completion]:
    engine.submit(requests)
    return {(completion.request_id, completion.index): completion for completion in engine.stream()}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("policies")
    for seed in (0, 1):
        tiny_model(root / str(seed) / "modules" / "policy", seed=seed)
    if find_spec("peft") is None:
        return [root / "0", root / "1"]
    return [root / "0", root / "1", with_adapter(root / "adapter")]


def with_adapter(folder: Path) -> Path:
    """A policy whose adapter lies apart and changes a good deal; returns `folder`."""
    model = tiny_model(folder / "modules" / "policy")
    module = causal_lm.load_module(model)
    adapters.begin(module, rank=4, alpha=8.0, targets=None, seed=1)
    for _, layer in adapters.layers(module):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3, generator=torch.Generator().manual_seed(2))
    adapters.write(module, model)
    return folder


QUEUED = (
    Request("hot", ids(1, 2, 3), (1, 2, 3), Sampling(8, 1.0)),
    Request("cool", ids(1, 2, 3, 4), (4, 5), Sampling(8, 0.7)),
    Request("warm", ids(*range(1, 41)), (8, 9), Sampling(8, 1.3)),
    Request("greedy", ids(5, 6), (6,), Sampling(8, 0.0)),
    Request("long", ids(*[1] * 125), (7,), Sampling(8, 1.0)),
    Request("unknown", ids(1, 9999), (7,), Sampling(8, 1.0)),
    Request("stop", ids(1, 2, 3), (1,), Sampling(60, 1.0, stop=("a", "b", "c", "d", "e"))),
)


@needs_vllm
@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_agrees_with_training_before_and_after_a_new_policy(policies: list[Path]) -> None:
    """Cases A21, A25, F05: log-probs within 1e-4 at temperatures 1, 0.7 and 1.3; two requests that cannot be served leave the others alone."""
    with Vllm(dtype="float32", block_size=32).open(policies[0], 1) as engine:
        assert engine.max_length == 128
        assert engine.llm.llm_engine.vllm_config.cache_config.block_size == 32
        for policy in policies:
            if policy is not policies[0]:
                engine.load(policy)
            found = ask(engine, *QUEUED)
            assert len(found) == 11
            assert (found["long", 0].finish_reason, found["unknown", 0].finish_reason) == ("error", "error")
            assert "out of vocabulary" in (found["unknown", 0].error or "")
            assert len({tuple(found["hot", i].token_ids) for i in range(3)}) == 3
            module = causal_lm.load_module(policy / "modules" / "policy")
            for request in QUEUED:
                for completion in (found[request.request_id, index] for index in range(len(request.seeds))):
                    if completion.finish_reason != "error":
                        np.testing.assert_allclose(completion.logprobs, expected_logprobs(module, request, completion), atol=1e-4)
            given = Completion("given", 0, ids(2, 3, 4), np.empty(0), "stop")
            wanted = expected_logprobs(module, Request("given", ids(1), (), Sampling(1, 1.0)), given)
            np.testing.assert_allclose(engine.logprobs([ids(1, 2, 3, 4)])[0][1:], wanted, atol=1e-4)
            with Torch(dtype="float32").open(policy, 1) as torch_engine:
                assert ask(torch_engine, QUEUED[3])["greedy", 0].token_ids.tolist() == found["greedy", 0].token_ids.tolist()
            if found["stop", 0].finish_reason == "stop":
                assert found["stop", 0].token_ids[-1] in (0, *range(11, 16))
        check_begun_and_aborted(engine, found["hot", 0])
    children = subprocess.run(["ps", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True, check=False).stdout
    assert "vllm" not in children.lower()
    assert "multiprocessing" not in children


def check_begun_and_aborted(engine: Engine, whole: Completion) -> None:
    """An attempt goes on after its first two tokens; aborted ones come back with what they have."""
    had = Begun(whole.token_ids[:2], whole.logprobs[:2])
    again = ask(engine, Request("on", QUEUED[0].prompt_ids, (1,), Sampling(8, 1.0), begun=(had,)))["on", 0]
    assert again.token_ids[:2].tolist() == whole.token_ids[:2].tolist()
    assert again.logprobs[:2].tolist() == whole.logprobs[:2].tolist()
    assert len(again.token_ids) == len(again.logprobs) <= 8
    engine.submit([Request("short", ids(5, 6), (1,), Sampling(1, 1.0)), Request("endless", ids(1, 2), (1, 2), Sampling(100, 1.0), begun=(had, had))])
    found = []
    for completion in engine.stream():
        found.append(completion)
        if completion.request_id == "short":
            engine.abort(["endless"])
    ended = [completion for completion in found if completion.request_id == "endless"]
    assert len(ended) == 2
    for completion in ended:
        assert completion.finish_reason in ("abort", "stop")
        assert 3 <= len(completion.token_ids) == len(completion.logprobs) < 100


@needs_vllm
@pytest.mark.vllm
@pytest.mark.slow
def test_wrong_weights_and_a_cache_that_is_kept_are_refused(policies: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases A24, A25, F09: vLLM's own weight update says nothing and is wrong where embeddings are tied; the probe refuses what it leaves."""
    import vllm

    assert causal_lm.load_module(policies[0] / "modules" / "policy").config.tie_word_embeddings
    old, new = (probe.expectation(policy, "float32") for policy in policies[:2])
    with Vllm(dtype="float32").open(policies[0], 1) as engine:
        assert probe.check(engine, old, "float32") < 1e-5
        with pytest.raises(EngineError, match="other weights, or counted otherwise"):
            probe.check(engine, new, "float32")
        assert engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(policies[1] / "modules" / "policy")}) == [None]
        assert engine.llm.reset_prefix_cache()
        for expected in (old, new):
            with pytest.raises(EngineError, match=r"log-probs of drawn tokens are not those of the policy folder"):
                probe.check(engine, expected, "float32")
        with pytest.raises(EngineError, match=r"vLLM reads its weights from a policy folder; got 1 tensors"):
            engine.load({"weight": torch.zeros(1)})
        assert engine.max_length == 128
        monkeypatch.setattr(vllm.LLM, "reset_prefix_cache", lambda self: "not supported")
        with pytest.raises(EngineError, match="vLLM did not empty its prefix cache; got 'not supported'; accepted: True"):
            engine.load(policies[1])
        with pytest.raises(EngineError, match="the engine is closed"):
            engine.submit(QUEUED)
    with pytest.raises(EngineError, match=r"vLLM does not start; got .*4096"):
        Vllm(dtype="float32", max_model_len=4096).open(policies[0], 1)


def test_more_copies_in_one_process_are_refused() -> None:
    with pytest.raises(ValidationError, match="data_parallel_size 2 needs served: server"):
        Vllm(data_parallel_size=2)


def test_engine_configs_import_neither_torch_nor_vllm() -> None:
    code = "import sys, rlpipe.engines; sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'transformers', 'pyarrow')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
