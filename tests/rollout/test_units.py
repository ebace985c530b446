"""Selector, config, builder and retries: nothing here loads a model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe import params
from rlpipe.engines import Completion, Request, Sampling
from rlpipe.errors import ConfigError
from rlpipe.rollout.building import Segment, assemble, attempt
from rlpipe.rollout.generate import Origin, generate
from rlpipe.rollout.prompts import Prompt, render
from rlpipe.rollout.section import Config
from rlpipe.rollout.selectors import Uniform, Visit
from rlpipe.tasks import Task
from rlpipe.trajectory import Span
from tests.factories import char_tokenizer


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def visits(num_tasks: int, budgets: Sequence[int], data_seed: int = 0) -> list[Visit]:
    selector, found = Uniform(), []
    state = selector.init()
    for budget in budgets:
        chosen, state = selector(state, [f"t{i}" for i in range(num_tasks)], budget, data_seed)
        assert len(chosen) == budget
        found += chosen
    return found


@given(num_tasks=st.integers(1, 12), data=st.data())
def test_no_task_twice_in_an_epoch_and_none_left_out(num_tasks: int, data: st.DataObject) -> None:
    budgets = data.draw(st.lists(st.integers(1, num_tasks), min_size=1, max_size=12))
    found = visits(num_tasks, budgets)
    assert len(set(found)) == len(found)
    for epoch in range(found[-1].visit):
        assert {visit.task_id for visit in found if visit.visit == epoch} == {f"t{i}" for i in range(num_tasks)}
    assert [visit.visit for visit in found] == sorted(visit.visit for visit in found)


@given(budgets=st.lists(st.integers(1, 7), min_size=1, max_size=8))
def test_the_order_does_not_depend_on_the_batch_size(budgets: list[int]) -> None:
    assert visits(7, budgets) == visits(7, [1] * sum(budgets))


def test_a42_the_data_seed_changes_the_order_and_nothing_else() -> None:
    first, second = visits(7, [7], data_seed=1), visits(7, [7], data_seed=2)
    assert first != second
    assert sorted(first) == sorted(second)


def test_another_task_set_begins_a_new_epoch() -> None:
    selector = Uniform()
    _, state = selector(selector.init(), ["a", "b", "c"], 2, 0)
    chosen, state = selector(state, ["a", "b", "d"], 2, 0)
    assert {visit.visit for visit in chosen} == {1}
    assert state["cursor"] == 2


def test_a_task_set_smaller_than_the_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a task set smaller than the batch; got 3 tasks; accepted: at least rollout\.num_tasks = 4"):
        visits(3, [4])


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.9), ("top_k", 50), ("min_p", 0.1)])
def test_a22_a_cut_vocabulary_is_refused_with_the_reason(name: str, value: float) -> None:
    """Case A22: top-p 0.9 among them."""
    with pytest.raises(ConfigError, match=rf"rollout.{name}: .*renormalise.*importance ratio.*leave {name} at"):
        params.section(Config, {"rollout": {name: value}}, "rollout")


def test_shared_sections_reach_the_config() -> None:
    raw = {"run": {"seed": 3}, "engine": {"type": "torch", "dtype": "float32", "chunk_groups": 2}, "rollout": {"num_tasks": 4}}
    config = params.section(Config, raw, "rollout")
    assert (config.run.seed, config.engine.chunk_groups, config.num_tasks, config.selector.type) == (3, 2, 4, "uniform")


def test_a53_context_tokens_are_not_trained_and_have_no_logprob() -> None:
    """Case A53: [5, 6] sampled, 9 added by the harness."""
    token_ids, logprobs, spans = assemble([Segment("policy", ids(5, 6), floats(-0.5, -0.25), trained=True), Segment("context", ids(9))])
    assert token_ids.tolist() == [5, 6, 9]
    np.testing.assert_array_equal(logprobs, floats(-0.5, -0.25, np.nan))
    assert spans == (Span("policy", 0, 2, trained=True), Span("context", 2, 3))


@pytest.mark.parametrize(
    "segment",
    [Segment("policy", ids(1)), Segment("prompt", ids(1), floats(-1.0)), Segment("context", ids(1), trained=True), Segment("policy", ids(1, 2), floats(-1.0))],
)
def test_impossible_segments_are_refused(segment: Segment) -> None:
    with pytest.raises(ValueError, match=r"log-prob|trained"):
        assemble([segment])


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "truncated"), ("abort", "aborted"), ("error", "infra_error")])
@pytest.mark.parametrize("last", [0, 7])
def test_a19_the_finish_reason_decides_whatever_the_last_id(reason: Any, status: str, last: int) -> None:
    """Case A19."""
    completion = Completion("g", 1, ids(5, last), floats(-1, -1), reason)
    row = attempt(Prompt("g", "t", "p", ids(1)), completion, "", round_index=2, policy_version=3, temperature=0.5)
    assert row.status == status
    assert row.mask.tolist() == [False, *[status in ("completed", "truncated")] * 2]
    assert row.spans[1] == Span("policy", 1, 3, policy_version=3, temperature=0.5, trained=status in ("completed", "truncated"))
    assert row.trajectory_id == "g/1"


class Flaky:
    """An engine that answers in reverse order; a seed in `broken` fails that many times first. Answers are the seed's last digit."""

    max_length = 100

    def __init__(self, broken: dict[int, int]) -> None:
        self.broken, self.queue, self.num_submitted = dict(broken), [], 0

    def submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.num_submitted += len(request.seeds)
            self.queue += [(request.request_id, index, seed) for index, seed in enumerate(request.seeds)]

    def stream(self) -> Iterator[Completion]:
        while self.queue:
            name, index, seed = self.queue.pop()
            if self.broken.get(seed, 0) > 0:
                self.broken[seed] -= 1
                yield Completion(name, index, ids(), floats(), "error", "ConnectionError: reset by peer")
            else:
                yield Completion(name, index, ids(seed % 10 + 1, 0), floats(-1, -1), "stop")


