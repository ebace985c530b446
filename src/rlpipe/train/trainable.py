"""Which weights are trained. What is frozen takes no gradient, and the body below the first trained layer builds no graph."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlpipe.errors import ConfigError
from rlpipe.params import PositiveInt, Section

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


TrainableConfig = Annotated[All | LastLayers, Field(discriminator="type")]


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
