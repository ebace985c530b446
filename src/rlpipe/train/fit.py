"""One round of training over folders: load, find the signal, update, save."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from rlpipe import artifact
from rlpipe.errors import NoSignalError
from rlpipe.policies import causal_lm, evaluation, fitness, layers
from rlpipe.policies.device import keep_freed_memory, num_cores
from rlpipe.policies.saving import disk_errors
from rlpipe.step import Report
from rlpipe.train import checkpoints
from rlpipe.train.backends import Backend
from rlpipe.train.checkpoints import Saved
from rlpipe.train.lineage import OPTIMIZER, Start, carry_modules, find_start
from rlpipe.train.ranks import ALONE, Ranks
from rlpipe.train.reference import Reference
from rlpipe.train.signal import find_signal
from rlpipe.train.trainable import hold_frozen_in_bfloat16, load_trainable, save_trained
from rlpipe.train.update import update
from rlpipe.trajectory import Group

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from rlpipe.train.section import Config


def fit(
    config: Config,
    groups: Iterable[Group],
    *,
    policy_in: Path,
    evaluation_in: Path,
    policy: Path,
    round_index: int,
    dropped: Mapping[str, int] = MappingProxyType({}),
    ranks: Ranks = ALONE,
) -> Report:
    """Train `policy_in` on groups, from one dataset or several, and write `policy`; see `rlpipe.train.step.run`.

    All `ranks` call this with the same arguments and get the same report; the first writes. `dropped` says how many
    trajectories and groups the steps before took out, and why, for the message when nothing is left.
    """
    import torch

    torch.set_num_threads(config.run.threads or max(1, num_cores() // ranks.per_node))
    groups = list(groups)
    start = find_start(policy_in, evaluation_in, config.start_from)
    reference = Reference(config, policy_in, start, ranks)
    signal = find_signal(groups, config, reference)
    counts: dict[str, float | int | None] = {**_lengths(groups), "num_groups": len(groups), "num_groups_with_signal": len(signal.groups)}
    if not signal.groups or (config.drop_last and len(signal.groups) < config.groups_per_step):
        _stop_without_signal(config, {"num_groups": len(groups), **dropped, **signal.reasons})
        return pass_on(policy_in, policy if ranks.first else None, "no_signal", {**counts, "num_groups_dropped": len(signal.groups)}, signal.reasons)
    saved = checkpoints.newest(policy)
    backend = open_backend(config, start, groups, ranks, saved)
    try:
        keeping = checkpoints.Checkpoints(policy, config.checkpoint, backend, saved)
        with keeping.kept():
            updated = update(signal.groups, backend, config, version=start.version, round_index=round_index, incoming=start.incoming, checkpoints=keeping)
        _save(config, backend, policy_in, policy, start, updated.version)
    finally:
        backend.close()
    facts = {"policy_version": updated.version, "policy_version_in": start.version, "num_groups_dropped": updated.numbers["num_groups_dropped"]}
    return Report({**counts, **updated.numbers, "policy_version": updated.version}, signal.reasons, facts=facts)


def open_backend(config: Config, start: Start, groups: Iterable[Group], ranks: Ranks = ALONE, saved: Saved | None = None) -> Backend:
    """The backend with the start's weights and, where it is kept, its optimizer state; or with those an interrupted call saved."""
    module = load_trainable(start.folder, config.trainable, config.run.seed)
    if saved is not None:
        saved.load_weights(module)
    layers.shorten(module)
    keep_freed_memory()
    shared = config.packing == "prefix"
    fitness.check_window(module, max(len(trajectory.token_ids) for group in groups for trajectory in group), shared)
    fitness.check_evaluation(module, shared)
    if config.backend.dtype == "bfloat16":
        hold_frozen_in_bfloat16(module)
    if config.activation_checkpointing:
        evaluation.checkpoint_activations(module)
    backend = config.backend.open(module, config.adamw(), ranks)
    if saved is not None:
        saved.load_moments(backend)
    elif config.optimizer_state == "keep" and start.optimizer is not None:
        from safetensors.torch import load_file

        backend.load_optimizer_state(load_file(start.optimizer), start.optimizer_steps)
    return backend


def pass_on(policy_in: Path, policy: Path | None, outcome: str, numbers: dict[str, float | int | None], reasons: dict[str, int] | None = None) -> Report:
    """Hand the policy on byte for byte (None: another rank does), with the outcome that says why."""
    if policy is not None:
        _empty(policy)
        artifact.copy_contents(policy_in, policy)
    version = causal_lm.policy_version(policy_in)
    counts = {"optimizer_steps": 0, "num_tokens_trained": 0, "num_groups_with_signal": 0, "num_groups_dropped": 0, "policy_version": version}
    return Report({**counts, **numbers}, reasons or {}, outcome, {"policy_version": version, "policy_version_in": version})


def _stop_without_signal(config: Config, counts: Mapping[str, int]) -> None:
    if config.run.no_signal == "stop":
        got = ", ".join(f"{name}={count}" for name, count in counts.items() if count or name == "num_groups")
        raise NoSignalError("no group can teach anything", got=got, do="use easier or harder tasks or more attempts, or set run.no_signal: keep")


def _lengths(groups: list[Group]) -> dict[str, float | int | None]:
    """Sampled tokens of every trajectory, whether trained on or not."""
    lengths = [trajectory.num_sampled_tokens for group in groups for trajectory in group]
    return {"completion_tokens_mean": sum(lengths) / len(lengths) if lengths else None, "completion_tokens_min": min(lengths, default=None)}


def _save(config: Config, backend: Backend, policy_in: Path, policy: Path, start: Start, version: int) -> None:
    """Write whole weights and whole moments, however ranks share them: any number of ranks goes on from them."""
    state: dict[str, int] = {"policy_version": version}
    tensors: dict[str, torch.Tensor] = {}
    if config.optimizer_state == "keep":
        tensors, state["optimizer_steps"] = backend.optimizer_state()
    with backend.whole_weights(), disk_errors():
        if backend.ranks.first:
            _write(config, backend.module, tensors, policy_in, policy, start, state)


def _write(
    config: Config, module: PreTrainedModel, moments: dict[str, torch.Tensor], policy_in: Path, policy: Path, start: Start, state: dict[str, int]
) -> None:
    _empty(policy)
    if config.optimizer_state == "keep":
        _save_optimizer(policy / OPTIMIZER, moments)
    state |= carry_modules(config.start_from, config.kl, policy_in, policy, start)
    save_trained(policy, module, config.trainable, start.folder, state)


def _save_optimizer(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, path)
    path.chmod(0o644)


def _empty(folder: Path) -> None:
    """Remove what an interrupted call left, but for its checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in folder.iterdir():
        if place.is_dir() and place.name != artifact.RESUME:
            shutil.rmtree(place)
        elif not place.is_dir():
            place.unlink()
