"""Step `model`: makes the folder of the start policy's model."""

from __future__ import annotations

from rlpipe.params import Model, Run, Section
from rlpipe.policies import smollm2
from rlpipe.policies.fetch import fetch
from rlpipe.step import Out, Report


class ModelStep(Section):
    """The shared sections this step reads."""

    run: Run = Run()
    model: Model = Model()


def run(config: ModelStep, *, model: Out, round_index: int = 0) -> Report:
    """Fetch or make the model that the start policy is made of.

    Raises:
        ConfigError: no such model, or an incomplete folder.
        EngineError: the package index or the hub cannot be reached.
    """
    fetch(config.model.path, model, config.model.char_lm)
    num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return Report(numbers={"num_weight_bytes": num_bytes}, facts={"weights": smollm2.WEIGHTS} if config.model.path == smollm2.NAME else {})
