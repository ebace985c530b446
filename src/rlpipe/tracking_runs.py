"""MLflow's runs of one experiment, found by their tags, so that every process of a run writes into the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

ALIVE = ("RUNNING", "SCHEDULED")


class Runs:
    """Runs of one experiment.

    Args:
        client: MLflow's client.
        experiment: the experiment's id.
    """

    def __init__(self, client: MlflowClient, experiment: str) -> None:
        self._client, self._experiment = client, experiment

    def find_or_create(self, name: str, tags: Mapping[str, str], *, search: bool = True) -> tuple[str, bool]:
        """The id of the first run with all these tags, and whether it was made now.

        One that failed is RUNNING again; one that is FINISHED stays so, since a step run again need not lead to another evaluation.
        """
        if search and (found := self._with(tags, max_results=1)):
            run_id, status = str(found[0].info.run_id), found[0].info.status
            if status not in ("RUNNING", "FINISHED"):
                self._client.update_run(run_id, status="RUNNING")
            return run_id, False
        return str(self._client.create_run(self._experiment, tags=dict(tags), run_name=name).info.run_id), True

    def finish_tagged(self, tag: str, value: str, status: str) -> None:
        """End the runs with this tag, and the rounds in them, that have not ended."""
        for parent in self._with({tag: value}):
            for run in (*self._rounds(parent), parent):
                if run.info.status in ALIVE:
                    self._client.set_terminated(run.info.run_id, status)

    def rounds_tagged(self, tag: str, value: str) -> list[dict[str, float]]:
        """The metrics of each round in the runs with this tag, with `round`; sorted by it."""
        rounds = [run for parent in self._with({tag: value}) for run in self._rounds(parent)]
        rows = [{"round": int(run.data.tags["rlpipe.round"]), **run.data.metrics} for run in rounds]
        return sorted(rows, key=lambda row: row["round"])

    def _rounds(self, parent: Run) -> list[Run]:
        return self._with({"mlflow.parentRunId": parent.info.run_id})

    def _with(self, tags: Mapping[str, str], max_results: int = 1000) -> list[Run]:
        wanted = " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())
        return list(self._client.search_runs([self._experiment], wanted, max_results=max_results, order_by=["attributes.start_time ASC"]))
