"""Whether a policy replaces the champion. N = tasks that both could be scored on.

Errors, for as many decisions together as `looks` says: a policy no better than the champion is promoted in at most 1 - `confidence` of the runs, and
one that is nowhere worse is held for a fall in at most 1 - `confidence` of the decisions. Guards and slices only ever hold, so they add nothing to the
first. For the sign test both are exact bounds; the bootstrap's hold for many tasks (with 20 tasks of which few differ it errs about a third more often).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from rlpipe.errors import ConfigError
from rlpipe.evaluate.metrics import pass_at_k
from rlpipe.evaluate.results import TaskResult
from rlpipe.params import PositiveInt, Section

Metric = Annotated[str, Field(pattern=r"^(greedy_accuracy|pass_at_[1-9][0-9]*)$")]
"""What is compared for each task: 1 or 0 for the greedy completion, or the task's pass@k."""

RESAMPLES = 10_000
"""At least; more where the error to be kept is small, so that ten times fewer than it allows can be seen."""
RESAMPLED_AT_ONCE = 1_000_000
"""Drawn tasks held in memory, 8 bytes each."""


class Pair(NamedTuple):
    """One task's results under both policies, and the task's metadata."""

    challenger: TaskResult
    champion: TaskResult
    metadata: Mapping[str, Any]


class Decision(NamedTuple):
    """`promote`, `hold` or `not_enough` (too few tasks to decide: the champion stays), and why."""

    decision: Literal["promote", "hold", "not_enough"]
    reason: str


class Look(NamedTuple):
    """What a guard or slice showed.

    Attributes:
        gain: mean over its tasks; None of none.
        chance: how probable a fall as large is, were both policies equally strong; None for a guard that too few tasks could be measured on.
        limit: the chance at which it counts as a fall.
    """

    name: str
    num_tasks: int
    gain: float | None
    chance: float | None
    limit: float

    @property
    def fell(self) -> bool:
        """Whether it holds the challenger: what could not be measured does."""
        return self.chance is None or self.chance <= self.limit

    def __str__(self) -> str:
        if self.chance is None or self.gain is None:
            return f"{self.name} could be measured on {self.num_tasks} tasks only"
        return f"{self.name} by {-self.gain:.3g}, p = {self.chance:.3g}"


class Guard(Section):
    """A metric that must not fall."""

    metric: Metric
    by: float = Field(0.0, ge=0, lt=1)
    """A fall of the mean by so much is allowed."""


class _Gate(Section):
    """What every gate asks of a challenger, whatever its test for a gain."""

    min_tasks: PositiveInt = 20
    """Tasks both could be scored on; with fewer the champion stays."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    min_gain: float = Field(0.0, ge=0, lt=1)
    """The least measured gain, as a share of the tasks, that promotes; a gain must be beyond chance as well."""
    looks: PositiveInt = 1
    """Decisions that the error is shared over, such as a run's rounds: each has `(1 - confidence) / looks` of it (Bonferroni)."""
    must_not_fall: tuple[Guard, ...] = ()
    """Metrics of which a fall beyond chance holds the challenger, however much it gains; `min_tasks` apply to each."""
    slices: tuple[str, ...] = ()
    """Keys of the tasks' metadata: for each of a key's values a fall beyond chance on its tasks holds the challenger."""
    min_slice_tasks: PositiveInt = 20
    """Slices of fewer tasks are not looked at."""

    @model_validator(mode="after")
    def _nothing_is_looked_at_twice(self) -> Self:
        for name, given in (("slices", self.slices), ("must_not_fall", [guard.metric for guard in self.must_not_fall])):
            if twice := sorted({one for one in given if list(given).count(one) > 1}):
                raise ValueError(f"{name} names {', '.join(twice)} twice")
        return self

    @property
    def compared(self) -> str:
        """The metric that must gain."""
        raise NotImplementedError

    def check_slices(self, metadata: Iterable[Mapping[str, Any]]) -> None:
        """Make sure that every slice is a key of some held-out task's metadata.

        Raises:
            ConfigError: one is not, so that it would guard nothing.
        """
        known = {key for one in metadata for key in one}
        if unknown := [key for key in self.slices if key not in known]:
            accepted = ", ".join(sorted(known)) or "none: the tasks have no metadata"
            raise ConfigError("evaluate.gate.slices names what no held-out task's metadata has", got=", ".join(unknown), accepted=accepted)

    def __call__(self, pairs: Sequence[Pair]) -> Decision:
        """Decide; a task that could not be scored under both policies counts for neither."""
        gains = self._gains(pairs)
        if len(gains) < self.min_tasks:
            return Decision("not_enough", f"not enough tasks: {len(gains)} scored for both, at least {self.min_tasks} needed")
        limit = (1 - self.confidence) / self.looks
        chance, gain = self.chance(gains, limit), float(gains.mean())
        said = f"{self.described(gains)}: p = {chance:.3g}, at most {limit:.3g} promotes"
        if gain <= 0 or chance > limit:
            return Decision("hold", said)
        if gain < self.min_gain:
            return Decision("hold", f"{said}; gain {gain:.3g}, at least {self.min_gain:g} asked")
        looked = self.looked_at(pairs)
        fallen = [str(one) for one in looked if one.fell]
        return Decision("hold", f"{said}; but fell: {'; '.join(fallen)}") if fallen else Decision("promote", said)

    def looked_at(self, pairs: Sequence[Pair]) -> list[Look]:
        """Every guard and slice, the error shared among all of them (Bonferroni); slices of too few tasks are left out."""
        guarded = [(guard.metric, guard.by, self._gains(pairs, guard.metric)) for guard in self.must_not_fall]
        sliced = [(name, gains) for name, part in self._slices(pairs) if len(gains := self._gains(part)) >= self.min_slice_tasks]
        limit = (1 - self.confidence) / max(len(guarded) + len(sliced), 1)
        looks = [
            Look(name, len(gains), _mean(gains), bootstrapped(-gains, by, limit) if len(gains) >= self.min_tasks else None, limit)
            for name, by, gains in guarded
        ]
        return looks + [Look(name, len(gains), _mean(gains), self.chance(-gains, limit), limit) for name, gains in sliced]

    def chance(self, gains: np.ndarray, limit: float) -> float:
        """How probable gains `[N]` as large or larger are, were both policies equally strong; exact enough to tell it from `limit`."""
        raise NotImplementedError

    def described(self, gains: np.ndarray) -> str:
        """Gains `[N]` in words."""
        raise NotImplementedError

    def _gains(self, pairs: Iterable[Pair], metric: str | None = None) -> np.ndarray:
        values = [(_value(pair.challenger, metric or self.compared), _value(pair.champion, metric or self.compared)) for pair in pairs]
        return np.array([new - old for new, old in values if new is not None and old is not None])

    def _slices(self, pairs: Sequence[Pair]) -> list[tuple[str, list[Pair]]]:
        found: dict[str, list[Pair]] = {}
        for key in self.slices:
            for pair in pairs:
                if key in pair.metadata:
                    found.setdefault(f"{key}={json.dumps(pair.metadata[key], sort_keys=True, ensure_ascii=False)}", []).append(pair)
        return sorted(found.items())