def seeds_of(name: str, num_attempts: int) -> list[int]:
    from rlpipe.seeds import seed

    return [seed(0, 1, name, index, 0) for index in range(num_attempts)]


def test_a61_infra_errors_are_tried_again_then_kept_apart() -> None:
    seeds = seeds_of("g", 8)
    engine = Flaky({seeds[2]: 2, seeds[5]: 99})
    (group,) = generate(engine, char_tokenizer(), [Prompt("g", "t", "p", ids(1))], Sampling(4, 1.0), 8, Origin(0, 1, 0))  # type: ignore[arg-type]
    assert [row.status for row in group] == ["completed"] * 5 + ["infra_error"] + ["completed"] * 2
    lost = group.trajectories[5]
    assert (lost.token_ids.tolist(), lost.status_reason, lost.mask.tolist()) == ([1], "ConnectionError: reset by peer", [False])
    assert [row.token_ids[1] for row in group if row.status == "completed"] == [s % 10 + 1 for i, s in enumerate(seeds) if i != 5]
    assert engine.num_submitted == 8 + 2 + 2


def test_f05_completions_are_matched_by_id_whatever_their_order() -> None:
    """Case F05: an engine that answers in reverse order."""
    prompts = [Prompt(name, name, "p", ids(1)) for name in ("a", "b")]
    found = list(generate(Flaky({}), char_tokenizer(), prompts, Sampling(4, 1.0), 2, Origin(0, 1, 0)))  # type: ignore[arg-type]
    assert [(group.group_id, row.index, row.token_ids[1]) for group in found for row in group] == [
        (name, index, seed % 10 + 1) for name in ("a", "b") for index, seed in enumerate(seeds_of(name, 2))
    ]


def test_a_text_is_tokenised_as_it_is_and_messages_through_the_template() -> None:
    tokenizer = char_tokenizer()
    text = render(tokenizer, Task(task_id="t", prompt="ab", reference="c"), "g")
    assert (text.text, tokenizer.decode(text.ids.tolist())) == ("ab", "ab")
    messages = Task(task_id="t", prompt=[{"role": "user", "content": "ab"}], reference="c")
    with pytest.raises(ConfigError, match="chat template"):
        render(tokenizer, messages, "g")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
    rendered = render(tokenizer, messages, "g")
    assert rendered.text == "user: ab\nbot:"
    assert tokenizer.decode(rendered.ids.tolist()) == rendered.text


def test_steps_import_without_torch_or_arrow() -> None:
    heavy = "'torch', 'transformers', 'pyarrow', 'vllm'"
    code = f"import sys, rlpipe.rollout.step, rlpipe.evaluate.step, rlpipe.start; sys.exit(str([n for n in ({heavy}) if n in sys.modules]))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert found.stderr.strip() == "[]"
