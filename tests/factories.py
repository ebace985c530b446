"""Small things tests share: a random model of a few thousand weights with a character tokenizer, and trajectories."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

CHARACTERS = string.digits + string.ascii_lowercase + " ,.:=()+-\n"
EOS = "<eos>"


def char_tokenizer() -> Any:
    """A tokenizer of one token a character; `<eos>` has id 0 and is the pad token too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {EOS: 0, **{character: i for i, character in enumerate(CHARACTERS, start=1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)


def tiny_config(family: str = "llama", vocab_size: int = len(CHARACTERS) + 1, **changes: Any) -> Any:
    """Config of a two-layer model: `llama` (grouped-query, tied), `qwen2`, `gpt2`, `mistral` (sliding window of 8)."""
    import transformers

    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    common = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0, "initializer_range": 0.2}
    if family == "gpt2":
        return transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=128, **common | changes)
    kinds = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config, "mistral": transformers.MistralConfig}
    window = {"sliding_window": 8} if family == "mistral" else {}
    return kinds[family](**shape | common | {"max_position_embeddings": 128, "tie_word_embeddings": family != "qwen2"} | window | changes)


def tiny_model(folder: Path, family: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """A complete Hugging Face folder with random weights and `char_tokenizer`; returns `folder`."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    AutoModelForCausalLM.from_config(tiny_config(family, **changes)).save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


def tiny_policy(folder: Path, family: str = "llama", seed: int = 0, version: int = 0) -> Path:
    """A finished policy artifact around `tiny_model`; returns `folder`."""
    from rlpipe import artifact

    tiny_model(folder / "modules" / "policy", family, seed)
    artifact.write_json(folder / "trainer" / "state.json", {"policy_version": version})
    artifact.write_manifest(folder)
    return folder
