"""Rows of a conversation whose template may drop or rewrite what was said, on a real byte-level BPE tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.engines import Completion
from rlpipe.rollout.building import assemble
from rlpipe.rollout.turns import Segments, continuation, decode, ids_of, say, show
from tests.factories import char_tokenizer

BEGIN, END = "<|im_start|>", "<|im_end|>"
TEXTS = ["<think>is 42 more than 7? yes</think>42 is more", "what is 42 + 7? 49", "assistant user system", "say it again, please"]


@cache
def bpe_tokenizer() -> Any:
    """Bytes and some merges of `TEXTS`, with the marks of ChatML as special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, special_tokens=[BEGIN, END], initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def template(content: str) -> str:
    """ChatML; `content` is jinja for what is shown of the message `m`."""
    message = f"{BEGIN}{{{{ m.role }}}}\n{content}{END}\n"
    return f"{{% for m in messages %}}{message}{{% endfor %}}{{% if add_generation_prompt %}}{BEGIN}assistant\n{{% endif %}}"


KEEPS = template("{{ m.content }}")
DROPS_THINKING = template("{{ m.content.split('</think>')[-1] }}")
TRIMS = template("{{ m.content | trim }}")
SHOUTS = template("{{ m.content | upper if m.role == 'assistant' else m.content }}")
FORGETS = template("{{ m.content if loop.last else '' }}")
COUNTS = f"{{{{ messages | length }}}} messages\n{KEEPS}"


def rendered(chat: str, messages: list[dict[str, str]]) -> str:
    return str(bpe_tokenizer().apply_chat_template(messages, chat_template=chat, add_generation_prompt=True, tokenize=False))


def conversation(chat: str, sampled: list[list[int]], reason: Any = "stop") -> tuple[Segments, ...]:
    """The rows after one answer for each of `sampled`; its log-probs are -1, -2, ... by turn."""
    tokenizer = bpe_tokenizer()
    messages, rows = [{"role": "user", "content": "what is 42 + 7?"}], ()
    for turn, token_ids in enumerate(sampled):
        text = rendered(chat, messages)
        rows = show(tokenizer, rows, text, turn)
        assert decode(tokenizer, ids_of(rows[-1])) == text
        completion = Completion("g", 0, np.array(token_ids, dtype=np.int32), np.full(len(token_ids), -1.0 - turn, dtype=np.float32), reason)
        rows = say(rows, completion, turn, policy_version=3, temperature=0.5)
        content = tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": f"again {turn}"}]
    return rows


def trained(row: Segments) -> list[tuple[int, float]]:
    """Ids and log-probs under the mask that the spans say."""
    token_ids, logprobs, spans = assemble(row)
    assert [span.end for span in spans[:-1]] == [span.start for span in spans[1:]]
    assert (spans[0].start, spans[-1].end) == (0, len(token_ids))
    places = [i for span in spans if span.trained for i in range(span.start, span.end)]
    assert not np.isfinite(np.delete(logprobs, places)).any()
    return [(int(token_ids[i]), float(logprobs[i])) for i in places]


def letters(text: str) -> list[int]:
    """A text in tokens of one byte and the end mark: not as the tokenizer would write it."""
    tokenizer = bpe_tokenizer()
    return [*(tokenizer(character)["input_ids"][0] for character in text), tokenizer.eos_token_id]


def answers() -> list[list[int]]:
    return [letters(f"<think>{i} is 42</think>42 + {i}") for i in range(3)]


def test_a51_a_template_that_drops_reasoning_forks_into_a_row_a_turn() -> None:
    """Case A51: three turns, each thinking: three rows; each ends with its own answer as sampled, and shows the earlier ones without the thinking."""
    rows = conversation(DROPS_THINKING, answers())
    assert [[token for token, _ in trained(row)] for row in rows] == answers()
    assert [trained(row)[0][1] for row in rows] == [-1.0, -2.0, -3.0]
    assert [[segment.source for segment in row] for row in rows] == [["prompt", "policy"]] * 3
    before = decode(bpe_tokenizer(), rows[2][0].token_ids)
    assert "think" not in before
    assert f"{BEGIN}assistant\n42 + 1{END}\n{BEGIN}user\nagain 1{END}\n{BEGIN}assistant\n" in before


