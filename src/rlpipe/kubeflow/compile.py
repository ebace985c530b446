"""Params into a pipeline: what is fixed when it is compiled, the compiled specification, and its size against a budget."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlpipe import artifact, steps
from rlpipe.errors import ConfigError
from rlpipe.kubeflow import features, resources, specification, wire
from rlpipe.kubeflow.section import KubeflowConfig

PIPELINES = ("post_training", "retraining")
BUDGET_KB = 256
"""What a pipeline of ten rounds may take."""
MEASURED_ROUNDS = 20
"""Above this the size is worked out before the pipeline is built."""


@dataclass(frozen=True)
class Plan:
    """What is fixed when a pipeline is compiled.

    Attributes:
        num_rounds: rounds, unrolled one after the other.
        shards: pods that share a round's rollouts.
        launcher: `train.launcher`.
        sections: the filled sections, each the default of one pipeline parameter.
        recorded: each round is recorded with DVC.
        local: for kfp's local runners: no retries, since a failure at hand wants looking at.
    """

    num_rounds: int
    shards: int
    launcher: dict[str, Any]
    config: KubeflowConfig
    sections: dict[str, dict[str, Any]]
    recorded: bool = False
    local: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.num_rounds, int):
            raise ConfigError(
                "the number of rounds is fixed when a pipeline is compiled: Kubeflow has no loop in which one round waits for the one before",
                got=f"a {type(self.num_rounds).__name__}, known when the run is under way",
                accepted="a number",
                do="set rounds in params.yaml, or compile with --rounds N",
            )

    @property
    def round_outputs(self) -> Any:
        """What a round returns."""
        from rlpipe.kubeflow.pipelines import rounds

        return rounds.RecordedRound if self.recorded else rounds.Round

    def task(self, name: str, task: Any) -> Any:
        """A task with what section `kubeflow` says of it."""
        return resources.apply(task, name, self.config, self.launcher, retried=not self.local)


@dataclass(frozen=True)
class Compiled:
    """A compiled pipeline.

    Attributes:
        name: the pipeline's name.
        version: names its content: the first 12 digits of the text's sha256.
        text: the specification as YAML, as Kubeflow takes it.
        arguments: what a run is given: one mapping per section.
        least_backend: the least version of Kubeflow Pipelines that runs it.
        files: what references in the arguments point at, by place.
    """

    name: str
    text: str
    arguments: dict[str, Any]
    config: KubeflowConfig
    num_rounds: int
    least_backend: str
    files: dict[str, str]
    version: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", hashlib.sha256(self.text.encode()).hexdigest()[:12])

    @property
    def num_bytes(self) -> int:
        """Size of the text in UTF-8."""
        return len(self.text.encode())

    def write(self, path: Path) -> None:
        """Write the specification."""
        artifact.write_text(path, self.text)

    def check_arguments(self) -> dict[str, Any]:
        """The arguments, what they refer to written to `kubeflow.params_store`.

        Raises:
            ConfigError: one is over Kubeflow's limit and there is no store.
            ArtifactError: the store cannot be written.
        """
        wire.check(self.arguments)
        wire.put(self.files)
        return self.arguments


def plan(raw: Mapping[str, Any], pipeline: str = "post_training", *, local: bool = False) -> Plan:
    """What params fix when a pipeline is compiled.

    Raises:
        ConfigError: the params are wrong, or Kubeflow would read a part of them as its own.
    """
    raw = {**raw, "kubeflow": raw.get("kubeflow") or {}}
    sections = steps.filled(raw)
    config = steps.configs(raw)["kubeflow"]
    # retraining begins with a champion, which is no stage of `dvc.yaml`
    recorded = config.snapshot is not None and pipeline == "post_training"
    sections["snapshot"] = sections["kubeflow"]["snapshot"] if recorded else {}
    wire.check_placeholders(sections)
    encoded = {name: wire.encoded(section) for name, section in sections.items()}
    return Plan(len(steps.rounds(raw)), sections["rollout"]["shards"], sections["train"]["launcher"], config, encoded, recorded, local)


def build(pipeline: str, made: Plan) -> Any:
    """The pipeline as kfp's object.

    Raises:
        ConfigError: no such pipeline.
    """
    if pipeline not in PIPELINES:
        raise ConfigError("no such pipeline", got=pipeline, accepted=", ".join(PIPELINES))
    return importlib.import_module(f"rlpipe.kubeflow.pipelines.{pipeline}").build(made)


def compile(raw: Mapping[str, Any], pipeline: str = "post_training") -> Compiled:
    """Compile a pipeline from params.

    Raises:
        ConfigError: the params are wrong, or the specification is larger than `kubeflow.max_spec_kb`.
    """
    made = plan(raw, pipeline)
    if made.num_rounds > MEASURED_ROUNDS:
        _check_size(_expected_bytes(raw, pipeline, made.num_rounds), made)
    compiled = _compiled(pipeline, made)
    _check_size(compiled.num_bytes, made)
    return compiled


def _compiled(pipeline: str, made: Plan) -> Compiled:
    store = made.config.params_store
    sections, files = wire.shortened(made.sections, store) if store else (made.sections, {})
    component = build(pipeline, replace(made, sections=sections))
    spec, platform = specification.documents(component)
    features.check(spec, platform)
    text = specification.text(spec, platform)
    return Compiled(component.name, text, sections, made.config, made.num_rounds, features.least_backend(spec, platform), files)


def _expected_bytes(raw: Mapping[str, Any], pipeline: str, num_rounds: int) -> int:
    """The size to come, each round taking the same: kfp needs minutes for hundreds of rounds, too long to find that they are too many."""
    two, three = (_compiled(pipeline, plan({**raw, "rounds": steps.round_list(count)}, pipeline)).num_bytes for count in (2, 3))
    return two + (num_rounds - 2) * (three - two)


def _check_size(num_bytes: int, made: Plan) -> None:
    if num_bytes > made.config.max_spec_kb * 1000:
        raise ConfigError(
            f"the compiled pipeline of {made.num_rounds} rounds is larger than Kubeflow can be expected to hold",
            got=f"{num_bytes / 1000:.0f} KB",
            accepted=f"{made.config.max_spec_kb} KB (kubeflow.max_spec_kb)",
            do="compile fewer rounds and go on from their last policy with the pipeline retraining",
        )
