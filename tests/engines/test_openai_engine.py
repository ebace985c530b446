"""The client of OpenAI-compatible servers against a small one with faults."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlpipe import artifact, dataset, params, tasks
from rlpipe.engines import Begun, Completion, OpenAI, Request, Sampling
from rlpipe.engines.base import Engine
from rlpipe.engines.openai_client import CalledOff, Client, retry_after
from rlpipe.engines.openai_engine import served_model
from rlpipe.errors import ConfigError, EngineError
from rlpipe.params import Run
from rlpipe.policies.causal_lm import load_tokenizer
from rlpipe.reward import history
from rlpipe.rollout.step import Config, initial_progress, run
from rlpipe.tasks import Task
from tests.engines.openai_server import MODEL, OpenAIServer, serving
from tests.factories import tiny_policy

KEY = "key-of-the-tests-1234"


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("policies")
    return tiny_policy(root / "1", seed=0, version=1), tiny_policy(root / "2", seed=1, version=2)


@pytest.fixture
def server(policies: tuple[Path, Path]) -> Iterator[OpenAIServer]:
    with serving(policies[0]) as found:
        yield found


def opened(server: OpenAIServer, policies: tuple[Path, Path], **changed: Any) -> Engine:
    settings = {"dtype": "float32", "probe": False, "timeout_seconds": 5, "retries": 1, **changed}
    return OpenAI(base_url=server.url, **settings).open(policies[0])


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def ask(engine: Engine, *requests: Request) -> dict[tuple[str, int], Completion]:
    engine.submit(requests)
    return {(completion.request_id, completion.index): completion for completion in engine.stream()}


HOT = Request("hot", ids(1, 2, 3), (11, 12), Sampling(6, 1.0))
COOL = Request("cool", ids(4, 5), (13,), Sampling(6, 0.7))


def test_completions_carry_the_ids_and_logprobs_of_the_server(server: OpenAIServer, policies: tuple[Path, Path]) -> None:
    """Case A21: log-softmax(logits / temperature) of each token, at 1, 0.7 and 1.3; the vocabulary is whole whatever the server's defaults."""
    requests = [HOT, COOL, Request("warm", ids(7, 8, 9), (14,), Sampling(6, 1.3))]
    with opened(server, policies, probe=True) as engine:
        server.asked.clear()
        found = ask(engine, *requests)
        assert engine.max_length == 64
        assert 0 <= engine.logprob_gap < 1e-5  # type: ignore[attr-defined]
        scored = engine.logprobs([np.concatenate([HOT.prompt_ids, found["hot", 0].token_ids])])[0]
    assert sorted(found) == [("cool", 0), ("hot", 0), ("hot", 1), ("warm", 0)]
    np.testing.assert_allclose(found["hot", 0].logprobs, scored[3:], atol=1e-5)
    assert np.isnan(scored[0])
    for request in requests:
        for body in (body for body in server.asked if body["prompt"] == request.prompt_ids.tolist() and "echo" not in body):
            assert (body["temperature"], body["max_tokens"], body["seed"] in request.seeds) == (request.sampling.temperature, 6, True)
            assert (body["top_p"], body["top_k"], body["min_p"], body["repetition_penalty"], body["stop_token_ids"]) == (1.0, -1, 0.0, 1.0, [0])
    for completion in found.values():
        assert completion.finish_reason == ("stop" if completion.token_ids[-1] == 0 else "length")
        assert completion.token_ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32


def test_f05_answers_out_of_order_find_their_request_and_a_prompt_too_long_is_refused_alone(server: OpenAIServer, policies: tuple[Path, Path]) -> None:
    """Case F05."""
    with opened(server, policies) as engine:
        plain = ask(engine, HOT, COOL)
        server.faults[11] = ["hold"]
        engine.submit([HOT, Request("long", ids(*[1] * 60), (15,), Sampling(6, 1.0)), COOL])
        order = []
        for completion in engine.stream():
            order.append((completion.request_id, completion.index))
            if len(order) == 3:
                server.released.set()
            if completion.request_id != "long":
                assert completion.token_ids.tolist() == plain[order[-1]].token_ids.tolist()
            else:
                assert completion.error == "a prompt of 60 tokens and 6 new ones are over the model's length of 64"
    assert order[-1] == ("hot", 0)
    assert sorted(order) == [("cool", 0), ("hot", 0), ("hot", 1), ("long", 0)]


