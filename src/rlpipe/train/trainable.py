"""Which weights are trained. What is frozen takes no gradient, and the body below the first trained layer builds no graph."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from rlpipe import artifact
from rlpipe.errors import ConfigError
from rlpipe.params import PositiveInt, Section
from rlpipe.policies import adapters, causal_lm

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BASE = Path("modules/base")
"""Where a policy with a merged adapter keeps what its training goes on from: the base's folder with the adapter in it."""
LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")


class All(Section):
    """Every weight; with `embeddings: false` all but the input embeddings and the head."""

    type: Literal["all"] = "all"
    embeddings: bool = True

    def trains(self, name: str, module: PreTrainedModel) -> bool:
        """Whether the parameter of this name, which is not of the embeddings, is trained."""
        return True


class LastLayers(Section):
    """The last `num` layers and the final norm."""

    type: Literal["last_layers"] = "last_layers"
    num: PositiveInt
    embeddings: Literal[False] = False

    def trains(self, name: str, module: PreTrainedModel) -> bool:
        """Whether the parameter of this name, which is not of the embeddings, is trained.

        Raises:
            ConfigError: the model has fewer layers.
        """
        num_layers = int(module.config.num_hidden_layers)
        if self.num > num_layers:
            raise ConfigError("train.trainable.num is more than the model has layers", got=self.num, accepted=f"1 to {num_layers}")
        layer = LAYER.search(name)
        return layer is None or int(layer.group(1)) >= num_layers - self.num


class Lora(Section):
    """A low-rank adapter on linear layers, held in float32; the base never changes: Hu et al. 2021, https://arxiv.org/abs/2106.09685.

    One adapter is trained through all rounds, as TRL and verl do; `serve` says only what engines load.
    """

    type: Literal["lora"] = "lora"
    rank: PositiveInt = 16
    """Rank of the change to each matrix."""
    alpha: float = Field(32, gt=0)
    """The change is the product of both factors times `alpha / rank`."""
    dropout: Literal[0] = 0
    """No other value yet: with inputs dropped at random, training log-probs are not those of sampling, and change with packing and ranks."""
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    """Last parts of the layers' names, such as q_proj; null takes all linear layers of the body."""
    serve: Literal["merged", "apart"] = "merged"
    """`merged`: modules/policy holds base plus adapter as plain weights, and modules/base what training goes on from.
    `apart`: modules/policy holds the base, and the adapter lies in modules/policy/adapter."""


TrainableConfig = Annotated[All | LastLayers | Lora, Field(discriminator="type")]


def load_trainable(folder: Path, trainable: All | LastLayers | Lora, seed: int) -> PreTrainedModel:
    """The model of a Hugging Face folder, an adapter in it included, with `requires_grad` set throughout.

    With `type: lora` the folder's adapter goes on, or a new one begins that changes nothing yet.

    Args:
        folder: of a policy.
        trainable: what is trained.
        seed: the run's; decides a new adapter's first weights.

    Raises:
        ConfigError: the folder's adapter has another rank, alpha or targets than `trainable`, or the model lacks what is named.
        EngineError: an adapter is wanted and peft is not installed.
    """
    if not isinstance(trainable, Lora):
        module = causal_lm.load_module(folder)
        mark(module, trainable)
        return module
    module = causal_lm.load_module(folder, adapter=False)
    found = adapters.adapter_folder(folder)
    if found is None:
        adapters.begin(module, rank=trainable.rank, alpha=trainable.alpha, targets=trainable.targets, seed=seed)
    else:
        _check_same(trainable, adapters.settings(found))
        adapters.resume(module, found)
    return module


def _check_same(trainable: Lora, kept: Mapping[str, Any]) -> None:
    """Raises ConfigError where the adapter of the last round is not the one now asked for."""
    wanted = {"rank": trainable.rank, "alpha": trainable.alpha, "targets": sorted(trainable.targets or kept["targets"])}
    for name, value in wanted.items():
        if value != kept[name]:
            do = "leave it as it was, or begin a run from the policy's modules/policy of a round with train.trainable.serve: merged"
            raise ConfigError(f"train.trainable.{name} is not that of the policy's adapter", got=value, accepted=kept[name], do=do)


def mark(module: PreTrainedModel, trainable: All | LastLayers) -> frozenset[str]:
    """Set `requires_grad` throughout; returns the names of the trained parameters."""
    tables = {id(value) for table in (module.get_input_embeddings(), module.get_output_embeddings()) for value in table.parameters()}
    trained = set()
    for name, value in module.named_parameters():
        value.requires_grad = trainable.embeddings if id(value) in tables else trainable.trains(name, module)
        if value.requires_grad:
            trained.add(name)
    return frozenset(trained)


def hold_frozen_in_bfloat16(module: PreTrainedModel) -> None:
    """Keep frozen matrices in bfloat16 where that loses nothing, so that autocast need not cast them at every forward.

    Norms, embeddings and the head stay float32, so that every number is what autocast on float32 weights gives.
    """
    import torch

    tables = {id(value) for table in (module.get_input_embeddings(), module.get_output_embeddings()) for value in table.parameters()}
    for part in module.modules():
        if isinstance(part, torch.nn.Linear):
            for value in part.parameters(recurse=False):
                narrow = value.data.to(torch.bfloat16)
                if not value.requires_grad and id(value) not in tables and torch.equal(narrow.to(value.dtype), value.data):
                    value.data = narrow


def save_trained(policy: Path, module: PreTrainedModel, trainable: All | LastLayers | Lora, source: Path, state: Mapping[str, Any]) -> None:
    """Write the trained module into a policy artifact; the module is of no use afterwards.

    Args:
        policy: the artifact.
        module: as `load_trainable` returned it and training left it.
        trainable: what was trained.
        source: the folder it was loaded from; what was frozen keeps the precision it has there.
        state: of the trainer, at least `policy_version`.
    """
    if isinstance(trainable, Lora):
        _save_adapter(policy, module, trainable, source)
    if isinstance(trainable, Lora) and trainable.serve == "apart":
        artifact.write_json(policy / causal_lm.STATE, dict(state))
        return
    frozen = {name for name, value in module.named_parameters() if not value.requires_grad}
    narrow = {name: dtype for name, dtype in causal_lm.stored_dtypes(source).items() if name in frozen}
    causal_lm.save(policy, module, source, state, narrow)


def _save_adapter(policy: Path, module: PreTrainedModel, trainable: Lora, source: Path) -> None:
    """Write base and adapter to where engines or the next round look for them, and merge the adapter where engines want that."""
    import torch

    target = policy / (BASE if trainable.serve == "merged" else causal_lm.POLICY_MODULE)
    artifact.copy_contents(source, target)
    adapters.write(module, target)
    if trainable.serve == "merged":
        adapters.merge(module, torch.float32)
