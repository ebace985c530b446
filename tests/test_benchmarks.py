"""The benchmarks run, force equal work on all sides, and say what they did not measure. No test looks at a time."""

from __future__ import annotations

import argparse
import importlib
import mmap
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

common: ModuleType = importlib.import_module("common")
memory: ModuleType = importlib.import_module("memory")
rollout: ModuleType = importlib.import_module("rollout")
training: ModuleType = importlib.import_module("training")
update: ModuleType = importlib.import_module("update")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return common.setting(tmp_path_factory.mktemp("setting"), quick=True)


def test_both_policies_have_the_same_weights(made: Any) -> None:
    stored = [(folder / "modules" / "policy" / "model.safetensors").read_bytes() for folder in (made.policy, made.endless)]
    assert stored[0] == stored[1]


def test_prompts_have_one_length(made: Any) -> None:
    short, chat = common.short_prompts(made.tokenizer), common.chat_prompts(made.tokenizer)
    assert [len(short), len({len(prompt.ids) for prompt in short})] == [8, 1]
    assert [len(prompt.ids) for prompt in chat] == [64] * 8
    assert len({prompt.text for prompt in chat}) == 8


def test_what_prompts_begin_with_counts_once() -> None:
    def prompt(*ids: int) -> Any:
        import numpy as np

        return argparse.Namespace(ids=np.array(ids))

    assert common.num_shared([prompt(1, 2, 3), prompt(1, 2, 4), prompt(1, 2, 5, 6)]) == 2 + 1 + 1 + 2
    assert common.num_shared([prompt(7, 8)]) == 2


def test_nothing_but_its_length_ends_an_attempt(made: Any) -> None:
    ours = rollout.Ours(made.endless, common.short_prompts(made.tokenizer, 2), 5, 1)
    assert ours.lengths == [[5] * 8, [5] * 8]
    assert ours.timed() > 0
    ours.engine.close()


def test_generate_ends_each_row_at_its_forced_length(made: Any) -> None:
    prompts = common.short_prompts(made.tokenizer, 2)
    generate = rollout.Generate(made.module, prompts, [[1, 2, 3, 4, 5, 6, 7, 8], [2] * 8], made.tokenizer)
    said = generate.run()[:, len(prompts[0].ids) :]
    assert said.shape == (16, 8)
    ended = said == made.tokenizer.pad_token_id
    assert ended[0, 1:].all()
    assert ended[8:, 2:].all()
    assert not ended[7].all()


def test_a_step_trains_and_hands_its_weights_over(made: Any) -> None:
    prompts = common.short_prompts(made.tokenizer, 2)
    ours = training.Trainer(made.endless, training.train_config(1, learning_rate=1e-2), training.alternating_rewards, 4)
    ours.open(prompts)
    before = ours.engine.logprobs([prompts[0].ids])[0][1:]
    whole, updating = ours.step(prompts)
    after = ours.engine.logprobs([prompts[0].ids])[0][1:]
    assert ours.version == 1
    assert 0 < updating < whole
    assert abs(after - before).max() > 1e-3
    ours.close()


def test_sides_take_turns_at_being_first() -> None:
    calls: list[str] = []

    def side(name: str) -> Any:
        return lambda: calls.append(name) or float(len(calls))

    found = common.alternate({"a": side("a"), "b": side("b")}, 2)
    assert calls == ["a", "b", "a", "b", "b", "a"]
    assert found == {"a": [3.0, 6.0], "b": [4.0, 5.0]}


def test_the_table_says_what_is_short_and_what_was_not_measured() -> None:
    text = common.table(
        [
            common.Line("rollout", "slow", [1.0, 2.0, 3.0], [8.0, 8.0, 12.0], 3.5, 6, 100, 0.5),
            common.Line("rollout", "fast", [2.0], [4.0], 3.5, 6),
            common.Line("rollout", "none", [2.0], "it is not installed", 3.5, 6),
        ]
    ).splitlines()
    assert text[2] == "| rollout | slow | 50/s, 2.00 s (1.00–3.00) | 12/s, 8.00 s (8.00–12.00) | 4.00× (4.00–8.00) | 3.5× | 6× | at least | 0.50 s | 4.0 |"
    assert "| 2.00× (2.00–2.00) | 3.5× | 6× | **short** |" in text[3]
    assert text[4] == "| rollout | none | 2.00 s (2.00–2.00) | it is not installed |  | 3.5× | 6× | not measured |  |  |"


def test_a_benchmark_replaces_its_own_section_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(results=tmp_path / "results.md")
    for title, body in (("One", "first"), ("Two", "second"), ("One", "third")):
        common.report(options, title, ["a machine"], body)
    text = options.results.read_text()
    assert "first" in capsys.readouterr().out
    assert [text.count(word) for word in ("# Results", "first", "second", "third", "## One", "## Two")] == [1, 0, 1, 1, 1, 1]


def test_the_mark_holds_the_peak_and_not_what_is_left() -> None:
    mark = memory.Mark()
    with mmap.mmap(-1, 200 << 20) as held:  # pages of their own: an allocator may hand out what the process already has
        for _ in range(200):
            held.write(b"x" * (1 << 20))
    found = mark.result()
    assert 190 < found["peak"] - found["loaded"] < 300


def test_a_process_over_the_limit_is_stopped(tmp_path: Path) -> None:
    found = memory.run_child({"side": "rlpipe", "threads": 1, "endless": str(tmp_path), "length": 4, "batch": 8, "changes": {}}, limit_gb=0.001)
    assert found == "over 0.001 GB"


def test_made_up_groups_have_their_lengths(made: Any) -> None:
    groups = memory.groups_of(common.chat_prompts(made.tokenizer, num=2), 12, 20)
    assert [len(row.token_ids) for group in groups for row in group] == [76] * 16
    given = update.fixed(groups)([], None)
    assert [len(ids) for ids in given["completion_ids"]] == [12] * 16
    assert given["prompt_ids"][8] == groups[1].trajectories[0].token_ids[:64].tolist()


@pytest.mark.slow
def test_trl_trains_on_the_tokens_it_is_given(made: Any, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is installed by make bench")
    import trl_peer

    groups = memory.groups_of(common.chat_prompts(made.tokenizer, num=1), 4, 20)
    given, seconds = update.fixed(groups), []
    trainer = trl_peer.trainer(
        made.module,
        tmp_path,
        [{"prompt": groups[0].trajectories[0].prompt}],
        lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        prompts_per_step=1,
        max_new_tokens=4,
        max_steps=3,
        rows_per_forward=8,
        learning_rate=1e-2,
        rollout=given,
    )
    before = trainer.model.get_input_embeddings().weight.detach().clone()
    trl_peer.train(trainer, lambda whole, generating: seconds.append((whole, generating)) or len(seconds) == 2)
    assert len(seconds) == 2
    assert all(0 < generating < whole for whole, generating in seconds)
    assert not before.equal(trainer.model.get_input_embeddings().weight)
