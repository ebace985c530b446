"""The torch engine against a plain transformers forward of the same ids, and its bookkeeping."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlpipe.engines import Completion, Request, Sampling, Torch
from rlpipe.engines.base import Begun
from rlpipe.engines.decoding import common_prefix
from rlpipe.engines.padded import left_padded
from rlpipe.engines.sampling import draw, uniforms
from rlpipe.errors import ConfigError, EngineError
from rlpipe.policies import causal_lm
from tests.engines.conftest import FAMILIES
from tests.factories import tiny_model


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def requests(num: int = 4, attempts: int = 3, temperature: float = 1.0, shared: int = 5, new: int = 12) -> list[Request]:
    """Prompts of unequal length that begin with `shared` equal tokens, the pad id among them."""
    rng = np.random.default_rng(0)
    head = rng.integers(0, 47, shared)
    prompts = [np.concatenate([head, rng.integers(0, 47, 3 + 2 * i)]).astype(np.int32) for i in range(num)]
    return [Request(f"r{i}", prompt, tuple(range(10 * i, 10 * i + attempts)), Sampling(new, temperature)) for i, prompt in enumerate(prompts)]


def complete(policy: Path, queued: list[Request], **config: object) -> dict[tuple[str, int], Completion]:
    with Torch(**{"dtype": "float32", "chunk_groups": 4} | config).open(policy, 1) as engine:  # type: ignore[arg-type]
        engine.submit(queued)
        return {(c.request_id, c.index): c for c in engine.stream()}


def plain_logprobs(policy: Path, sequence: np.ndarray, temperature: float) -> np.ndarray:
    model = causal_lm.load_module(policy / "modules" / "policy", torch.float32)
    with torch.inference_mode():
        logits = model(torch.from_numpy(sequence.astype(np.int64))[None]).logits[0]
    logprobs = torch.log_softmax(logits / temperature, dim=-1).numpy()
    return logprobs[np.arange(len(sequence) - 1), sequence[1:]]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("shared", [5, 0])
def test_sampled_logprobs_are_those_of_a_plain_forward(policies: dict[str, Path], family: str, temperature: float, shared: int) -> None:
    queued = requests(temperature=temperature, shared=shared)
    found = complete(policies[family], queued)
    assert len(found) == 12
    for request in queued:
        for index in range(3):
            completion = found[request.request_id, index]
            expected = plain_logprobs(policies[family], np.concatenate([request.prompt_ids, completion.token_ids]), temperature or 1.0)
            np.testing.assert_allclose(completion.logprobs, expected[len(request.prompt_ids) - 1 :], atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_given_sequences_are_those_of_a_plain_forward(policies: dict[str, Path], family: str) -> None:
    sequences = [ids(5, 0, 0, 7, 46), ids(3), ids(0, 7, 8, 0, 9, 1, 2, 3, 4, 5, 6, 7, 8), ids(1, 2)]
    with Torch(dtype="float32").open(policies[family], 1) as engine:
        found = engine.logprobs(sequences, temperature=0.7)
    for sequence, logprobs in zip(sequences, found, strict=True):
        assert logprobs.shape == sequence.shape
        assert np.isnan(logprobs[0])
        np.testing.assert_allclose(logprobs[1:], plain_logprobs(policies[family], sequence, 0.7), atol=1e-4)


def test_greedy_takes_the_likeliest_token(policies: dict[str, Path]) -> None:
    (request, *_) = requests(1, 1, temperature=0.0)
    completion = complete(policies["llama"], [request])["r0", 0]
    model = causal_lm.load_module(policies["llama"] / "modules" / "policy", torch.float32)
    expected = model.generate(torch.from_numpy(request.prompt_ids.astype(np.int64))[None], max_new_tokens=12, do_sample=False)[0, len(request.prompt_ids) :]
    assert completion.token_ids.tolist() == expected.tolist()


def test_bfloat16_engine_computes_what_autocast_over_float32_weights_computes(policies: dict[str, Path]) -> None:
    sequence = ids(*range(1, 40))
    model = causal_lm.load_module(policies["llama"] / "modules" / "policy", torch.float32)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.from_numpy(sequence.astype(np.int64))[None]).logits[0].float()
    expected = torch.log_softmax(logits, dim=-1).numpy()[np.arange(38), sequence[1:]]
    with Torch(dtype="bfloat16").open(policies["llama"], 1) as engine:
        (found,) = engine.logprobs([sequence])
    np.testing.assert_array_equal(found[1:], expected)


def test_a21_temperature_divides_the_logits() -> None:
    """Case A21."""
    logits = torch.tensor([[2.0, 0.0]])
    token, logprob = draw(logits, torch.tensor([0.5]), torch.tensor([0.0], dtype=torch.float64))
    assert token.item() == 0
    assert logprob.item() == pytest.approx(-0.018150, abs=1e-6)


def test_inverse_cdf_by_hand() -> None:
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log().repeat(5, 1)
    uniform = torch.tensor([0.0, 0.59, 0.61, 0.91, 1.0 - 2**-53], dtype=torch.float64)
    tokens, logprobs = draw(logits, torch.ones(5), uniform)
    assert tokens.tolist() == [0, 0, 1, 2, 2]
    np.testing.assert_allclose(logprobs.exp(), [0.6, 0.6, 0.3, 0.1, 0.1], atol=1e-6)


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).repeat(2, 1)
    tokens, _ = draw(logits, torch.ones(2), torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64))
    assert tokens.tolist() == [1, 1]


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    uniform = torch.from_numpy(uniforms(7, 20000))
    tokens, _ = draw(probabilities.log().repeat(20000, 1), torch.ones(20000), uniform)
    np.testing.assert_allclose(np.bincount(tokens.numpy(), minlength=4) / 20000, probabilities, atol=0.015)


def test_a42_each_attempt_has_its_own_stream_and_the_seed_reaches_it(policies: dict[str, Path]) -> None:
    prompt = ids(5, 6, 7)
    first = complete(policies["llama"], [Request("a", prompt, (1, 2, 3, 4), Sampling(12, 1.0))])
    second = complete(policies["llama"], [Request("a", prompt, (5, 6, 7, 8), Sampling(12, 1.0))])
    texts = [tuple(c.token_ids.tolist()) for c in (*first.values(), *second.values())]
    assert len(set(texts)) == 8


def test_a42_a_stream_does_not_depend_on_what_runs_beside_it(policies: dict[str, Path]) -> None:
    queued = requests()
    together, alone = complete(policies["llama"], queued), complete(policies["llama"], queued, chunk_groups=1)
    for key, completion in together.items():
        assert completion.token_ids.tolist() == alone[key].token_ids.tolist()
        np.testing.assert_allclose(completion.logprobs, alone[key].logprobs, atol=1e-4)


def test_equal_submissions_give_equal_bytes(policies: dict[str, Path]) -> None:
    first, second = complete(policies["llama"], requests(6)), complete(policies["llama"], requests(6))
    assert [c.logprobs.tobytes() for c in first.values()] == [c.logprobs.tobytes() for c in second.values()]


def test_a_shorter_stream_is_a_prefix() -> None:
    assert uniforms(3, 4).tolist() == uniforms(3, 9)[:4].tolist()


def test_a54_masks_come_from_lengths() -> None:
    """Case A54."""
    tokens, mask = left_padded([ids(0, 7), ids(0, 0, 0, 5)])
    assert tokens.tolist() == [[0, 0, 0, 7], [0, 0, 0, 5]]
    assert mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_a54_a_prompt_that_begins_with_the_pad_id_sees_it(policies: dict[str, Path]) -> None:
    """Case A54."""
    queued = [Request("a", ids(0, 7), (1,), Sampling(6, 1.0)), Request("b", ids(3, 4, 5, 6), (2,), Sampling(6, 1.0))]
    for (name, _), completion in complete(policies["llama"], queued).items():
        prompt = {"a": ids(0, 7), "b": ids(3, 4, 5, 6)}[name]
        expected = plain_logprobs(policies["llama"], np.concatenate([prompt, completion.token_ids]), 1.0)
        np.testing.assert_allclose(completion.logprobs, expected[len(prompt) - 1 :], atol=1e-4)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [([[1, 2, 3], [1, 2, 4]], 2), ([[1, 2, 3]], 2), ([[1, 2], [1, 2, 3]], 1), ([[1], [2]], 0), ([[1, 2], [1, 2]], 1)],
)
def test_common_prefix_leaves_each_prompt_a_token(prompts: list[list[int]], expected: int) -> None:
    assert common_prefix([ids(*prompt) for prompt in prompts]) == expected


def test_f05_a_prompt_over_the_length_is_refused_alone(policies: dict[str, Path]) -> None:
    """Case F05."""
    sampling = Sampling(8, 1.0)
    queued = [Request("a", ids(1, 2), (1,), sampling), Request("long", ids(*[1] * 125), (2, 3), sampling), Request("c", ids(3, 4), (4,), sampling)]
    found = complete(policies["llama"], queued)
    assert set(found) == {("a", 0), ("long", 0), ("long", 1), ("c", 0)}
    assert found["long", 0].finish_reason == "error"
    assert found["long", 0].error == "a prompt of 125 tokens and 8 new ones are over the model's length of 128"
    assert len(found["a", 0].token_ids) > 0
    assert len(found["c", 0].token_ids) > 0


def test_a19_an_end_id_that_is_not_the_tokenizers_stops_and_the_last_token_may_be_eos_by_length(policies: dict[str, Path]) -> None:
    """Case A19."""
    unended = complete(policies["llama"], [Request("a", ids(5, 6), (1,), Sampling(12, 1.0))])["a", 0]
    marker = int(unended.token_ids[3])
    ended = complete(policies["llama"], [Request("a", ids(5, 6), (1,), Sampling(12, 1.0, stop_token_ids=(marker,)))])["a", 0]
    assert (ended.finish_reason, int(ended.token_ids[-1])) == ("stop", marker)
    assert ended.token_ids.tolist() == unended.token_ids[: len(ended.token_ids)].tolist()


def test_stop_texts_keep_the_token_that_completes_them(policies: dict[str, Path]) -> None:
    tokenizer = causal_lm.load_tokenizer(policies["llama"] / "modules" / "policy")
    unended = complete(policies["llama"], [Request("a", ids(5, 6), (1,), Sampling(12, 1.0))])["a", 0]
    stop = tokenizer.decode(unended.token_ids[4:6].tolist())
    ended = complete(policies["llama"], [Request("a", ids(5, 6), (1,), Sampling(12, 1.0, stop=(stop,)))])["a", 0]
    assert ended.finish_reason == "stop"
    assert tokenizer.decode(ended.token_ids.tolist()).endswith(stop)
    assert ended.token_ids.tolist() == unended.token_ids[: len(ended.token_ids)].tolist()


def test_abort_ends_running_and_queued_attempts(policies: dict[str, Path]) -> None:
    sampling = Sampling(100, 1.0)
    queued = [Request(name, ids(1, 2), (i,), sampling) for i, name in enumerate("abc")]
    with Torch(dtype="float32", chunk_groups=3).open(policies["gpt2"], 1) as engine:
        engine.submit([*queued, Request("short", ids(1, 2), (9,), Sampling(1, 1.0))])
        engine.abort(["b"])
        reasons = {}
        for completion in engine.stream():
            reasons[completion.request_id] = completion.finish_reason
            engine.abort(["a", "c"])
    assert reasons["b"] == "abort"
    assert reasons["short"] == "length"
    assert "abort" in (reasons["a"], reasons["c"])


def test_load_replaces_the_weights(policies: dict[str, Path], tmp_path: Path) -> None:
    tiny_model(tmp_path / "modules" / "policy", seed=1)
    with Torch(dtype="float32").open(policies["llama"], 1) as engine:
        before = engine.logprobs([ids(1, 2, 3)])[0]
        engine.load(tmp_path)
        after = engine.logprobs([ids(1, 2, 3)])[0]
    np.testing.assert_allclose(after[1:], plain_logprobs(tmp_path, ids(1, 2, 3), 1.0), atol=1e-4)
    assert not np.allclose(before[1:], after[1:])


def test_a_model_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "modules" / "policy")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        Torch().open(tmp_path, 1)


def test_a_closed_engine_says_so(policies: dict[str, Path]) -> None:
    engine = Torch().open(policies["llama"], 1)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.logprobs([ids(1, 2)])


def test_a_request_that_no_model_could_serve_leaves_the_others_alone(policies: dict[str, Path]) -> None:
    good = Request("good", ids(3, 4), (1,), Sampling(2, 1.0))
    bad = [Request("unknown id", ids(3, 200), (1,), Sampling(2, 1.0)), Request("nothing wanted", ids(3), (1,), Sampling(0, 1.0))]
    found = complete(policies["llama"], [bad[0], good, bad[1]])
    assert {name: completion.finish_reason for (name, _), completion in found.items()} == {"unknown id": "error", "good": "length", "nothing wanted": "error"}
    assert found["unknown id", 0].error == "the prompt holds token id 200, the model knows 0 to 46"


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Request("bad", ids(3), (1,), Sampling(2, -1.0)), "the temperature is -1.0"),
        (Request("bad", ids(3), (1,), Sampling(2, float("nan"))), "the temperature is nan"),
        (Request("bad", ids(3), (-1,), Sampling(2, 1.0)), "the seed -1 is outside"),
        (Request("bad", ids(3), (1,), Sampling(2, 1.0), (Begun(ids(99), np.zeros(1, np.float32)),)), "holds a token id outside of 0 to 46"),
        (Request("bad", ids(3), (1,), Sampling(2, 1.0), (Begun(ids(4, 5), np.zeros(1, np.float32)),)), "2 tokens and 1 log-probs"),
        (Request("bad", ids(3), (1,), Sampling(2, 1.0), (Begun(ids(4, 5, 6), np.zeros(3, np.float32)),)), "has 3 tokens, max_new_tokens is 2"),
    ],
)
def test_a_wrong_request_of_any_kind_ends_alone(policies: dict[str, Path], bad: Request, why: str) -> None:
    found = complete(policies["llama"], [bad, Request("good", ids(3, 4), (1,), Sampling(2, 1.0))])
    assert (found["bad", 0].finish_reason, found["good", 0].finish_reason) == ("error", "length")
    assert why in str(found["bad", 0].error)


def test_an_abort_of_what_is_not_there_is_forgotten(policies: dict[str, Path]) -> None:
    with Torch(dtype="float32").open(policies["llama"], 1) as engine:
        engine.abort(["later"])
        engine.submit([Request("later", ids(3, 4), (1,), Sampling(2, 1.0))])
        assert [completion.finish_reason for completion in engine.stream()] == ["length"]


def test_a45_a_load_that_failed_can_be_tried_again(policies: dict[str, Path], tmp_path: Path) -> None:
    """Case A45: a folder that cannot be read leaves an engine that generates nothing until another load succeeds."""
    with Torch(dtype="float32").open(policies["llama"], 1) as engine:
        with pytest.raises(ConfigError):
            engine.load(tmp_path)
        with pytest.raises(EngineError, match="holds no weights"):
            list(engine.logprobs([ids(1, 2)]))
        engine.load(policies["llama"])
        assert engine.logprobs([ids(1, 2)])[0].shape == (2,)


def test_logits_that_are_not_finite_are_an_error_and_no_token() -> None:
    with pytest.raises(EngineError, match="logits are not finite"):
        draw(torch.tensor([[0.0, float("nan")]]), torch.tensor([1.0]), torch.tensor([0.5], dtype=torch.float64))
