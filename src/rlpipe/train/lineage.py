"""Which weights a round starts from, and which other modules the policy folder carries on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlpipe import artifact
from rlpipe.errors import ArtifactError
from rlpipe.policies import causal_lm
from rlpipe.train.kl import Kl

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
    version, latest = state["policy_version"], policy_in / causal_lm.POLICY_MODULE
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
