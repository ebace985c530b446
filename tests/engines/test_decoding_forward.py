"""Llama, Mistral and Qwen2 are computed by a forward of the engine's own, the other families by transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlpipe.engines import Torch
from rlpipe.engines.torch_engine import TorchEngine
from rlpipe.policies import causal_lm
from tests.factories import tiny_model

IDS = np.arange(1, 30, dtype=np.int32)


def engine_of(folder: Path, family: str, dtype: str = "float32") -> TorchEngine:
    tiny_model(folder / "modules" / "policy", family)
    engine = Torch(dtype=dtype).open(folder, 1)  # type: ignore[arg-type]
    assert isinstance(engine, TorchEngine)
    return engine


@pytest.mark.parametrize(("family", "direct"), [("llama", True), ("mistral", True), ("qwen2", True), ("gpt2", False)])
def test_families_of_llamas_structure_have_a_forward_of_their_own(tmp_path: Path, family: str, direct: bool) -> None:
    with engine_of(tmp_path, family) as engine:
        assert engine._tree is not None
        assert (engine._tree.direct is not None) is direct


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize(("dtype", "gap"), [("float32", 1e-5), ("bfloat16", 1e-5)])
def test_it_gives_what_the_modules_give(tmp_path: Path, family: str, dtype: str, gap: float) -> None:
    with engine_of(tmp_path, family, dtype) as engine:
        assert engine._tree is not None
        (direct,) = engine.logprobs([IDS])
        engine._tree.direct = None
        (modules,) = engine.logprobs([IDS])
    np.testing.assert_allclose(direct[1:], modules[1:], atol=gap)


def test_a_model_with_weights_that_disagree_goes_through_the_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.engines.llama_forward.LlamaForward._normed", lambda self, hidden, weight, dtype: hidden.to(dtype))
    with engine_of(tmp_path, "llama") as engine:
        assert engine._tree is not None
        assert engine._tree.direct is None


def test_biases_and_weights_from_memory_reach_the_stacked_products(tmp_path: Path) -> None:
    with engine_of(tmp_path, "qwen2") as engine:
        module = causal_lm.load_module(tmp_path / "modules" / "policy")
        generator = torch.Generator().manual_seed(1)
        named = {name: parameter.detach() + torch.randn(parameter.shape, generator=generator) / 20 for name, parameter in module.named_parameters()}
        engine.load(named)
        (found,) = engine.logprobs([IDS])
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(named[name])
        logprobs = module(torch.from_numpy(IDS.astype(np.int64))[None]).logits[0].log_softmax(-1)
    np.testing.assert_allclose(found[1:], logprobs[torch.arange(28), torch.from_numpy(IDS[1:].astype(np.int64))].numpy(), atol=1e-4)
