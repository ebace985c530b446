from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from rlpipe.errors import ConfigError
from rlpipe.params import Section
from rlpipe.seeds import seed


class Visit(NamedTuple):
    """The `visit`-th time that a task is attempted."""

    task_id: str
    visit: int


class Uniform(Section):
    """Every task once per epoch, in an order that depends on the data seed and the epoch alone; batches cross epochs.

    State: `epoch`, `cursor` (tasks of the epoch already visited) and `tasks` (hash of the task ids the cursor counts in;
    another task set begins a new epoch).
    """

    type: Literal["uniform"] = "uniform"

    def init(self) -> dict[str, Any]:
        """Before the first task."""
        return {"epoch": 0, "cursor": 0, "tasks": None}

    def __call__(self, state: dict[str, Any], task_ids: Sequence[str], budget: int, data_seed: int) -> tuple[list[Visit], dict[str, Any]]:
        """The next `budget` visits and the state after them.

        Raises:
            ConfigError: there are fewer tasks than `budget`.
        """
        if len(task_ids) < budget:
            raise ConfigError(
                "a task set smaller than the batch",
                got=f"{len(task_ids)} tasks",
                accepted=f"at least rollout.num_tasks = {budget}",
                do="add tasks or lower rollout.num_tasks",
            )
        names = hashlib.sha256("\0".join(task_ids).encode()).hexdigest()
        epoch, cursor = int(state["epoch"]), int(state["cursor"])
        if state["tasks"] not in (None, names):
            epoch, cursor = epoch + 1, 0
        visits: list[Visit] = []
        while len(visits) < budget:
            if cursor == len(task_ids):
                epoch, cursor = epoch + 1, 0
            taken = order(task_ids, data_seed, epoch)[cursor : cursor + budget - len(visits)]
            visits += [Visit(task_id, epoch) for task_id in taken]
            cursor += len(taken)
        return visits, {"epoch": epoch, "cursor": cursor, "tasks": names}


def order(task_ids: Sequence[str], data_seed: int, epoch: int) -> list[str]:
    """The task ids as one epoch visits them."""
    import numpy as np

    places = np.random.Generator(np.random.Philox(key=seed("task order", data_seed, epoch))).permutation(len(task_ids))
    return [task_ids[i] for i in places]
