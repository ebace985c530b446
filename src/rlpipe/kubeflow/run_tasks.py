"""The tasks of a run as the Kubeflow API tells them: names that can be read, states, errors, pods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlpipe.kubeflow.answers import said_in

ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
INNER = ("root", "executor", "driver")
"""Names that Kubeflow gives to its own inner tasks; on their own they say nothing."""


@dataclass(frozen=True)
class Task:
    """One task of a run."""

    key: str
    """What tells it from the others of its run."""
    name: str
    """Its name below those of the pipelines it is nested in: `rl-round-2.train`."""
    state: str
    error: str
    """What the server says about its failure; empty where it says nothing."""
    pods: tuple[str, ...]
    because_of_another: bool
    """Whether it failed because a task inside it did."""


def state_of(run: Any) -> str:
    """The state of a run or task; the server leaves it out at first."""
    return str(run.state or "PENDING")


def tasks_of(run: Any) -> list[Task]:
    """The tasks of a run, in the order of their start."""
    details = list((run.run_details.task_details if run.run_details else None) or [])
    details.sort(key=lambda detail: str(detail.start_time or detail.create_time or ""))
    parents = _parents(details)
    failed_parents = {id(parents[id(detail)]) for detail in details if state_of(detail) == "FAILED" and id(detail) in parents}
    return [
        Task(
            key=detail.task_id or detail.pod_name or str(i),
            name=_name(detail, parents),
            state=state_of(detail),
            error=said_in(detail.error.message) if detail.error else "",
            pods=_pods(detail),
            because_of_another=id(detail) in failed_parents,
        )
        for i, detail in enumerate(details)
    ]


def failures(run: Any) -> list[Task]:
    """The tasks that failed by themselves."""
    return [task for task in tasks_of(run) if task.state == "FAILED" and not task.because_of_another]


def _parents(details: Sequence[Any]) -> dict[int, Any]:
    """The task that each is inside of: the one it names, or the one that lists an `executor` among its children.

    Where a server lists children alone, those are what comes next as often as what is inside, but an executor is always inside.
    """
    by_id = {detail.task_id: detail for detail in details if detail.task_id}
    by_pod = {detail.pod_name: detail for detail in details if detail.pod_name}
    parents = {id(detail): by_id[detail.parent_task_id] for detail in details if detail.parent_task_id in by_id}
    for detail in details:
        for child in detail.child_tasks or []:
            inside = by_id.get(child.task_id) or by_pod.get(child.pod_name)
            if inside is not None and inside.display_name in INNER:
                parents.setdefault(id(inside), detail)
    return parents


def _name(detail: Any, parents: dict[int, Any]) -> str:
    names: list[str] = []
    place: Any | None = detail
    while place is not None and len(names) < 20:
        if place.display_name and (place.display_name not in INNER or place is detail):
            names.insert(0, place.display_name)
        place = parents.get(id(place))
    if len(names) > 1 and names[-1] in INNER:
        names.pop()
    return ".".join(names) or str(detail.task_id)


def _pods(detail: Any) -> tuple[str, ...]:
    """The pod of a task; a driver's says nothing about the step."""
    inside = [child.pod_name for child in detail.child_tasks or [] if child.pod_name] if not detail.pod_name else []
    names = [detail.pod_name, *inside] if not str(detail.display_name or "").endswith("driver") else []
    return tuple(dict.fromkeys(name for name in names if name))
