"""The task `start`: the stages `model`, `tasks` and `start` of `dvc.yaml` in one pod."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlpipe import artifact, params, task_sources
from rlpipe.execute import Call
from rlpipe.kubeflow import wire
from rlpipe.kubeflow.pod import guarded, own_folders
from rlpipe.kubeflow.task import Artifact, Task
from rlpipe.tasks import TasksConfig
from rlpipe.tracking_place import run_key

TASKS = ("train_tasks", "eval_tasks")


class Start(Task):
    """Makes the tasks and round 00.

    Args:
        config: the section of `start`, or a reference to it.
        tasks_config: section `tasks`, or a reference to it.
        tracking: section `tracking`, or a reference to it.
        params_key: the key of the run's params.
        run_id: Kubeflow's id of the run.
    """

    def __init__(self, config: Mapping[str, Any], tasks_config: Mapping[str, Any], tracking: Mapping[str, Any], params_key: str, run_id: str) -> None:
        super().__init__("start", 0, tracking, "", run_id)
        self._config, self._params_key = config, params_key
        self._made: dict[str, Any] = {"tasks": wire.received(tasks_config)}

    def with_model(self, model_config: Mapping[str, Any], model: Artifact, outputs: Mapping[str, Artifact], metrics: Any, report: Artifact) -> str:
        """Fetch or make the model first; returns the key of the run."""
        with guarded("start", 0):
            self._made["model"] = wire.received(model_config)["model"]
            maker = Task("model", 0, self._tracking_given, "", self._run_id)
            record = maker.execute(model_config, {}, {"model": model}, Path(metrics.path).parent, tracked=False)
            return self._make(model, outputs, metrics, report, [record])

    def with_champion(self, champion: Artifact, outputs: Mapping[str, Artifact], metrics: Any, report: Artifact) -> str:
        """Take the policy of an earlier run as the model; returns the key of the run."""
        from rlpipe.policies.causal_lm import POLICY_MODULE

        with guarded("start", 0):
            artifact.verify(Path(champion.path))
            model = SimpleNamespace(path=str(Path(champion.path) / POLICY_MODULE), uri=champion.uri, metadata={})
            return self._make(model, outputs, metrics, report, [])

    def track(self, call: Call, record: dict[str, Any], handed: Mapping[str, Artifact]) -> None:
        """As every task, under the key that the record decides."""
        self._run_key = self._key(record)
        super().track(call, record, handed)

    def known(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """As every task, with the model and the tasks, which no step of the rounds knows."""
        return {**super().known(section), **self._made}

    def _make(self, model: Artifact, outputs: Mapping[str, Artifact], metrics: Any, report: Artifact, records: list[dict[str, Any]]) -> str:
        section = params.validated(TasksConfig, self._made["tasks"], "tasks")
        tasks = {name: outputs[name] for name in TASKS}
        for name, handed in tasks.items():
            task_sources.write(section, "train" if name == "train_tasks" else "eval", Path(handed.path), own_folders())
        inputs = {"model": model, **tasks}
        made = {name: handed for name, handed in outputs.items() if name not in TASKS}
        record = self.execute(self._config, inputs, made, Path(metrics.path).parent)
        self.hand_over([*records, record], inputs, made, metrics, report, None)
        return self._key(record)

    def _key(self, record: Mapping[str, Any]) -> str:
        return run_key(self._params_key, record["outputs"]["policy"], [record["inputs"][name] for name in TASKS])
