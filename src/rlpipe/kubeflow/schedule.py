"""Recurring runs: set, show, off. An update ends no run that is going on.

Kubeflow cannot change a recurring run, and deleting one takes its unfinished runs along. So a new one is made, the old one is switched off, and it is
deleted only when all its runs have ended.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import Any

import kfp_server_api

from rlpipe.errors import ConfigError
from rlpipe.kubeflow.client import Server
from rlpipe.kubeflow.run_tasks import ENDED, state_of
from rlpipe.kubeflow.submit import Package, ensure_experiment, new_marker, run_source, whole

log = logging.getLogger("rlpipe")

OURS = "rlpipe "
"""How the description of every recurring run of rlpipe begins; others are left alone."""
ON = ("ENABLED", "ENABLE")


@dataclass(frozen=True)
class Timing:
    """When runs start: either of the two."""

    cron: str | None = None
    """Six fields, seconds first, as Kubeflow reads them."""
    every_seconds: int | None = None

    def __post_init__(self) -> None:
        if (self.cron is None) == (self.every_seconds is None):
            raise ConfigError("a schedule needs one of --cron and --every", got="both" if self.cron is not None else "neither")
        if self.cron is not None and not self.cron.startswith("@") and len(self.cron.split()) != 6:
            do = f'put the seconds first: "0 {self.cron}"' if len(self.cron.split()) == 5 else "see https://pkg.go.dev/github.com/robfig/cron"
            raise ConfigError("--cron needs six fields: second minute hour day month weekday", got=repr(self.cron), do=do)
        if self.every_seconds is not None and self.every_seconds < 1:
            raise ConfigError("--every needs a positive number of seconds", got=self.every_seconds)

    def trigger(self) -> Any:
        """As the API takes it."""
        if self.cron is not None:
            return kfp_server_api.V2beta1Trigger(cron_schedule=kfp_server_api.V2beta1CronSchedule(cron=self.cron))
        return kfp_server_api.V2beta1Trigger(periodic_schedule=kfp_server_api.V2beta1PeriodicSchedule(interval_second=str(self.every_seconds)))


def set_schedule(
    server: Server, name: str, timing: Timing, package: Package, *, experiment: str, service_account: str | None = None, ensured: bool = False
) -> tuple[Any, list[Any]]:
    """Make `name` run `package` at `timing`; the same again changes nothing.

    Returns the recurring run, and the old ones that are switched off but kept because runs of theirs are going on.

    Raises:
        ClusterError: the server refused, or cannot be reached.
    """
    content = _content(timing, package, experiment, service_account, ensured)
    present = ours(server, name)
    same = [one for one in present if enabled(one) and f"content {content}" in str(one.description)]
    if same:
        log.info("schedule=%s recurring_run=%s state=unchanged", name, same[0].recurring_run_id)
        made = same[0]
    else:
        made = _create(server, name, timing, package, content, experiment, service_account, ensured)
        log.info("schedule=%s recurring_run=%s state=created", name, made.recurring_run_id)
    old = [one for one in present if one.recurring_run_id != made.recurring_run_id]
    return made, [one for one in old if not _retired(server, name, one)]


def ours(server: Server, name: str) -> list[Any]:
    """rlpipe's recurring runs of this name, newest first."""
    call = server.recurring_runs.recurring_run_service_list_recurring_runs
    found = server.everything("list recurring runs", call, "recurring_runs", matching={"display_name": name}, **server.in_namespace)
    return [one for one in found if one.display_name == name and str(one.description or "").startswith(OURS)]


def switch_off(server: Server, name: str) -> list[Any]:
    """Start no more runs of this name; those going on go on. Returns what was switched off."""
    found = [one for one in ours(server, name) if enabled(one)]
    for one in found:
        _disable(server, name, one)
    return found


def enabled(recurring: Any) -> bool:
    """Whether it starts runs. A status the server does not tell counts as that of the mode."""
    return recurring.status in ON or (recurring.status != "DISABLED" and recurring.mode in ON)


def active_runs(server: Server, recurring: Any) -> list[Any]:
    """Its runs that have not ended; a run without a state counts as one."""
    identity = recurring.recurring_run_id
    found = server.everything("list runs", server.runs.run_service_list_runs, "runs", matching={"recurring_run_id": identity}, **server.in_namespace)
    return [run for run in found if run.recurring_run_id == identity and state_of(run) not in ENDED]


def line(recurring: Any) -> str:
    """A recurring run in one line of `name=value`."""
    trigger = recurring.trigger
    when = "unknown"
    if trigger and trigger.cron_schedule and trigger.cron_schedule.cron:
        when = f"cron={trigger.cron_schedule.cron!r}"
    elif trigger and trigger.periodic_schedule:
        when = f"every_seconds={trigger.periodic_schedule.interval_second}"
    state = "on" if enabled(recurring) else "off"
    return f"schedule={recurring.display_name} recurring_run={recurring.recurring_run_id} state={state} {when} about={recurring.description!r}"


def _content(timing: Timing, package: Package, *rest: Any) -> str:
    """What decides a recurring run, as 12 hex digits."""
    known = [timing.cron, timing.every_seconds, package.name, package.text, dict(package.arguments), *rest]
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]


def _create(server: Server, name: str, timing: Timing, package: Package, content: str, experiment: str, service_account: str | None, ensured: bool) -> Any:
    marker = f"{new_marker(package)} content {content}"
    body = kfp_server_api.V2beta1RecurringRun(
        display_name=name,
        description=marker,
        experiment_id=ensure_experiment(server, experiment),
        namespace=server.namespace,
        mode=kfp_server_api.RecurringRunMode.ENABLE,
        trigger=timing.trigger(),
        max_concurrency="1",
        no_catchup=True,
        service_account=service_account,
        **run_source(server, package, ensured=ensured),
    )

    def find() -> Any | None:
        return next((one for one in ours(server, name) if one.description == marker), None)

    call = server.recurring_runs.recurring_run_service_create_recurring_run
    return whole(server.create(f"create recurring run {name}", find, call, recurring_run=body), "recurring_run_id", "create recurring run")


def _retired(server: Server, name: str, old: Any) -> bool:
    """Switch an old recurring run off, and delete it if its runs have ended; whether it is gone."""
    if enabled(old):
        _disable(server, name, old)
    active = active_runs(server, old)
    if active:
        log.info("schedule=%s recurring_run=%s state=kept_off active_runs=%s", name, old.recurring_run_id, ",".join(run.run_id for run in active))
        return False
    call = server.recurring_runs.recurring_run_service_delete_recurring_run
    # Orphaned, so that a run started at the last moment is not taken along.
    server.ask(f"delete recurring run {old.recurring_run_id}", call, old.recurring_run_id, propagation_policy="ORPHAN")
    log.info("schedule=%s recurring_run=%s state=deleted", name, old.recurring_run_id)
    return True


def _disable(server: Server, name: str, recurring: Any) -> None:
    call = server.recurring_runs.recurring_run_service_disable_recurring_run
    server.ask(f"disable recurring run {recurring.recurring_run_id}", call, recurring.recurring_run_id)
    log.info("schedule=%s recurring_run=%s state=off", name, recurring.recurring_run_id)
