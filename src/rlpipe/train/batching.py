"""From groups to the micro-batches of one optimizer step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlpipe.errors import TrainingError
from rlpipe.policies.packing import Batch, Packing, Row, ScoredSequence, collate, in_order, num_added, pack
from rlpipe.train.ranks import ALONE, Ranks
from rlpipe.trajectory import Trajectory

OwnedRow = tuple[int, Row]
"""A row with the place of its group."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A trajectory that is trained on.

    Attributes:
        advantage: of the whole trajectory.
        weight: of each of its tokens in the optimizer step's loss; set by `weighted`.
        reference_logprobs: `[k]` of its trained tokens, where a KL needs them.
    """

    trajectory: Trajectory
    advantage: float
    weight: float = 0.0
    reference_logprobs: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return int(self.trajectory.mask.sum())


@dataclass(frozen=True, slots=True)
class TrainGroup:
    """The attempts of one group that are trained on."""

    group_id: str
    attempts: tuple[Attempt, ...]

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return sum(attempt.num_tokens for attempt in self.attempts)


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one forward takes: packed rows, and positions unless a single row has more."""

    num_rows: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """What the loss needs beside the policy's own log-probs, all `[K]` in the order of the batch's targets."""

    sampling_logprobs: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    versions: np.ndarray
    reference_logprobs: np.ndarray | None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward takes; `owners` names the attempt of each stretch of the K axis."""

    batch: Batch
    tokens: Tokens
    group_ids: tuple[str, ...]
    owners: tuple[tuple[int, int], ...]
    """(group, attempt) positions among the groups given, in K order."""
    idle: bool = False
    """Weighs nothing and counts nowhere: it keeps a rank without rows in step with the others."""


def sequence_of(trajectory: Trajectory) -> ScoredSequence:
    """Token ids with the spans' word on what is trained and at which temperature."""
    temperatures = np.ones(len(trajectory.token_ids))
    for span in trajectory.spans:
        temperatures[span.start : span.end] = span.temperature
    return ScoredSequence(trajectory.token_ids, trajectory.mask, temperatures)


def weighted(groups: Sequence[TrainGroup], aggregation: Callable[[np.ndarray], np.ndarray]) -> list[TrainGroup]:
    """The groups of one optimizer step with every token's weight in its loss; splitting them later changes none."""
    attempts = [attempt for group in groups for attempt in group.attempts]
    weights = iter(aggregation(np.asarray([attempt.num_tokens for attempt in attempts])).tolist())
    return [replace(group, attempts=tuple(replace(attempt, weight=next(weights)) for attempt in group.attempts)) for group in groups]


def micro_batches(
    groups: Sequence[TrainGroup], micro_batch: int, max_row_tokens: int, packing: Packing, ranks: Ranks = ALONE, micro_batch_tokens: int | None = None
) -> list[MicroBatch]:
    """This rank's rows of all groups, at most `micro_batch` of them and `micro_batch_tokens` positions at a time.

    Every rank gets as many micro-batches, since all take part in each exchange of gradients.
    """
    limits = Limits(micro_batch, micro_batch_tokens or sys.maxsize)
    rows: list[OwnedRow] = []
    for place, group in enumerate(groups):
        sequences = [sequence_of(attempt.trajectory) for attempt in group.attempts]
        rows += [(place, row) for row in pack(sequences, min(max_row_tokens, limits.num_tokens), packing == "prefix")]
    rows.sort(key=lambda entry: entry[1].num_tokens)
    shares = [_cut(replace(ranks, rank=rank).share(rows), limits) for rank in range(ranks.size)]
    made = [_micro_batch(groups, part) for part in shares[ranks.rank]]
    missing = max(map(len, shares)) - len(made)
    return made + [_idle(groups, rows[0])] * missing if missing else made


def _cut(rows: Sequence[OwnedRow], limits: Limits) -> list[list[OwnedRow]]:
    """Rows that begin alike come together where they share positions, rows of like length where they are padded."""
    if rows and rows[0][1].shared:
        rows = [rows[i] for i in in_order([row.sequences[0] for _, row in rows], range(len(rows)))]
    parts: list[list[OwnedRow]] = []
    num_tokens = 0
    for owned in rows:
        grown = num_tokens + num_added(parts[-1][-1][1], owned[1], len(parts[-1])) if parts else limits.num_tokens + 1
        fits = grown <= limits.num_tokens and len(parts[-1]) < limits.num_rows
        num_tokens = grown if fits else owned[1].num_tokens
        if fits:
            parts[-1].append(owned)
        else:
            parts.append([owned])
    return parts


def _micro_batch(groups: Sequence[TrainGroup], rows: Sequence[OwnedRow]) -> MicroBatch:
    batch = collate([row for _, row in rows])
    sequences = [(place, member) for place, row in rows for member in row.members]
    owners = tuple(sequences[i] for i in batch.members)
    attempts = [groups[place].attempts[member] for place, member in owners]
    return MicroBatch(
        batch=batch,
        tokens=_tokens(attempts),
        group_ids=tuple(dict.fromkeys(groups[place].group_id for place, _ in rows)),
        owners=owners,
    )


def _idle(groups: Sequence[TrainGroup], row: OwnedRow) -> MicroBatch:
    micro = _micro_batch(groups, [row])
    return replace(micro, tokens=replace(micro.tokens, weights=np.zeros_like(micro.tokens.weights)), idle=True)


def _tokens(attempts: Sequence[Attempt]) -> Tokens:
    masks = [attempt.trajectory.mask for attempt in attempts]
    counts = [int(mask.sum()) for mask in masks]
    references = [attempt.reference_logprobs for attempt in attempts if attempt.reference_logprobs is not None]
    return Tokens(
        sampling_logprobs=np.concatenate([sampling_logprobs(attempt.trajectory) for attempt in attempts]),
        advantages=np.repeat([attempt.advantage for attempt in attempts], counts),
        weights=np.repeat([attempt.weight for attempt in attempts], counts),
        versions=np.concatenate([attempt.trajectory.versions[mask] for attempt, mask in zip(attempts, masks, strict=True)]),
        reference_logprobs=np.concatenate(references) if references else None,
    )


def sampling_logprobs(trajectory: Trajectory) -> np.ndarray:
    """`[k]` float32, of the trained tokens.

    Raises:
        TrainingError: one of them has none, so no importance ratio can be formed.
    """
    logprobs = trajectory.logprobs[trajectory.mask]
    if not np.isfinite(logprobs).all():
        missing = int((~np.isfinite(logprobs)).sum())
        raise TrainingError(
            "trained tokens without sampling log-probs",
            got=f"{missing} in {trajectory.trajectory_id}",
            do="train only spans that the policy sampled, or score them first",
        )
    return logprobs
