"""Runs on the server: list, show, logs, stop."""

from __future__ import annotations

from typing import Any

from rlpipe.errors import ClusterError, ConfigError
from rlpipe.kubeflow.client import Server
from rlpipe.kubeflow.run_tasks import ENDED, Task, failures, state_of, tasks_of
from rlpipe.kubeflow.submit import whole


def get(server: Server, run_id: str) -> Any:
    """One run with its tasks.

    Raises:
        ClusterError: there is none, or the server refused.
    """
    return whole(server.ask(f"get run {run_id}", server.runs.run_service_get_run, run_id), "run_id", "get run")


def newest(server: Server, *, experiment: str | None = None, limit: int = 20) -> list[Any]:
    """The newest runs, of one experiment if it is named.

    Raises:
        ConfigError: there is no such experiment.
        ClusterError: the server refused, or cannot be reached.
    """
    options: dict[str, Any] = dict(server.in_namespace)
    if experiment is not None:
        call = server.experiments.experiment_service_list_experiments
        found = server.everything("list experiments", call, "experiments", matching={"display_name": experiment}, **server.in_namespace)
        if not found:
            raise ConfigError("the server has no such experiment", got=experiment, do="run `rlpipe runs list` without --experiment")
        options = {"experiment_id": found[0].experiment_id}
    return server.everything("list runs", server.runs.run_service_list_runs, "runs", limit=limit, **options)


def line(run: Any) -> str:
    """A run in one line of `name=value`."""
    times = " ".join(f"{name}={value:%Y-%m-%dT%H:%M:%SZ}" for name in ("created_at", "finished_at") if (value := getattr(run, name)) and value.year > 1970)
    return f"run={run.run_id} state={state_of(run)} name={run.display_name!r} {times}".rstrip()


def task_lines(run: Any) -> list[str]:
    """The tasks of a run, one a line of `name=value`."""
    return [f"task={task.name} state={task.state}" + (f" error={task.error!r}" if task.error else "") for task in tasks_of(run)]


def stop(server: Server, run_id: str) -> bool:
    """End a run; False if it had ended already.

    Raises:
        ClusterError: there is none, or the server refused.
    """
    if state_of(get(server, run_id)) in ENDED:
        return False
    server.ask(f"terminate run {run_id}", server.runs.run_service_terminate_run, run_id)
    return True


def logs(server: Server, run_id: str, *, task: str | None = None) -> list[tuple[Task, str]]:
    """The logs of a task; without one, of the tasks that failed, or of all if none did.

    Kubeflow's API documents no logs. Its pages' server reads those of a pod (`/k8s/pod/logs`), as does an older route of its API server;
    which of the two answers depends on what `--host` leads to.

    Raises:
        ConfigError: the run has no such task.
        ClusterError: the server gives no logs; how to read them with kubectl is said then.
    """
    run = get(server, run_id)
    chosen = _chosen(run, task)
    namespace = _namespace(server, run)
    found: list[tuple[Task, str]] = []
    refusals: list[str] = []
    for one in chosen:
        texts = [_pod_log(server, run_id, pod, namespace, refusals) for pod in one.pods]
        found += [(one, text) for text in texts if text is not None]
    if not found:
        got = "; ".join(dict.fromkeys(refusals)) or f"no pod is named for: {', '.join(one.name for one in chosen) or 'any task'}"
        raise ClusterError("the server gives no logs", got=got, do=_by_hand(run_id, namespace))
    return found


def _chosen(run: Any, task: str | None) -> list[Task]:
    tasks = tasks_of(run)
    if task is None:
        return [one for one in failures(run) if one.pods] or [one for one in tasks if one.pods]
    chosen = [one for one in tasks if one.name == task or one.name.endswith(f".{task}")]
    if not chosen:
        raise ConfigError("the run has no such task", got=task, accepted=", ".join(dict.fromkeys(one.name for one in tasks)) or "it has none yet")
    return chosen


def _namespace(server: Server, run: Any) -> str | None:
    """Where the run's pods are; None where the server has one namespace for all."""
    if server.namespace or not run.experiment_id:
        return server.namespace
    call = server.experiments.experiment_service_get_experiment
    return server.ask(f"get experiment {run.experiment_id}", call, run.experiment_id).namespace or None


def _pod_log(server: Server, run_id: str, pod: str, namespace: str | None, refusals: list[str]) -> str | None:
    query = {"podname": pod, "runid": run_id} | ({"podnamespace": namespace} if namespace else {})
    for path, asked in (("/k8s/pod/logs", query), (f"/apis/v1alpha1/runs/{run_id}/nodes/{pod}/log", {})):
        try:
            return server.text(f"get the log of pod {pod}", path, asked)
        except ClusterError as error:
            refusals.append(str(error.got))
    return None


def _by_hand(run_id: str, namespace: str | None) -> str:
    selected = f"--namespace {namespace or 'kubeflow'} --selector pipeline/runid={run_id}"
    return f"kubectl logs {selected} --container main --prefix --tail -1; pods that are gone have none"