def test_a51_a_template_that_keeps_what_was_said_keeps_one_row_of_the_sampled_ids() -> None:
    """Case A51: one row, although the tokenizer writes the same text in fewer tokens."""
    (row,) = conversation(KEEPS, answers())
    assert [token for token, _ in trained(row)] == [token for answer in answers() for token in answer]
    assert [logprob for _, logprob in trained(row)][:: len(answers()[0])] == [-1.0, -2.0, -3.0]
    assert [segment.source for segment in row] == ["prompt", "policy", "environment", "policy", "environment", "policy"]
    assert [segment.turn for segment in row] == [0, 0, 1, 1, 2, 2]
    assert len(bpe_tokenizer()(decode(bpe_tokenizer(), ids_of(row)))["input_ids"]) < len(ids_of(row))


def test_a51_a_rewrite_in_one_turn_forks_there_and_goes_on_in_that_row() -> None:
    """Case A51: only the first of four answers thinks."""
    first, *others = [letters("<think>7</think>49"), letters("49"), letters("50"), letters("51")]
    rows = conversation(DROPS_THINKING, [first, *others])
    assert [[token for token, _ in trained(row)] for row in rows] == [first, [token for answer in others for token in answer]]


@settings(deadline=None, max_examples=60)
@given(
    chat=st.sampled_from([KEEPS, DROPS_THINKING, TRIMS, SHOUTS, FORGETS, COUNTS]),
    sampled=st.lists(
        st.one_of(
            st.lists(st.integers(0, 299), max_size=12),  # cut characters and special tokens among them
            st.text(alphabet="4 \n</think>é", max_size=12).map(lambda text: bpe_tokenizer()(text)["input_ids"]),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_a51_what_is_trained_is_what_was_sampled(chat: str, sampled: list[list[int]]) -> None:
    """Case A51: the ids under the mask, over all rows, are the sampled ids, whatever the template does; each prompt says what was rendered."""
    sampled = [[token % len(bpe_tokenizer()) for token in token_ids] for token_ids in sampled]
    found = [pair for row in conversation(chat, sampled) for pair in trained(row)]
    assert found == [(token, -1.0 - turn) for turn, token_ids in enumerate(sampled) for token in token_ids]


def test_a_character_cut_by_the_length_does_not_fork() -> None:
    tokenizer = bpe_tokenizer()
    euro = tokenizer("€")["input_ids"]
    assert len(euro) == 3
    (row,) = conversation(KEEPS, [euro[:2], euro], "length")
    assert [token for token, _ in trained(row)] == euro[:2] + euro


def test_a53_the_mark_that_closes_a_cut_completion_is_not_trained() -> None:
    """Case A53: [5, 6] cut by length, the harness adds the end mark 0: mask [1, 1, 0], and the last has no log-prob."""
    tokenizer = char_tokenizer()
    rows = show(tokenizer, (), "1", 0)
    cut = Completion("g", 0, np.array([5, 6], dtype=np.int32), np.array([-0.5, -0.25], dtype=np.float32), "length")
    (row,) = show(tokenizer, say(rows, cut, 0, 0, 1.0), "145<eos>", 0, source="context")
    token_ids, logprobs, spans = assemble(row[1:])
    assert token_ids.tolist() == [5, 6, 0]
    assert [span.trained for span in spans for _ in range(span.start, span.end)] == [True, True, False]
    np.testing.assert_array_equal(logprobs, np.array([-0.5, -0.25, np.nan], dtype=np.float32))


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_was_given_up_is_not_trained(reason: str) -> None:
    (row,) = conversation(KEEPS, [letters("4")], reason)
    assert trained(row[:1]) == []
    assert [span.trained for span in assemble(row)[2]] == [False, False]


def test_a_continuation_by_hand() -> None:
    tokenizer = char_tokenizer()
    so_far = np.array([2, 3], dtype=np.int32)
    found = [continuation(tokenizer, so_far, text) for text in ("1234", "12", "1", "134")]
    assert [None if new is None else new.tolist() for new in found] == [[4, 5], [], None, None]


def test_a_tokenizer_that_begins_every_text_with_a_space_adds_none_between_turns() -> None:
    """Ids that it would have written itself go on; others fork, since the rest of the text alone would be told with a space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={"▁": 0, "a": 1, "b": 2, "ab": 3, "▁ab": 4}, merges=[("a", "b"), ("▁", "ab")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace(prepend_scheme="always")
    found = [continuation(PreTrainedTokenizerFast(tokenizer_object=tokenizer), np.array(so_far, dtype=np.int32), "abb") for so_far in ([4], [0, 1, 2])]
    assert [None if new is None else new.tolist() for new in found] == [[2], None]
