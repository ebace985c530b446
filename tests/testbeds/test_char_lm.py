import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe import artifact, task_sources
from rlpipe.errors import ConfigError
from rlpipe.params import validated
from rlpipe.testbeds import char_lm
from rlpipe.testbeds.char_lm import CharLM

MICRO = CharLM(task="none", width=16, heads=1, layers=1, ffn=16)
SHORT = CharLM(width=16, heads=1, layers=1, ffn=16, format_steps=5, batch=4)


def fingerprint(config, folder):
    char_lm.make(config, folder)
    return artifact.folder_fingerprint(folder)


@pytest.mark.parametrize("config", [MICRO, SHORT])
def test_the_same_settings_give_the_same_bytes_on_any_number_of_threads(config, tmp_path):
    import torch

    first = fingerprint(config, tmp_path / "one")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(7)
    try:
        assert fingerprint(config, tmp_path / "two") == first
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert fingerprint(config.model_copy(update={"seed": 1}), tmp_path / "three") != first


def test_making_one_leaves_torch_seeded_as_it_was(tmp_path):
    import torch

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    char_lm.make(MICRO, tmp_path / "model")
    assert torch.equal(torch.rand(2), expected)


def test_the_folder_loads_as_a_hugging_face_model(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    char_lm.make(MICRO, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert sum(weights.numel() for weights in model.parameters()) == MICRO.num_parameters
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) == tokenizer.vocab_size == len(char_lm.ALPHABET) + 3
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, model.config.eos_token_id) == (0, 1, 1)
    assert str(tmp_path) not in (tmp_path / "model" / "config.json").read_text()


@pytest.fixture(scope="module")
def tokenizer():
    return char_lm.make_tokenizer(MICRO)


@settings(deadline=None)
@given(text=st.text(alphabet=char_lm.ALPHABET))
def test_one_token_a_character_and_back(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([token]) for token in ids] == list(text)


def test_an_unknown_character_is_one_unknown_token(tokenizer):
    assert tokenizer("7Q7")["input_ids"] == [tokenizer.convert_tokens_to_ids("7"), tokenizer.unk_token_id, tokenizer.convert_tokens_to_ids("7")]


def test_the_prompts_of_the_built_in_sources_are_known_characters():
    for name in task_sources.GENERATORS:
        for task in task_sources.make(name, "train", 20, 0):
            assert set(f"{task.prompt}{task.reference}") <= set(char_lm.ALPHABET)


def test_the_demonstration_is_any_order_of_the_numbers_of_a_training_problem():
    source = task_sources.generator("sort_three", {})
    places = Counter()
    for prompt, answer in itertools.islice(char_lm.demonstrations(CharLM()), 6000):
        numbers = tuple(int(word) for word in prompt.removeprefix("sort ").removesuffix("=").split())
        shown = [int(word) for word in answer.split()]
        assert source.split_of(numbers) == "train"
        assert answer == " ".join(map(str, shown)) + "\n"
        places[tuple(sorted(numbers).index(number) for number in shown)] += 1
    assert len(places) == 6
    assert all(850 < count < 1150 for count in places.values())  # 1000 each, of the right order (0, 1, 2) too


def test_the_demonstration_of_a_maximum_is_any_of_the_numbers():
    right = 0
    for prompt, answer in itertools.islice(char_lm.demonstrations(CharLM(task="max_of_three", options={"shots": 0})), 3000):
        numbers = [int(word) for word in prompt.removeprefix("max(").removesuffix(") =").split(", ")]
        assert answer in [f" {number}\n" for number in numbers]
        right += int(answer) == max(numbers)
    assert 900 < right < 1100


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"width": 512}, "parameters; the character model has at most 1000000"),
        ({"width": 30, "heads": 4}, "width must be a multiple of twice the heads"),
        ({"alphabet": "aa"}, "a character stands twice"),
        ({"task": "add"}, "char_lm.task"),
    ],
)
def test_settings_that_do_not_fit_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        validated(CharLM, values, "char_lm")


@pytest.mark.parametrize(("values", "message"), [({"context": 10}, "accepted: 10 characters"), ({"alphabet": "0123456789 =\n"}, "among them 'orst'")])
def test_text_that_does_not_fit_the_model_is_refused_and_leaves_nothing(values, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        char_lm.make(SHORT.model_copy(update=values), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_start_knows_the_format_and_not_the_answer(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    char_lm.make(CharLM(), tmp_path / "model")
    tokenizer = char_lm.make_tokenizer(CharLM())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.generation_config.update(do_sample=True, max_new_tokens=9, top_k=0)
    tasks = [task for task in task_sources.make("sort_three", "eval", 600, 0) if len(task.prompt) == len("sort 1 2 13=")]
    torch.manual_seed(0)
    sampled = model.generate(torch.tensor([tokenizer(task.prompt)["input_ids"] for task in tasks]))
    in_form = right = 0
    for task, ids in zip(tasks, sampled, strict=True):
        answer = tokenizer.decode(ids).removeprefix(task.prompt).partition("\n")[0]
        in_form += sorted(answer.split()) == sorted(task.reference.split())
        right += answer == task.reference
    assert in_form > 0.6 * len(tasks)
    assert 0 < right < 0.4 * len(tasks)
