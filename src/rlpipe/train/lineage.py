"""Which weights a round starts from, and which other modules the policy folder carries on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlpipe import artifact
from rlpipe.errors import ArtifactError, ConfigError
from rlpipe.policies import causal_lm
from rlpipe.train.backends.moments import MOMENTS
from rlpipe.train.kl import Kl
from rlpipe.train.trainable import BASE

OPTIMIZER = Path("trainer/optimizer.safetensors")
CHAMPION = Path("modules/champion")
REFERENCE = Path("modules/reference")


@dataclass(frozen=True, slots=True)
class Start:
    """Where a round's training starts.

    Attributes:
        folder: Hugging Face folder of the weights.
        version: policy version counted on from; that of the incoming policy, so that a version never names two sets of weights.
        champion: folder and version of the champion, with `start_from: champion`.
        optimizer: file with optimizer state that belongs to the weights, and the steps it has seen.
        incoming: whether the weights are those of the incoming policy, the one tokens of its version were sampled with.
    """

    folder: Path
    version: int
    champion: tuple[Path, int] | None = None
    optimizer: Path | None = None
    optimizer_steps: int = 0
    incoming: bool = True


def find_start(policy_in: Path, evaluation_in: Path, start_from: Literal["latest", "champion"]) -> Start:
    """The incoming policy, or the champion that `evaluation_in` holds against it.

    Raises:
        ArtifactError: the evaluation names a champion that the policy folder does not hold.
    """
    state = causal_lm.read_state(policy_in)
    version, latest = state["policy_version"], latest_weights(policy_in)
    optimizer = policy_in / OPTIMIZER
    kept = (optimizer, int(state["optimizer_steps"])) if optimizer.is_file() else (None, 0)
    if start_from == "latest":
        return Start(latest, version, None, *kept)
    wanted = champion_version(evaluation_in)
    if wanted == version:
        return Start(latest, version, (latest, version), *kept)
    if state.get("champion_version") != wanted:
        got = f"champion version {wanted}, policy folder with version {version} and champion {state.get('champion_version')}"
        raise ArtifactError(
            "the champion's weights are not in the policy folder", got=got, do="use train.start_from: champion from the first round on, or latest"
        )
    return Start(policy_in / CHAMPION, version, (policy_in / CHAMPION, wanted), incoming=False)


def latest_weights(policy_in: Path) -> Path:
    """The Hugging Face folder that training goes on from: the policy's own, or the one its merged adapter lies apart in."""
    return policy_in / BASE if (policy_in / BASE).is_dir() else policy_in / causal_lm.POLICY_MODULE


def check_moments(policy_in: Path, num_ranks: int) -> None:
    """Refuse optimizer state that is not whole, before anything is loaded or launched.

    Whole moments go on in any number of ranks, with either backend; the parts that a DeepSpeed checkpoint of another
    number of ranks holds do not.

    Raises:
        ArtifactError: the file of the moments is damaged.
        ConfigError: the moments are in parts, or of other shapes than the weights.
    """
    choices = {
        "accepted": f"whole moments in {OPTIMIZER}, which any number of ranks loads",
        "do": "set train.optimizer_state: reset (moments begin anew), or train from a policy folder that rlpipe wrote",
    }
    parts = sorted((policy_in / OPTIMIZER).parent.rglob("*optim_states.pt"))
    if parts:
        got = f"{len(parts)} parts such as {parts[0].name}, and {num_ranks} ranks to load them"
        raise ConfigError("the optimizer state is in parts, one a rank", got=got, **choices)
    moments, weights = _shapes(policy_in / OPTIMIZER), _shapes(policy_in / causal_lm.POLICY_MODULE / "model.safetensors")
    for name, shape in moments.items():
        moment, _, parameter = name.partition("/")
        wanted = weights.get(parameter, shape) if moment in MOMENTS else shape
        if shape != wanted or 0 in shape:
            raise ConfigError("the optimizer state is not that of the whole weights", got=f"{name} of shape {shape} for a weight of shape {wanted}", **choices)


def _shapes(file: Path) -> dict[str, list[int]]:
    """The shape of each tensor in a safetensors file, from its header; nothing for a missing file."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        return {}
    try:
        with safe_open(file, framework="np") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 (safe_open is no mapping)
    except SafetensorError as error:
        raise ArtifactError(f"{file} is damaged", got=str(error), do="restore it with `dvc checkout` or run the step that writes it again") from error


def champion_version(evaluation_in: Path) -> int:
    """The policy version of the champion that an evaluation names.

    Raises:
        ArtifactError: it names none.
    """
    path = evaluation_in / "evaluation.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["champion"]["policy_version"])
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} names no champion", got=f"{type(error).__name__}: {error}", do="run evaluate again") from error


def carry_modules(start_from: str, kl: Kl | None, policy_in: Path, policy: Path, start: Start) -> dict[str, int]:
    """Copy the champion and the KL's reference into the new policy folder; returns what the state must say of them."""
    if kl is not None and kl.reference == "start":
        _copy(start_policy(policy_in), policy / REFERENCE)
    if start_from != "champion" or start.champion is None:
        return {}
    folder, version = start.champion
    _copy(folder, policy / CHAMPION)
    return {"champion_version": version}


def start_policy(policy_in: Path) -> Path:
    """The Hugging Face folder of the policy that the run began with.

    Raises:
        ArtifactError: it was not kept from the first round on.
    """
    if (policy_in / REFERENCE).is_dir():
        return policy_in / REFERENCE
    if causal_lm.policy_version(policy_in) == 0:
        return policy_in / causal_lm.POLICY_MODULE
    raise ArtifactError(
        f"{policy_in} does not hold the start policy",
        accepted=f"{REFERENCE} in it",
        do="set train.kl.reference: incoming, or set train.kl from the first round on",
    )


def _copy(source: Path, target: Path) -> None:
    artifact.copy_contents(source, target)