@pytest.mark.parametrize("fault", ["429", "500", "drop", "truncated", "not JSON", "hold"])
def test_a_try_that_comes_to_nothing_is_made_again(server: OpenAIServer, policies: tuple[Path, Path], fault: str) -> None:
    with opened(server, policies, timeout_seconds=1 if fault == "hold" else 30) as engine:
        plain = ask(engine, HOT)
        server.faults[12] = [fault]
        again = ask(engine, HOT)
    assert [again["hot", i].token_ids.tolist() for i in (0, 1)] == [plain["hot", i].token_ids.tolist() for i in (0, 1)]
    assert [body["seed"] for body in server.asked].count(12) == 3


@pytest.mark.parametrize(
    ("faults", "said", "tries"),
    [
        (["500", "500"], "no answer in 2 tries, the last time: status 500", 2),
        (["drop", "not JSON"], "no answer in 2 tries, the last time: the answer is not JSON: <html>", 2),
        (["429 later"], "the server asks to wait 3600 s, longer than the time limit of 30 s", 1),
        (["400"], "the server refuses the request with status 400", 1),
        (["odd reason"], "the engine ended it as content_filter", 1),
    ],
)
def test_a_request_that_fails_at_last_leaves_the_others_alone(
    server: OpenAIServer, policies: tuple[Path, Path], faults: list[str], said: str, tries: int
) -> None:
    with opened(server, policies, timeout_seconds=30) as engine:
        server.faults[12] = list(faults)
        found = ask(engine, HOT, COOL)
    assert {name: completion.finish_reason == "error" for name, completion in found.items()} == {("hot", 0): False, ("hot", 1): True, ("cool", 0): False}
    assert said in (found["hot", 1].error or "")
    assert [body["seed"] for body in server.asked].count(12) == tries


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("no ids", "the server returns no token ids"),
        ("no logprobs", "the server returns no log-prob for each token that it drew"),
        ("short", "the server returns another number of log-probs than of tokens; got 5 for 6 tokens"),
    ],
)
def test_a_server_that_does_not_say_what_it_drew_is_refused(server: OpenAIServer, policies: tuple[Path, Path], fault: str, said: str) -> None:
    server.faults[None] = [fault] * 8
    with opened(server, policies) as engine, pytest.raises(EngineError, match=said):
        ask(engine, HOT)
    server.faults[None] = [fault] * 8
    with pytest.raises(EngineError, match="the server returns"):
        opened(server, policies, probe=True)


@pytest.mark.parametrize(("status", "do"), [("401", "api_key_env"), ("403", "api_key_env"), ("404", "engine.base_url"), ("moved", "engine.base_url")])
def test_what_no_request_can_mend_is_not_tried_again_and_repeats_no_key(
    server: OpenAIServer, policies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, status: str, do: str
) -> None:
    monkeypatch.setenv("SERVER_CREDENTIAL", KEY)
    with opened(server, policies, api_key_env="SERVER_CREDENTIAL", retries=3) as engine:
        server.faults[11] = [status]
        with pytest.raises(EngineError) as refused:
            ask(engine, Request("one", ids(1), (11,), Sampling(2, 1.0)))
    assert server.headers[-1]["Authorization"] == f"Bearer {KEY}"
    assert len(server.asked) == 1
    assert do in str(refused.value)
    assert KEY not in str(refused.value) + repr(engine)
    server.faults["models"] = [status]
    with pytest.raises(EngineError) as refused:
        opened(server, policies, api_key_env="SERVER_CREDENTIAL")
    assert KEY not in str(refused.value)


