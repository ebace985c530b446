"""A character language model made on the spot: no download, under a million parameters, seconds to learn a format.

Its supervised start teaches the form of an answer and never the answer: the demonstration for `sort_three` is a random
order of the numbers, that for `max_of_three` a random one of them. Reinforcement learning has the rest to do.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from rlpipe import artifact, seeds, task_sources
from rlpipe.errors import ConfigError
from rlpipe.params import FreeForm, Section, Seed
from rlpipe.policies import causal_lm

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
ALPHABET = "\n 0123456789=,()+" + "".join(sorted(set("sortmax")))
MAX_PARAMETERS = 1_000_000
IGNORED = -100


class CharLM(Section):
    """Settings of the character model."""

    task: Literal["sort_three", "max_of_three", "none"] = "sort_three"
    """Whose format the supervised start teaches; `none` leaves the random weights."""
    options: FreeForm = Field(default_factory=dict)
    """The task source's own settings, as in `tasks.train.options`."""
    alphabet: str = Field(ALPHABET, min_length=1)
    """The characters it knows, one token each; any other is one unknown token."""
    width: int = Field(64, ge=4)
    layers: int = Field(2, ge=1)
    heads: int = Field(2, ge=1)
    ffn: int = Field(128, ge=1)
    context: int = Field(256, ge=8)
    """Longest prompt and completion together, in characters."""
    format_steps: int = Field(500, ge=0)
    batch: int = Field(64, ge=1)
    learning_rate: float = Field(3e-3, gt=0)
    seed: Seed = 0

    @model_validator(mode="after")
    def _fits_together(self) -> CharLM:
        if self.width % (2 * self.heads):
            raise ValueError(f"width must be a multiple of twice the heads; width {self.width}, heads {self.heads}")
        if len(set(self.alphabet)) != len(self.alphabet):
            raise ValueError("a character stands twice in the alphabet")
        if self.num_parameters > MAX_PARAMETERS:
            raise ValueError(f"{self.num_parameters} parameters; the character model has at most {MAX_PARAMETERS}")
        return self

    @property
    def num_parameters(self) -> int:
        """Weights of the model, the tied embedding counted once."""
        block = 4 * self.width**2 + 3 * self.width * self.ffn + 2 * self.width
        return (len(self.alphabet) + 3) * self.width + self.layers * block + self.width


def make(config: CharLM, out: Path) -> None:
    """Write the model as a Hugging Face folder in place of `out`; the same config gives the same bytes.

    Raises:
        ConfigError: the task's settings do not fit, or its text does not fit the alphabet or the context.
    """
    tokenizer = make_tokenizer(config)
    with _one_thread():
        model = _random_model(config, len(tokenizer))
        if config.task != "none" and config.format_steps:
            _learn_format(model, tokenizer, config)
    partial = artifact.partial_path(out)
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer.save_pretrained(partial)
    causal_lm.save_module(partial, model, tokenizer_source=partial)
    artifact.publish(partial, out)


def make_tokenizer(config: CharLM) -> PreTrainedTokenizerFast:
    """One token for each character of the alphabet, and `<pad>`, `<eos>`, `<unk>`; decoding gives the text back."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *config.alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, model_max_length=config.context, clean_up_tokenization_spaces=False
    )


def demonstrations(config: CharLM) -> Iterator[tuple[str, str]]:
    """Training prompts without end, each with an answer of the right form drawn without looking at which one is right."""
    source = task_sources.generator(config.task, config.options)
    rng = random.Random(seeds.seed("format", config.seed))
    for numbers in source.draw("train", rng):
        shown = rng.sample(numbers, len(numbers)) if config.task == "sort_three" else [rng.choice(numbers)]
        yield source.prompt(numbers), f"{source.gap}{' '.join(map(str, shown))}\n"


def _random_model(config: CharLM, vocabulary: int) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=config.width,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=config.context,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        # Llama's own 0.02 leaves a model this narrow on a plateau for hundreds of steps
        initializer_range=0.1,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.seed("weights", config.seed))
        return LlamaForCausalLM(shape)


def _learn_format(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, config: CharLM) -> None:
    """Next-character prediction of the demonstrations' answers; the rate warms up over ten steps and ends at zero."""
    import torch

    drawn, vocabulary = demonstrations(config), tokenizer.get_vocab()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(config.format_steps):
        ids, labels = _batch(list(itertools.islice(drawn, config.batch)), vocabulary, config)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min((step + 1) / 10, 1.0, (config.format_steps - step) / (0.3 * config.format_steps))
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.eval()


def _batch(pairs: list[tuple[str, str]], vocabulary: dict[str, int], config: CharLM) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids `[B, T]`, padded on the right, and labels `[B, T]` that are `IGNORED` outside the answers."""
    import torch

    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    unknown = sorted(set("".join(prompt + answer for prompt, answer in pairs)) - set(config.alphabet))
    if longest > config.context or unknown:
        got = f"{longest} characters" + (f", among them {''.join(unknown)!r}" if unknown else "")
        raise ConfigError(f"{config.task} does not fit the character model", got=got, accepted=f"{config.context} characters of {config.alphabet!r}")
    ids = torch.full((len(pairs), longest), vocabulary[PAD])
    labels = torch.full((len(pairs), longest), IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        tokens = torch.tensor([vocabulary[character] for character in prompt + answer])
        ids[row, : len(tokens)] = tokens
        labels[row, len(prompt) : len(tokens)] = tokens[len(prompt) :]
    return ids, labels


@contextmanager
def _one_thread() -> Iterator[None]:
    # matrices this small are no faster on more, and the bytes then do not depend on the machine's cores
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
