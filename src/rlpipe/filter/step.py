"""The filter step: what is dropped before anything is scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rlpipe import artifact
from rlpipe.filter.duplicate import Duplicate
from rlpipe.filter.empty import Empty
from rlpipe.filter.repetition import Repetition
from rlpipe.filter.too_long import TooLong
from rlpipe.filter.truncated import Truncated
from rlpipe.params import Section
from rlpipe.step import In, Out, Report

if TYPE_CHECKING:
    from rlpipe.trajectory import Group, Trajectory

Filter = Annotated[Truncated | Empty | TooLong | Duplicate | Repetition, Field(discriminator="type")]


class Config(Section):
    """Section `filter`."""

    filters: tuple[Filter, ...] = (Truncated(), Empty())
    """Asked in this order; the first that says no names the reason."""
    keep: Literal["filtered", "all"] = "filtered"
    """`all` counts the verdicts and drops nothing."""


def run(config: Config, *, trajectories: In, kept: Out, round_index: int) -> Report:
    """Drop trajectories that should not be scored, counting why; a group left without members is gone."""
    from rlpipe import dataset

    tally = Tally()
    num_kept = dataset.write(kept, keep(config, dataset.read_groups(trajectories), tally))
    return Report(
        numbers={
            "num_trajectories": tally.num_trajectories,
            "num_kept": num_kept,
            "num_dropped": tally.num_trajectories - num_kept,
            "num_groups": tally.num_groups,
            "num_groups_kept": tally.num_groups_kept,
        },
        reasons=dict(sorted(tally.reasons.items())),
        outcome=artifact.outcome(trajectories) or (None if num_kept else "no_signal"),
        facts={"dropped": dict(sorted(tally.reasons.items()))},
    )


class Tally:
    """What went through the filters: counts of trajectories, groups and reasons."""

    def __init__(self) -> None:
        self.num_trajectories = self.num_groups = self.num_groups_kept = 0
        self.reasons: Counter[str] = Counter()


def keep(config: Config, groups: Iterable[Group], tally: Tally) -> Iterator[Group]:
    """The groups with the members that every filter keeps, in order; `tally` counts on the way."""
    from rlpipe.trajectory import Group

    for group in groups:
        reasons = [reason(config.filters, trajectory, group) for trajectory in group]
        tally.num_groups += 1
        tally.num_trajectories += len(group)
        tally.reasons.update(why for why in reasons if why is not None)
        left = tuple(row for row, why in zip(group, reasons, strict=True) if config.keep == "all" or why is None)
        if left:
            tally.num_groups_kept += 1
            yield Group(group.group_id, left)


def reason(filters: Iterable[Filter], trajectory: Trajectory, group: Group) -> str | None:
    """Why the first filter that says no drops the trajectory; None if all keep it."""
    for ask in filters:
        verdict = ask(trajectory, group)
        if not verdict.keep:
            return verdict.reason
    return None