def test_a_failed_request_repeats_no_key(server: OpenAIServer, policies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_CREDENTIAL", KEY)
    server.faults[12] = ["500", "500"]
    with opened(server, policies, api_key_env="SERVER_CREDENTIAL") as engine:
        error = ask(engine, HOT)["hot", 1].error or ""
    assert "Bearer ***" in error
    assert KEY not in error


@pytest.mark.parametrize("settings", [{"base_url": f"http://me:{KEY}@host/v1"}, {"base_url": f"http://host/v1?key={KEY}"}, {"api_key_env": f"sk-{KEY}"}])
def test_a_secret_in_the_section_is_refused_and_not_repeated(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"base_url must be|api_key_env must be") as refused:
        params.validated(Config, {"engine": {"type": "openai", "base_url": "http://host/v1"} | settings}, "rollout")
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("value", ["", "two words"])
def test_a_variable_without_a_usable_key_is_named(server: OpenAIServer, policies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SERVER_CREDENTIAL", value)
    with pytest.raises(EngineError, match="SERVER_CREDENTIAL holds no key") as refused:
        opened(server, policies, api_key_env="SERVER_CREDENTIAL")
    assert "two words" not in str(refused.value)


def test_a_server_that_is_not_there_or_serves_another_model_is_named(server: OpenAIServer, policies: tuple[Path, Path]) -> None:
    with pytest.raises(EngineError, match="does not serve this model; got other; accepted: policy"):
        opened(server, policies, model="other")
    config = OpenAI(base_url=server.url, model=MODEL)
    assert served_model(config, 5) == served_model(config.model_copy(update={"model": None}), 5) == MODEL
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(EngineError, match=f"{url} does not answer.*start the server"):
        OpenAI(base_url=url, retries=0).open(policies[0])


def test_the_server_must_hold_the_policy_and_count_as_training_does(server: OpenAIServer, policies: tuple[Path, Path]) -> None:
    """Cases A21, A24: other weights and log-probs before the temperature are refused, and nothing is generated after a refusal."""
    with opened(server, policies, probe=True) as engine:
        with pytest.raises(EngineError, match=r"log-probs of drawn tokens are not those of the policy folder"):
            engine.load(policies[1])
        with pytest.raises(EngineError, match="its server holds no verified policy"):
            engine.submit([HOT])
        server.load(policies[1])
        engine.load(policies[1])
        assert len(ask(engine, HOT)) == 2
        with pytest.raises(EngineError, match=r"reads its weights from a policy folder; got 1 tensors.*do: write a policy folder"):
            engine.load({"weight": None})  # type: ignore[dict-item]
    server.raw = True
    with pytest.raises(EngineError, match="counted otherwise"):
        OpenAI(base_url=server.url, dtype="float32").open(policies[1])


def test_a25_nothing_that_the_server_kept_from_before_a_load_is_used_after_it(server: OpenAIServer, policies: tuple[Path, Path]) -> None:
    """Case A25: a server finds prefixes in its cache only under the same salt, and every load takes a new one."""
    with opened(server, policies) as engine:
        ask(engine, HOT)
        engine.load(policies[0])
        ask(engine, HOT)
    salts = [body["cache_salt"] for body in server.asked]
    assert len(salts) == 4
    assert salts[0] == salts[1] != salts[2] == salts[3]


def test_no_more_is_asked_at_once_than_allowed(server: OpenAIServer, policies: tuple[Path, Path]) -> None:
    server.faults[None] = ["hold"] * 2
    with opened(server, policies, max_concurrency=2) as engine:
        threading.Timer(0.3, server.released.set).start()
        assert len(ask(engine, Request("many", ids(1, 2), tuple(range(20, 28)), Sampling(2, 1.0)))) == 8
    assert server.peak == 2


def test_aborted_and_closed_requests_end_while_the_server_still_works(server: OpenAIServer, policies: tuple[Path, Path]) -> None:
    server.faults[11] = server.faults[12] = ["hold"] * 2
    begun = Request("begun", ids(1, 2, 3), (11,), Sampling(6, 1.0), begun=(Begun(ids(5), np.float32([-1.5])),))
    server.faults[None] = ["hold"] * 2
    with opened(server, policies, timeout_seconds=600, retries=0) as engine:
        engine.submit([HOT, COOL, begun])
        engine.abort(["hot", "begun"])
        server.released.set()
        found = {(completion.request_id, completion.index): completion for completion in engine.stream()}
        server.released.clear()
        assert {name: completion.finish_reason for name, completion in found.items() if name[0] != "cool"} == dict.fromkeys(
            [("hot", 0), ("hot", 1), ("begun", 0)], "abort"
        )
        assert (found["hot", 0].token_ids.tolist(), found["begun", 0].token_ids.tolist()) == ([], [5])
        assert len(found["cool", 0].token_ids) == 6
        server.faults[None] = ["hold"]
        engine.submit([COOL])
    with pytest.raises(EngineError, match="closed"):
        engine.submit([COOL])


def test_a_begun_attempt_goes_on_after_its_tokens(server: OpenAIServer, policies: tuple[Path, Path]) -> None:
    had = Begun(ids(21, 22), np.float32([-0.5, -0.25]))
    whole = Begun(ids(1, 2, 3, 4, 5, 6), np.zeros(6, np.float32))
    with opened(server, policies) as engine:
        found = ask(engine, Request("on", ids(1, 2, 3), (11, 12), Sampling(6, 1.0), begun=(had, whole)))
    (body,) = server.asked
    assert body["prompt"] == [1, 2, 3, 21, 22]
    assert body["max_tokens"] == 4
    assert body["seed"] != 11
    assert found["on", 0].token_ids[:2].tolist() == [21, 22]
    assert found["on", 0].logprobs[:2].tolist() == [-0.5, -0.25]
    assert len(found["on", 0].token_ids) == len(found["on", 0].logprobs)
    assert (found["on", 1].token_ids.tolist(), found["on", 1].finish_reason) == ([1, 2, 3, 4, 5, 6], "length")


def test_a_stop_text_across_the_place_an_attempt_was_put_aside_at_ends_it(server: OpenAIServer, policies: tuple[Path, Path]) -> None:
    with opened(server, policies) as engine:
        had = Begun(ids(11), np.float32([-0.5]))  # "a"
        plain = ask(engine, Request("plain", ids(1, 2, 3), (11,), Sampling(6, 1.0), begun=(had,)))["plain", 0]
        text = "a" + load_tokenizer(policies[0] / "modules" / "policy").decode([int(plain.token_ids[1])], skip_special_tokens=False)
        stopped = ask(engine, Request("stop", ids(1, 2, 3), (11,), Sampling(6, 1.0, stop=(text,)), begun=(had,)))["stop", 0]
    assert len(plain.token_ids) > 2
    assert (stopped.token_ids.tolist(), stopped.finish_reason) == (plain.token_ids[:2].tolist(), "stop")


def test_a45_trajectories_carry_the_version_of_the_policy_that_was_verified(server: OpenAIServer, policies: tuple[Path, Path], tmp_path: Path) -> None:
    """Cases A24, A45: while the server holds version 1 nothing of round 2 is written; once it is loaded, every token carries version 2."""
    tasks.save(tmp_path / "tasks.jsonl", [Task(task_id=f"t{i}", prompt=f"max({i}, 1) =", reference="1") for i in range(3)])
    artifact.write_json(tmp_path / "progress_in" / "progress.json", initial_progress())
    artifact.write_json(tmp_path / "evaluation_in" / "evaluation.json", {"stop": {"met": False}})
    history.empty(tmp_path / "history_in")
    names = ("progress_in", "evaluation_in", "history_in", "trajectories", "progress")
    paths = {"policy": policies[1], "tasks": tmp_path / "tasks.jsonl", **{name: tmp_path / name for name in names}}
    for name in ("trajectories", "progress"):
        paths[name].mkdir()
    engine = OpenAI(base_url=server.url, dtype="float32", chunk_groups=2, retries=0)
    config = Config(run=Run(threads=1), engine=engine, num_tasks=3, num_attempts=2, max_new_tokens=3)
    with pytest.raises(EngineError, match="not those of the policy folder"):
        run(config, **paths, round_index=2)
    assert list(paths["trajectories"].iterdir()) == []
    server.load(policies[1])
    report = run(config, **paths, round_index=2)
    artifact.write_manifest(paths["trajectories"])
    rows = list(dataset.read(paths["trajectories"]))
    assert len(rows) == 6
    assert {span.policy_version for row in rows for span in row.spans if span.source == "policy"} == {2}
    assert report.facts["policy_versions"] == {"2": artifact.read_manifest(policies[1])["fingerprint"]}


def test_a_closed_client_asks_no_more(server: OpenAIServer) -> None:
    client = Client(server.url)
    assert json.dumps(client.ask("GET", "/models")).count(MODEL) == 1
    client.close()
    with pytest.raises(CalledOff):
        client.ask("GET", "/models")


@pytest.mark.parametrize(("value", "seconds"), [("2.5", 2.5), ("-1", 0.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("soon", None), (None, None)])
def test_a_wait_is_asked_for_in_seconds_or_as_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after(value) == seconds