class Paired(_Gate):
    """Promote what answers more of the same tasks, if chance alone would rarely do that.

    Exact one-sided sign test over the tasks that only one of the two answers: the probability of so many wins or more
    among them, were each a fair coin (McNemar's test in its exact form, McNemar 1947). At 200 tasks, of which 50 % and
    60 % are answered independently of each other, it promotes in about two of three cases.
    """

    type: Literal["paired"] = "paired"

    @property
    def compared(self) -> str:
        return "greedy_accuracy"

    def chance(self, gains: np.ndarray, limit: float) -> float:
        wins, losses = int((gains > 0).sum()), int((gains < 0).sum())
        return binomial_tail(wins, wins + losses)

    def described(self, gains: np.ndarray) -> str:
        return f"{int((gains > 0).sum())} tasks won and {int((gains < 0).sum())} lost of {len(gains)}"


class Bootstrap(_Gate):
    """Promote by the mean of a metric per task, its chance from tasks drawn again with replacement (paired bootstrap, Koehn 2004).

    For metrics that are not 0 or 1 a task, such as pass@k of sampled attempts, where the sign test does not apply.
    """

    type: Literal["bootstrap"] = "bootstrap"
    metric: Metric = "pass_at_1"
    min_tasks: int = Field(20, ge=10)
    """Tasks both could be scored on; with fewer the champion stays. Of a handful every resample is alike, so nothing is certain there."""

    @property
    def compared(self) -> str:
        return self.metric

    def chance(self, gains: np.ndarray, limit: float) -> float:
        return bootstrapped(gains, 0.0, limit)

    def described(self, gains: np.ndarray) -> str:
        return f"{self.metric} gained {gains.mean():.3g} over {len(gains)} tasks"


def binomial_tail(successes: int, trials: int) -> float:
    """Probability of `successes` or more heads in `trials` tosses of a fair coin."""
    return sum(math.comb(trials, k) for k in range(successes, trials + 1)) / 2**trials


def bootstrapped(gains: np.ndarray, beyond: float, limit: float = 0.05) -> float:
    """Share of resampled means of `gains` `[N]` that are not above `beyond`; the same gains give the same share.

    One is added to both counts, so that no gain is certain (Davison and Hinkley 1997, section 4.2). There are resamples
    enough to see a tenth of `limit`.
    """
    draw, num_tasks, below = np.random.default_rng(0), len(gains), 0
    ordered = np.sort(gains)  # whatever order the tasks come in
    resamples = max(RESAMPLES, math.ceil(10 / limit))
    at_once = max(RESAMPLED_AT_ONCE // num_tasks, 1)
    for first in range(0, resamples, at_once):
        drawn = draw.integers(0, num_tasks, (min(at_once, resamples - first), num_tasks))
        below += int((ordered[drawn].mean(axis=1) <= beyond + 1e-12).sum())
    return (below + 1) / (resamples + 1)


def _mean(gains: np.ndarray) -> float | None:
    return float(gains.mean()) if len(gains) else None


def _value(row: TaskResult, metric: str) -> float | None:
    if metric == "greedy_accuracy":
        return None if row.correct is None else float(row.correct)
    return pass_at_k(row.attempts, row.attempts_correct, int(metric.removeprefix("pass_at_")))


Gate = Annotated[Paired | Bootstrap, Field(discriminator="type")]
