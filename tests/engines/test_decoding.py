"""Continuous batching, partial attempts, weights from memory and families that decode row by row."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlpipe.engines import Begun, Completion, Request, Sampling, Torch, decoding, padded, tree_model
from rlpipe.engines.cached_attention import Pass, Unfit
from rlpipe.engines.torch_engine import TorchEngine
from rlpipe.errors import EngineError
from rlpipe.policies import causal_lm
from tests.engines.conftest import FAMILIES


def engine_of(policy: Path, **config: object) -> TorchEngine:
    engine = Torch(**{"dtype": "float32"} | config).open(policy, 1)  # type: ignore[arg-type]
    assert isinstance(engine, TorchEngine)
    return engine


def requests(temperature: float = 1.0, new: int = 10) -> list[Request]:
    """Five prompts of 22 to 42 tokens, 20 of them common, three attempts each."""
    rng = np.random.default_rng(0)
    head = rng.integers(1, 47, 20)
    prompts = [np.concatenate([head, rng.integers(1, 47, 2 + 5 * i)]).astype(np.int32) for i in range(5)]
    return [Request(f"r{i}", prompt, (10 * i, 10 * i + 1, 10 * i + 2), Sampling(new, temperature)) for i, prompt in enumerate(prompts)]


Found = dict[tuple[str, int], Completion]


def complete(engine: TorchEngine, queued: list[Request]) -> Found:
    engine.submit(queued)
    return {(c.request_id, c.index): c for c in engine.stream()}


def assert_same(found: Found, expected: Found) -> None:
    assert found.keys() == expected.keys()
    for key, completion in expected.items():
        assert found[key].token_ids.tolist() == completion.token_ids.tolist()
        assert found[key].finish_reason == completion.finish_reason
        np.testing.assert_allclose(found[key].logprobs, completion.logprobs, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_known_families_share_what_is_common(policies: dict[str, Path], family: str) -> None:
    with engine_of(policies[family]) as engine:
        assert engine._tree is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_does_not_fit_gets_the_same_row_by_row(policies: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(policies[family]) as engine:
        expected, scored = complete(engine, requests()), engine.logprobs([np.arange(20, dtype=np.int32)])

    def refuse(self: object) -> None:
        raise Unfit("another attention")

    monkeypatch.setattr(tree_model.TreeModel, "_check", refuse)
    for limit in (None, 160):
        with engine_of(policies[family], max_tokens_in_flight=limit) as engine:
            assert engine._tree is None
            assert_same(complete(engine, requests()), expected)
            np.testing.assert_allclose(engine.logprobs([np.arange(20, dtype=np.int32)])[0], scored[0], atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
def test_a21_sampled_logprobs_are_the_trainers(policies: dict[str, Path], temperature: float) -> None:
    """Case A21: log-softmax(logits / temperature) on both sides, in float32 within 1e-4."""
    from rlpipe.policies.packing import ScoredSequence, collate, pack

    queued = requests(temperature)
    with engine_of(policies["llama"]) as engine:
        found = complete(engine, queued)
    module = causal_lm.load_module(policies["llama"] / "modules" / "policy")
    for request in queued:
        completion = found[request.request_id, 1]
        ids = np.concatenate([request.prompt_ids, completion.token_ids])
        scored = np.arange(len(ids)) >= len(request.prompt_ids)
        with torch.no_grad():
            trainers = causal_lm.evaluate(module, collate(pack([ScoredSequence(ids, scored, np.full(len(ids), temperature))], 64, True))).logprobs
        np.testing.assert_allclose(completion.logprobs, trainers.numpy(), atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_attempts_enter_as_others_leave_and_the_limit_holds(policies: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(policies[family]) as engine:
        expected = complete(engine, requests())
    held: list[tuple[int, int]] = []
    admit = decoding.Batch._admit

    def watched(batch: decoding.Batch, entering: decoding.Entering) -> list[Completion]:
        ended = admit(batch, entering)
        prompts = {id(attempt.group): len(attempt.group.rest) for attempt in batch.attempts}
        held.append((batch.in_flight, len(batch.shared_ids) + sum(prompts.values()) + 10 * len(batch.attempts)))
        return ended

    monkeypatch.setattr(decoding.Batch, "_admit", watched)
    with engine_of(policies[family], max_tokens_in_flight=90) as engine:
        assert_same(complete(engine, requests()), expected)
    assert all(told >= counted for told, counted in held)
    assert 60 <= max(told for told, _ in held) <= 90
    assert len(held) < sum(len(completion.token_ids) for completion in expected.values()) / 2


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_long_prompt_is_computed_in_pieces(policies: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    hidden = tree_model.TreeModel.hidden

    def watched(model: tree_model.TreeModel, tokens: Pass) -> torch.Tensor:
        sizes.append(len(tokens.ids))
        return hidden(model, tokens)

    with engine_of(policies[family]) as engine:
        expected = complete(engine, requests())
        monkeypatch.setattr(decoding, "TOKENS_PER_PASS", 7)
        monkeypatch.setattr(tree_model.TreeModel, "hidden", watched)
        assert_same(complete(engine, requests()), expected)
    assert sizes[:12] == [7] * 11 + [3]  # 20 common tokens and 2 + 7 + 12 + 17 + 22


@pytest.mark.parametrize("family", FAMILIES)
def test_begun_attempts_go_on_as_if_never_stopped(policies: dict[str, Path], family: str) -> None:
    with engine_of(policies[family]) as engine:
        whole = complete(engine, requests())
        parts = [{key: completion for key, completion in whole.items() if key[0] == request.request_id} for request in requests()]
        cut = [
            Request(
                r.request_id,
                r.prompt_ids,
                r.seeds,
                r.sampling,
                tuple(Begun(p[r.request_id, i].token_ids[:n], p[r.request_id, i].logprobs[:n]) for i, n in enumerate((0, 4, 7))),
            )
            for r, p in zip(requests(), parts, strict=True)
        ]
        found = complete(engine, cut)
    assert_same(found, whole)
    for key, completion in found.items():
        kept = (0, 4, 7)[key[1]]
        assert completion.logprobs[:kept].tobytes() == whole[key].logprobs[:kept].tobytes()


def test_an_attempt_begun_with_all_its_tokens_is_done(policies: dict[str, Path]) -> None:
    whole = Begun(np.array([5, 6], dtype=np.int32), np.array([-0.5, -1.5], dtype=np.float32))
    with engine_of(policies["llama"]) as engine:
        found = complete(engine, [Request("a", np.array([1, 2], dtype=np.int32), (1,), Sampling(2, 1.0), (whole,))])["a", 0]
    assert (found.token_ids.tolist(), found.logprobs.tolist(), found.finish_reason) == ([5, 6], [-0.5, -1.5], "length")


def test_begun_attempts_that_are_not_one_a_seed_are_refused(policies: dict[str, Path]) -> None:
    nothing = Begun(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))
    with engine_of(policies["llama"]) as engine:
        found = complete(engine, [Request("a", np.array([1, 2], dtype=np.int32), (1, 2), Sampling(2, 1.0), (nothing,))])
    assert {completion.error for completion in found.values()} == {"1 begun attempts for 2 seeds"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("from_memory", [False, True])
def test_a24_a25_loaded_weights_give_a_fresh_engines_output(policies: dict[str, Path], from_memory: bool, dtype: str) -> None:
    """Cases A24 and A25: the same prompts before and after a load; nothing of the old weights is left."""
    with engine_of(policies["other"], dtype=dtype) as fresh:
        expected = complete(fresh, requests())
    with engine_of(policies["llama"], dtype=dtype) as engine:
        before = complete(engine, requests())
        named = dict(causal_lm.load_module(policies["other"] / "modules" / "policy").named_parameters())
        engine.load(named if from_memory else policies["other"])
        after = complete(engine, requests())
    assert {key: c.logprobs.tobytes() for key, c in after.items()} == {key: c.logprobs.tobytes() for key, c in expected.items()}
    assert {key: c.logprobs.tobytes() for key, c in after.items()} != {key: c.logprobs.tobytes() for key, c in before.items()}


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_weights_from_memory_reach_every_layer(policies: dict[str, Path], family: str) -> None:
    named = {name: parameter.detach() * 1.5 for name, parameter in causal_lm.load_module(policies[family] / "modules" / "policy").named_parameters()}
    module = causal_lm.load_module(policies[family] / "modules" / "policy")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(named[name])
        logits = module(torch.arange(1, 9)[None]).logits[0]
    with engine_of(policies[family]) as engine:
        engine.load(named)
        (found,) = engine.logprobs([np.arange(1, 9, dtype=np.int32)])
    np.testing.assert_allclose(found[1:], logits.log_softmax(-1)[torch.arange(7), torch.arange(2, 9)].numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda w: w.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda w: w.update(surplus=torch.zeros(1)), "unknown: surplus"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(0)}), "of another shape: model.norm.weight"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(64, dtype=torch.int64)}), "not of numbers: model.norm.weight"),
    ],
)
def test_incomplete_weights_are_refused_and_change_nothing(policies: dict[str, Path], change: object, named: str) -> None:
    weights = {name: parameter.detach() for name, parameter in causal_lm.load_module(policies["other"] / "modules" / "policy").named_parameters()}
    change(weights)  # type: ignore[operator]
    ids = np.arange(1, 9, dtype=np.int32)
    with engine_of(policies["llama"]) as engine:
        (before,) = engine.logprobs([ids])
        with pytest.raises(EngineError, match=named):
            engine.load(weights)
        assert engine.logprobs([ids])[0].tobytes() == before.tobytes()


def test_a25_weights_cannot_change_under_running_attempts(policies: dict[str, Path]) -> None:
    """Case A25: what was computed with old weights lies in the cache of attempts that run."""
    with engine_of(policies["llama"]) as engine:
        engine.submit(requests())
        stream = engine.stream()
        next(stream)
        with pytest.raises(EngineError, match="while attempts are running"):
            engine.load(policies["other"])
        stream.close()
        engine.load(policies["other"])


def test_a24_a_closed_engine_takes_no_weights_and_generates_nothing(policies: dict[str, Path]) -> None:
    """Case A24: an engine that has given up its weights does not answer from what is left."""
    engine = engine_of(policies["llama"])
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.load(policies["other"])
    engine.submit(requests())
    with pytest.raises(EngineError, match="closed"):
        next(engine.stream())


def test_f07_the_same_requests_twice_give_equal_bytes_with_a_limit(policies: dict[str, Path]) -> None:
    """Case F07."""
    found = []
    for _ in range(2):
        with engine_of(policies["llama"], max_tokens_in_flight=100, chunk_groups=3) as engine:
            engine.submit(requests())
            found.append([(c.request_id, c.index, c.token_ids.tobytes(), c.logprobs.tobytes()) for c in engine.stream()])
    assert found[0] == found[1]


def test_a_prompt_over_the_tokens_in_flight_is_refused_alone(policies: dict[str, Path]) -> None:
    with engine_of(policies["llama"], max_tokens_in_flight=40) as engine:
        assert engine.max_length == 40
        found = complete(engine, requests())
    assert {name: found[name, 0].finish_reason == "error" for name in ("r0", "r1", "r2", "r3", "r4")} == {
        "r0": False,
        "r1": False,
        "r2": True,
        "r3": True,
        "r4": True,
    }


def test_an_abort_gives_back_what_was_begun(policies: dict[str, Path]) -> None:
    begun = Begun(np.array([5, 6], dtype=np.int32), np.array([-0.5, -1.5], dtype=np.float32))
    with engine_of(policies["llama"]) as engine:
        engine.submit([Request("a", np.array([1, 2], dtype=np.int32), (1,), Sampling(9, 1.0), (begun,))])
        engine.abort(["a"])
        (found,) = engine.stream()
    assert (found.token_ids.tolist(), found.finish_reason) == ([5, 6], "abort")


def test_a_window_hides_the_padding_of_no_row(policies: dict[str, Path]) -> None:
    assert padded.attention_window(causal_lm.load_module(policies["mistral"] / "modules" / "policy").config) == 8
