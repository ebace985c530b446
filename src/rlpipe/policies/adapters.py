"""Low-rank adapters: Hu et al. 2021, https://arxiv.org/abs/2106.09685. The only place that knows peft.

A Hugging Face folder may hold `adapter/` in peft's own format (adapter_config.json, adapter_model.safetensors) beside its weights:

    modules/policy/          config.json, model.safetensors, tokenizer: the base
    modules/policy/adapter/  what is added to it

Bytes are a function of the adapter alone: no path and no version stands in either file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe import artifact, seeds
from rlpipe.errors import BROKEN_IMPORT, ConfigError, EngineError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ADAPTER = "adapter"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NOT_KEPT = {"base_model_name_or_path", "peft_version", "revision"}
PREFIX = "base_model.model."
"""What peft puts before the names of the base's modules in its files."""
NAME = "default"
"""What peft calls an adapter that was given no name."""


def adapter_folder(folder: Path) -> Path | None:
    """The adapter that lies in a Hugging Face folder such as `modules/policy`, or None."""
    return folder / ADAPTER if (folder / ADAPTER / CONFIG).is_file() else None


def merge_into(module: PreTrainedModel, adapter: Path) -> None:
    """Add an adapter's changes to the weights of `module`, in the precision these have; no layer of the adapter stays.

    Raises:
        ConfigError: the adapter belongs to another model, or is damaged.
        EngineError: peft is not installed or cannot be imported here.
    """
    resume(module, adapter)
    merge(module)
    module.requires_grad_(True)


def begin(module: PreTrainedModel, *, rank: int, alpha: float, targets: Sequence[str] | None, seed: int) -> None:
    """Put a new adapter, which changes nothing yet, on the linear layers of the body, and freeze all else.

    Args:
        module: changed in place; its parameters' names get `base_layer` in them.
        rank: of the change to a matrix.
        alpha: the change is `alpha / rank` times the product of both factors.
        targets: last parts of the layers' names, such as `q_proj`; None takes all linear layers of the body.
        seed: decides the first factor, uniform in +-1/sqrt(inputs) as peft has it; the second is zero.

    Raises:
        ConfigError: a target names no linear layer of the body.
        EngineError: peft is not installed or cannot be imported here.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    linear = _linear_layers(module)
    found = {name.rpartition(".")[2] for name in linear}
    if missing := sorted(set(targets or ()) - found):
        raise ConfigError("train.trainable.targets names no linear layer of the model", got=", ".join(missing), accepted=", ".join(sorted(found)))
    transposed = any(isinstance(layer, Conv1D) for layer in linear.values())
    chosen = sorted(targets or found)
    _inject(module, {"task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "target_modules": chosen, "fan_in_fan_out": transposed, "inference_mode": False})
    with torch.no_grad():
        for name, layer in layers(module):
            first, second = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
            generator = torch.Generator().manual_seed(seeds.seed(seed, "adapter", name))
            first.copy_((2 * torch.rand(first.shape, generator=generator) - 1) / first.shape[1] ** 0.5)
            second.zero_()


def resume(module: PreTrainedModel, adapter: Path) -> None:
    """Put an adapter as it was saved on the layers of `module` and freeze all else.

    Raises:
        ConfigError: the adapter belongs to another model, or is damaged.
        EngineError: peft is not installed or cannot be imported here.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        _inject(module, {**json.loads((adapter / CONFIG).read_text(encoding="utf-8")), "inference_mode": False})
        kept = load_file(adapter / WEIGHTS)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ConfigError(f"{adapter} holds no LoRA adapter for this model", got=" ".join(str(error).split())[:300]) from error
    now = _tensors(module)
    for name in sorted(now.keys() | kept.keys()):
        if name not in now or name not in kept or now[name].shape != kept[name].shape:
            raise ConfigError(f"the adapter in {adapter} belongs to another model", got=f"{name} is missing, unknown or of another shape")
    with torch.no_grad():
        for name, value in now.items():
            value.copy_(kept[name])


def merge(module: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Add the adapter of `module` to its weights and remove the adapter's layers; parameters have the base's names again.

    Args:
        module: with an adapter, changed in place.
        dtype: precision that changed matrices get first; None leaves them theirs.
    """
    for name, layer in list(layers(module)):
        base = layer.get_base_layer()
        if dtype is not None:
            base.weight.data = base.weight.data.to(dtype)
        layer.merge(adapter_names=[NAME])
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, base)
    del module.peft_config


def layers(module: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """The layers that hold a part of the adapter, with their names in the base."""
    return ((name, layer) for name, layer in module.named_modules() if hasattr(layer, "lora_A"))


def write(module: PreTrainedModel, folder: Path) -> None:
    """Write the adapter of `module` into a Hugging Face folder, in place of one that is there."""
    from safetensors.torch import save_file

    target = folder / ADAPTER
    shutil.rmtree(target, ignore_errors=True)
    settled: Any = module.peft_config[NAME]
    config = {name: sorted(value) if isinstance(value, set) else value for name, value in settled.to_dict().items() if name not in NOT_KEPT}
    artifact.write_json(target / CONFIG, {**config, "base_model_name_or_path": None, "inference_mode": True})
    save_file({name: value.detach().contiguous() for name, value in _tensors(module).items()}, target / WEIGHTS, metadata={"format": "pt"})
    (target / WEIGHTS).chmod(0o644)


def carry(source: Path, target: Path) -> None:
    """Copy the adapter of one Hugging Face folder, where it has one, into another."""
    if found := adapter_folder(source):
        for name in (CONFIG, WEIGHTS):
            (target / ADAPTER).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found / name, target / ADAPTER / name)


def settings(adapter: Path) -> dict[str, Any]:
    """`rank`, `alpha` and sorted `targets` of a saved adapter."""
    kept = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    return {"rank": kept["r"], "alpha": kept["lora_alpha"], "targets": sorted(kept["target_modules"])}


def _linear_layers(module: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """Linear layers by name, the head left out."""
    import torch
    from transformers.pytorch_utils import Conv1D

    head = module.get_output_embeddings()
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear | Conv1D) and layer is not head}


def _inject(module: PreTrainedModel, config: dict[str, Any]) -> None:
    import torch

    peft = _import()
    with torch.random.fork_rng(devices=[]):  # peft draws weights, which are overwritten
        peft.inject_adapter_in_model(peft.LoraConfig(**{name: value for name, value in config.items() if name != "peft_type"}), module)


def _tensors(module: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The adapter's parameters by the names they have in peft's files."""
    named = ((name, value) for name, value in module.named_parameters() if ".lora_" in name)
    return {f"{PREFIX}{name.replace(f'.{NAME}.', '.')}": value for name, value in named}


def _import() -> Any:
    try:
        import peft
    except BROKEN_IMPORT as error:
        raise EngineError(
            "LoRA adapters cannot be used",
            got=f"{type(error).__name__}: {' '.join(str(error).split())}",
            do="pip install 'rlpipe[lora]', or set train.trainable to another type and train from a policy without adapter",
        ) from error
    return peft
