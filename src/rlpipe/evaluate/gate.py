"""Whether a policy replaces the champion. N = tasks that both could be scored on.

Errors, for all decisions of a run together: a policy no better than the champion is promoted in at most 1 - `confidence` of the runs, and one that
is nowhere worse is held for a fall in at most 1 - `confidence` of the decisions. Guards and slices only ever hold, so they add nothing to the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from rlpipe.evaluate.metrics import pass_at_k
from rlpipe.evaluate.results import TaskResult
from rlpipe.params import PositiveInt, Section

Metric = Annotated[str, Field(pattern=r"^(greedy_accuracy|pass_at_[1-9][0-9]*)$")]
"""What is compared for each task: 1 or 0 for the greedy completion, or the task's pass@k."""

RESAMPLES = 10_000
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
    """Metrics of which a fall beyond chance holds the challenger, however much it gains."""
    slices: tuple[str, ...] = ()
    """Keys of the tasks' metadata: for each of a key's values a fall beyond chance on its tasks holds the challenger."""
    min_slice_tasks: PositiveInt = 20
    """Slices of fewer tasks are not looked at."""

    @property
    def compared(self) -> str:
        """The metric that must gain."""
        raise NotImplementedError

    def __call__(self, pairs: Sequence[Pair]) -> Decision:
        """Decide; a task that could not be scored under both policies counts for neither."""
        gains = self._gains(pairs)
        if len(gains) < self.min_tasks:
            return Decision("not_enough", f"not enough tasks: {len(gains)} scored for both, at least {self.min_tasks} needed")
        limit = (1 - self.confidence) / self.looks
        chance, gain = self.chance(gains), float(gains.mean())
        said = f"{self.described(gains)}: p = {chance:.3g}, at most {limit:.3g} promotes"
        if gain <= 0 or chance > limit:
            return Decision("hold", said)
        if gain < self.min_gain:
            return Decision("hold", f"{said}; gain {gain:.3g}, at least {self.min_gain:g} asked")
        fallen = self._fallen(pairs)
        return Decision("hold", f"{said}; but fell: {'; '.join(fallen)}") if fallen else Decision("promote", said)

    def chance(self, gains: np.ndarray) -> float:
        """How probable gains `[N]` as large or larger are, were both policies equally strong."""
        raise NotImplementedError

    def described(self, gains: np.ndarray) -> str:
        """Gains `[N]` in words."""
        raise NotImplementedError

    def _gains(self, pairs: Iterable[Pair], metric: str | None = None) -> np.ndarray:
        values = [(_value(pair.challenger, metric or self.compared), _value(pair.champion, metric or self.compared)) for pair in pairs]
        return np.array([new - old for new, old in values if new is not None and old is not None])

    def _fallen(self, pairs: Sequence[Pair]) -> list[str]:
        """The guards and slices that fell, the error shared among all that are looked at (Bonferroni)."""
        guarded = [(guard.metric, guard.by, self._gains(pairs, guard.metric)) for guard in self.must_not_fall]
        sliced = [(name, gains) for name, part in self._slices(pairs) if len(gains := self._gains(part)) >= self.min_slice_tasks]
        limit = (1 - self.confidence) / max(len(guarded) + len(sliced), 1)
        unmeasured = [f"{metric} could not be measured" for metric, _, gains in guarded if not len(gains)]
        found = [(metric, gains, bootstrapped(-gains, by)) for metric, by, gains in guarded if len(gains)]
        found += [(name, gains, self.chance(-gains)) for name, gains in sliced]
        return unmeasured + [f"{name} by {-gains.mean():.3g}, p = {chance:.3g}" for name, gains, chance in found if chance <= limit]

    def _slices(self, pairs: Sequence[Pair]) -> list[tuple[str, list[Pair]]]:
        found: dict[str, list[Pair]] = {}
        for key in self.slices:
            for pair in pairs:
                if key in pair.metadata:
                    found.setdefault(f"{key}={pair.metadata[key]}", []).append(pair)
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

    def chance(self, gains: np.ndarray) -> float:
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

    @property
    def compared(self) -> str:
        return self.metric

    def chance(self, gains: np.ndarray) -> float:
        return bootstrapped(gains, 0.0)

    def described(self, gains: np.ndarray) -> str:
        return f"{self.metric} gained {gains.mean():.3g} over {len(gains)} tasks"


def binomial_tail(successes: int, trials: int) -> float:
    """Probability of `successes` or more heads in `trials` tosses of a fair coin."""
    return sum(math.comb(trials, k) for k in range(successes, trials + 1)) / 2**trials


def bootstrapped(gains: np.ndarray, beyond: float) -> float:
    """Share of resampled means of `gains` `[N]` that are not above `beyond`; the same gains give the same share.

    One is added to both counts, so that no gain is certain (Davison and Hinkley 1997, section 4.2).
    """
    draw, num_tasks, below = np.random.default_rng(0), len(gains), 0
    ordered = np.sort(gains)  # whatever order the tasks come in
    at_once = max(RESAMPLED_AT_ONCE // num_tasks, 1)
    for first in range(0, RESAMPLES, at_once):
        drawn = draw.integers(0, num_tasks, (min(at_once, RESAMPLES - first), num_tasks))
        below += int((ordered[drawn].mean(axis=1) <= beyond + 1e-12).sum())
    return (below + 1) / (RESAMPLES + 1)


def _value(row: TaskResult, metric: str) -> float | None:
    if metric == "greedy_accuracy":
        return None if row.correct is None else float(row.correct)
    return pass_at_k(row.attempts, row.attempts_correct, int(metric.removeprefix("pass_at_")))


Gate = Annotated[Paired | Bootstrap, Field(discriminator="type")]
