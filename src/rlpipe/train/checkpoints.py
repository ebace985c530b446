"""Where a round's training stands, so that a killed one goes on after its last whole checkpoint, with the losses it would have had.

    .resume/000003/   weights.safetensors, moments.safetensors, tally.json, gaps.npz, state.json, manifest.json

They lie in the unfinished policy folder, in `artifact.RESUME`, and are no part of the finished one.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpipe import artifact
from rlpipe.errors import ArtifactError
from rlpipe.policies.saving import disk_errors
from rlpipe.stopping import Saving, Terminated, saved_first
from rlpipe.train.backends import Backend
from rlpipe.train.ranks import Ranks
from rlpipe.train.tally import MicroNumbers, Tally

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from rlpipe.train.section import Checkpoint

log = logging.getLogger("rlpipe")

WEIGHTS, MOMENTS, TALLY, GAPS, STATE = "weights.safetensors", "moments.safetensors", "tally.json", "gaps.npz", "state.json"
PLAIN = tuple(field.name for field in fields(MicroNumbers) if field.name != "gaps")


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole checkpoint: its folder, how many optimizer steps of the round it has seen, and the seconds they took."""

    folder: Path
    num_steps: int
    seconds: float

    def load_weights(self, module: PreTrainedModel) -> None:
        """Put the trained weights into a module that holds the round's start."""
        import torch
        from safetensors.torch import load_file

        parameters = dict(module.named_parameters())
        with torch.no_grad():
            for name, value in load_file(self.folder / WEIGHTS).items():
                parameters[name].copy_(value)

    def load_moments(self, backend: Backend) -> None:
        """Put the optimizer's state into a backend that has taken no step."""
        from safetensors.torch import load_file

        state = json.loads((self.folder / STATE).read_text(encoding="utf-8"))
        backend.load_optimizer_state(load_file(self.folder / MOMENTS), state["optimizer_steps"])

    def tally(self, ranks: Ranks) -> Tally:
        """The numbers so far; those of micro-batches, of whichever rank, are the first rank's now."""
        said = json.loads((self.folder / TALLY).read_text(encoding="utf-8"))
        with np.load(self.folder / GAPS) as gaps:
            micros = [MicroNumbers(**numbers, gaps=gaps[str(k)]) for k, numbers in enumerate(said["micros"] if ranks.first else [])]
        return Tally(self.num_steps, micros, said["grad_norms"])


def newest(policy: Path) -> Saved | None:
    """The whole checkpoint with the most optimizer steps in an unfinished policy folder; what is newer and not whole is named and removed."""
    for folder in sorted((policy / artifact.RESUME).glob("[0-9]*"), reverse=True):
        try:
            artifact.verify(folder)
        except ArtifactError as error:
            log.warning("checkpoint=%s state=skipped reason=%s", folder.name, error)
            shutil.rmtree(folder, ignore_errors=True)
            continue
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return Saved(folder, state["num_steps"], state["seconds"])
    return None


class Checkpoints:
    """Saves the state of one round's training now and then, on all ranks at once; the first writes."""

    def __init__(self, policy: Path, settings: Checkpoint, backend: Backend, saved: Saved | None) -> None:
        self.folder, self.settings, self.backend, self.saved = policy / artifact.RESUME, settings, backend, saved
        self._began = self._last = time.monotonic()
        self._saving = Saving()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Within it SIGTERM waits for the end of the optimizer step and its checkpoint.

        Not with several ranks: one that waits for another that died would not be ended until the grace is over.
        """
        if self.backend.ranks.size > 1:
            yield
            return
        with saved_first(self.settings.grace_seconds) as self._saving:
            yield

    def tally(self) -> Tally:
        """The numbers of the optimizer steps that need not be made again."""
        return self.saved.tally(self.backend.ranks) if self.saved else Tally()

    def after_step(self, num_steps: int, tally: Tally, *, last: bool = False) -> None:
        """Save if that is due; after the `last` step, which the finished policy follows, only where the process is to end.

        Raises:
            Terminated: SIGTERM had come; everything is saved.
        """
        due, wanted = self.backend.ranks.gather((self._due() and not last, self._saving.wanted))[0]
        if due or wanted:
            self._save(num_steps, tally)
        if wanted:
            raise Terminated

    @property
    def seconds(self) -> float:
        """What the round's training took, with that of the calls before this one."""
        return time.monotonic() - self._began + (self.saved.seconds if self.saved else 0.0)

    def _due(self) -> bool:
        return self.settings.seconds is not None and time.monotonic() - self._last >= self.settings.seconds

    def _save(self, num_steps: int, tally: Tally) -> None:
        moments, taken = self.backend.optimizer_state()
        micros = [micro for part in self.backend.ranks.gather(tally.micros) for micro in part]
        place = self.folder / f"{num_steps:06d}"
        with self.backend.whole_weights():
            if self.backend.ranks.first:
                state = {"num_steps": num_steps, "optimizer_steps": taken, "seconds": self.seconds}
                _keep(place, self.backend.module, moments, replace(tally, micros=micros), state)
        self._last = time.monotonic()


def _keep(place: Path, module: PreTrainedModel, moments: dict[str, torch.Tensor], tally: Tally, state: dict[str, Any]) -> None:
    """Write a checkpoint, and then remove those before; where there is no room for one, training goes on without."""
    try:
        with disk_errors():
            _write(place, module, moments, tally)
        artifact.write_json(place / STATE, state)
        artifact.write_manifest(place)
    except OSError as error:
        shutil.rmtree(place, ignore_errors=True)
        log.warning("checkpoint=%s state=not_saved reason=%s", place.name, error.strerror or error)
        return
    _remove_others(place)
    log.info("checkpoint=%s state=saved", place.name)


def _write(place: Path, module: PreTrainedModel, moments: dict[str, torch.Tensor], tally: Tally) -> None:
    from safetensors.torch import save_file

    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    trained = {name: value.detach() for name, value in module.named_parameters() if value.requires_grad}
    save_file({name: value.contiguous() for name, value in trained.items()}, place / WEIGHTS)
    save_file({name: value.contiguous() for name, value in moments.items()}, place / MOMENTS)
    gaps: dict[str, Any] = {str(k): micro.gaps for k, micro in enumerate(tally.micros)}
    np.savez(place / GAPS, **gaps)
    micros = [{name: getattr(micro, name) for name in PLAIN} for micro in tally.micros]
    artifact.write_json(place / TALLY, {"micros": micros, "grad_norms": tally.grad_norms})


def _remove_others(place: Path) -> None:
    for folder in place.parent.iterdir():
        if folder != place:
            shutil.rmtree(folder)
