"""A causal language model as policy: a complete Hugging Face folder plus the trainer's state.

    policy/modules/policy/   config.json, model.safetensors, tokenizer
    policy/trainer/          state.json, optimizer.safetensors

Bytes are a function of the weights alone: no path, version or clock stands in any of the files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe import artifact
from rlpipe.errors import ArtifactError, ConfigError
from rlpipe.policies import adapters
from rlpipe.policies.evaluation import Evaluation, evaluate

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Evaluation", "evaluate"]

STATE = Path("trainer/state.json")
POLICY_MODULE = Path("modules/policy")
NOT_KEPT = {"_name_or_path", "_model_name_or_path", "name_or_path", "transformers_version", "is_local", "local_files_only"}
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".gguf", ".pt", ".pth"}
NOT_COMPANIONS = {"config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json", artifact.MANIFEST}
REWRITTEN = ("config.json", "generation_config.json", "tokenizer_config.json")


def read_state(policy_folder: Path) -> dict[str, Any]:
    """The trainer's state: `policy_version` and what else the trainer keeps.

    Raises:
        ArtifactError: the file is missing or damaged.
    """
    path = policy_folder / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        return {**state, "policy_version": int(state["policy_version"])}
    except FileNotFoundError as error:
        raise ArtifactError(
            "policy folder without trainer state", got=str(policy_folder), accepted=f"a folder with {STATE}", do="make it with `rlpipe start`"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is damaged", got=str(error), do="run the step that writes it again") from error


def policy_version(policy_folder: Path) -> int:
    """Optimizer steps since the start policy.

    Raises:
        ArtifactError: the folder holds no readable trainer state.
    """
    return int(read_state(policy_folder)["policy_version"])


def load_module(folder: Path, dtype: torch.dtype | None = None, *, adapter: bool = True) -> PreTrainedModel:
    """The model in a Hugging Face folder, in `dtype` (default float32), ready for evaluation, without dropout.

    An adapter that lies in the folder is merged into the weights, unless `adapter` is false.

    Raises:
        ConfigError: the folder is missing or holds no causal language model.
        EngineError: an adapter lies in it, and peft is not installed.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from rlpipe.policies.head import keep_exact

    _check_folder(folder, "config.json")
    logging.disable_progress_bar()
    module: PreTrainedModel
    found: dict[str, Any]
    try:
        module, found = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            folder, dtype=dtype or torch.float32, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{folder} holds no causal language model", got=" ".join(str(error).split())[:300]) from error
    _check_loaded(folder, found)
    if adapter and (apart := adapters.adapter_folder(folder)):
        adapters.merge_into(module, apart)
    keep_exact(module)
    return module.eval()


def _check_loaded(folder: Path, found: Mapping[str, Any]) -> None:
    """Refuse weights that are not the config's: transformers would draw what is missing at random."""
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        if names := sorted(str(name) for name in found.get(problem) or ()):
            got = f"{problem.replace('_', ' ')}: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}"
            raise ConfigError(f"the weights in {folder} are not those of its config.json", got=got, do="use a folder whose weights and config belong together")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a Hugging Face folder; the same files are read once a process, since that takes half a second.

    Raises:
        ConfigError: the folder is missing or has no tokenizer.
    """
    _check_folder(folder, "tokenizer_config.json")
    names = [path for path in folder.iterdir() if path.is_file() and path.suffix not in WEIGHT_SUFFIXES]
    key = tuple(sorted((path.name, artifact.sha256(path)) for path in names))
    if key not in _tokenizers:
        _tokenizers.clear()
        _tokenizers[key] = _read_tokenizer(folder)
    return _tokenizers[key]


_tokenizers: dict[tuple[tuple[str, str], ...], PreTrainedTokenizerBase] = {}


def _read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder} has no usable tokenizer", got=" ".join(str(error).split())[:300]) from error


def _check_folder(folder: Path, file: str) -> None:
    if not (folder / file).is_file():
        raise ConfigError(
            f"model folder without {file}", got=str(folder), accepted="a Hugging Face folder with config, safetensors and tokenizer", do="check model.path"
        )


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """The precision each tensor has in a Hugging Face folder's safetensors files."""
    import torch
    from safetensors import safe_open

    names = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                kind = file.get_slice(name).get_dtype()
                if kind in names:
                    found[name] = names[kind]
    return found


def save(
    policy_folder: Path, module: PreTrainedModel, tokenizer_source: Path, state: Mapping[str, Any], narrow: Mapping[str, torch.dtype] | None = None
) -> None:
    """Write `modules/policy` and `trainer/state.json`; equal weights give equal bytes.

    Args:
        policy_folder: the policy artifact.
        module: its weights are stored in the precision they have, tied ones once.
        tokenizer_source: Hugging Face folder whose files, weights and config aside, are taken over.
        state: at least `policy_version`.
        narrow: names of parameters that were stored in a narrower precision; they are again where that is exact.
    """
    save_module(policy_folder / POLICY_MODULE, module, tokenizer_source, narrow)
    artifact.write_json(policy_folder / STATE, dict(state))


def save_module(folder: Path, module: PreTrainedModel, tokenizer_source: Path, narrow: Mapping[str, torch.dtype] | None = None) -> None:
    """Write one Hugging Face folder: config, `model.safetensors`, and the tokenizer files of `tokenizer_source`."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    # save_pretrained would do, but it imports DeepSpeed where that is installed, whether or not it works.
    named = (*module.named_parameters(), *_kept_buffers(module))  # named_parameters gives tied weights once
    tensors = {name: _narrowed(value.detach(), (narrow or {}).get(name)).contiguous() for name, value in named}
    dtypes = {value.dtype for value in tensors.values() if value.is_floating_point()}
    save_file(_as_stored(module, tensors), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    copy_companions(tokenizer_source, folder)
    dtype = str(torch.float32 if len(dtypes) > 1 else dtypes.pop()).removeprefix("torch.")
    _write_config(folder / "config.json", {**json.loads(module.config.to_json_string()), "architectures": [type(module).__name__], "dtype": dtype})


def _as_stored(module: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names and shapes as the family's files have them, where loading changes them."""
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(module, tensors))


def _kept_buffers(module: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    kept = module.state_dict().keys()
    return [(name, value) for name, value in module.named_buffers() if name in kept]


def _narrowed(value: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    import torch

    if dtype is None or dtype.itemsize >= value.dtype.itemsize:
        return value
    candidate = value.to(dtype)
    return candidate if torch.equal(candidate.to(value.dtype), value) else value


def copy_companions(source: Path, target: Path) -> None:
    """Copy a Hugging Face folder's files but weights and config, paths and library versions taken out."""
    for path in sorted(source.iterdir()):
        elsewhere = path.resolve() != (target / path.name).resolve()
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES and path.name not in NOT_COMPANIONS and elsewhere:
            shutil.copyfile(path, target / path.name)
    for path in (target / name for name in REWRITTEN):
        if path.is_file():
            _write_config(path, json.loads(path.read_text(encoding="utf-8")))


def _write_config(path: Path, content: Mapping[str, Any]) -> None:
    artifact.write_json(path, {key: value for key, value in content.items() if key not in NOT_KEPT})
