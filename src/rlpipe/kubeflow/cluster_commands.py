"""What `rlpipe submit`, `runs` and `schedule` do. Imports of kfp happen inside, so that `rlpipe --help` answers at once."""

from __future__ import annotations

import math
import os
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from rlpipe.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from rlpipe.kubeflow.client import Server
    from rlpipe.kubeflow.compile import Compiled
    from rlpipe.kubeflow.submit import Package


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def submit(options: Namespace) -> None:
    """`rlpipe submit`: compile, make exactly one run, and with --wait follow it to its end."""
    server = connect(options)
    retraining = _retraining(options)
    compiled = _compiled(options)
    from rlpipe.kubeflow import submit as submitting

    run = submitting.submit(
        server,
        _package(compiled, retraining),
        experiment=options.experiment or compiled.config.experiment,
        run_name=options.name,
        service_account=compiled.config.service_account,
        ensured=options.ensure_version,
    )
    _say(f"run={run.run_id}\nlink={server.link('runs', run.run_id)}")
    if options.wait:
        _follow(server, run.run_id, options.timeout, compiled.config.run_timeout_seconds)


def runs(options: Namespace) -> None:
    """`rlpipe runs list|show|logs|stop`."""
    if options.action != "list" and not options.run:
        raise ConfigError(f"`rlpipe runs {options.action}` needs the id of a run", do="see `rlpipe runs list`")
    if options.limit < 1:
        raise ConfigError("--limit needs a positive number", got=options.limit)
    server = connect(options)
    {"list": _list, "show": _show, "logs": _logs, "stop": _stop}[options.action](server, options)


def schedule(options: Namespace) -> None:
    """`rlpipe schedule set|show|off`."""
    server = connect(options)
    {"set": _schedule_set, "show": _schedule_show, "off": _schedule_off}[options.action](server, options)


def connect(options: Namespace) -> Server:
    """The server that the options and the environment name.

    Raises:
        ConfigError: no address, a wrong one, or credentials that cannot be read.
        EngineError: kfp is not installed.
    """
    from rlpipe.kubeflow import auth

    host = options.host or os.environ.get(auth.HOST)
    if not host:
        raise ConfigError("no Kubeflow server is named", do=f"give --host URL or set {auth.HOST}")
    credentials = auth.from_environment(
        os.environ, token_file=options.token_file, cookie_file=options.cookie_file, client_id=options.client_id, other_client_id=options.other_client_id
    )
    ui_host = options.ui_host or os.environ.get(auth.UI_HOST)
    try:
        from rlpipe.kubeflow import client
    except ImportError as error:
        raise EngineError("the client of Kubeflow Pipelines is not installed", got=str(error), do="pip install 'rlpipe[kubeflow]'") from error
    return client.Server(
        auth.address(host),
        credentials,
        namespace=options.namespace,
        ca_cert=options.ca_cert,
        ui_host=auth.address(ui_host) if ui_host else None,
        patience=client.PATIENCE,
    )


def _compiled(options: Namespace) -> Compiled:
    from pathlib import Path

    from rlpipe import workspace
    from rlpipe.kubeflow.compile import compile as compile_pipeline

    raw = workspace.read_params(Path(), options.params, options.assignments, options.rounds)
    return compile_pipeline(raw, options.pipeline)


def _retraining(options: Namespace) -> dict[str, Any]:
    """The arguments that only pipeline `retraining` takes, those that are given.

    Raises:
        ConfigError: they are given for another pipeline, the champion is missing, or the limit is no number.
    """
    named = {"champion_uri": options.champion, "metric": options.metric, "retrain_below": options.retrain_below}
    given = {name: value for name, value in named.items() if value is not None}
    if options.pipeline != "retraining":
        if given:
            do = "leave them out, or give --pipeline retraining"
            raise ConfigError("--champion, --metric and --retrain-below are for the pipeline retraining", got=f"--pipeline {options.pipeline}", do=do)
        return {}
    if not options.champion:
        do = "give --champion URI: the URI of the policy artifact, as the registered version's `source` shows it"
        raise ConfigError("the pipeline retraining needs a champion", do=do)
    if options.retrain_below is not None and not math.isfinite(options.retrain_below):
        raise ConfigError("--retrain-below needs a number", got=options.retrain_below)
    return given


def _package(compiled: Compiled, retraining: dict[str, Any]) -> Package:
    from rlpipe.kubeflow.submit import Package

    return Package(name=compiled.name, version=compiled.version, text=compiled.text, arguments={**compiled.check_arguments(), **retraining})


def _follow(server: Server, run_id: str, timeout: float | None, run_timeout: float | None) -> None:
    from rlpipe.kubeflow.wait import WaitInterruptedError, follow

    try:
        follow(server, run_id, timeout=timeout, run_timeout=run_timeout)
    except KeyboardInterrupt:
        do = f"`rlpipe runs show {run_id} --wait` waits again, `rlpipe runs stop {run_id}` ends it"
        raise WaitInterruptedError("waiting was interrupted, the run goes on", got=f"run {run_id}", do=do) from None


def _list(server: Server, options: Namespace) -> None:
    from rlpipe.kubeflow import runs as found

    for run in found.newest(server, experiment=options.experiment, limit=options.limit):
        _say(found.line(run))


def _show(server: Server, options: Namespace) -> None:
    from rlpipe.kubeflow import runs as found

    if options.wait:
        _follow(server, options.run, options.timeout, None)
    run = found.get(server, options.run)
    _say("\n".join([found.line(run), *found.task_lines(run), f"link={server.link('runs', run.run_id)}"]))


def _logs(server: Server, options: Namespace) -> None:
    from rlpipe.kubeflow import runs as found

    for task, text in found.logs(server, options.run, task=options.task):
        _say(f"==> {task.name} ({task.state})\n{text.rstrip()}")


def _stop(server: Server, options: Namespace) -> None:
    from rlpipe.kubeflow import runs as found

    stopped = found.stop(server, options.run)
    _say(f"run={options.run} state={'stopping' if stopped else 'had_ended'}")


def _schedule_set(server: Server, options: Namespace) -> None:
    from rlpipe.kubeflow import schedule as schedules

    timing = schedules.Timing(options.cron, options.every)
    retraining = _retraining(options)
    compiled = _compiled(options)
    made, kept = schedules.set_schedule(
        server,
        _schedule_name(options),
        timing,
        _package(compiled, retraining),
        experiment=options.experiment or compiled.config.experiment,
        service_account=compiled.config.service_account,
        ensured=options.ensure_version,
    )
    _say(f"recurring_run={made.recurring_run_id}\nlink={server.link('recurringrun', made.recurring_run_id)}")
    for old in kept:
        _say(f"kept={old.recurring_run_id} reason='runs of it are going on; it starts no more, and the next `schedule set` deletes it'")


def _schedule_show(server: Server, options: Namespace) -> None:
    from rlpipe.kubeflow import schedule as schedules

    found = schedules.ours(server, _schedule_name(options))
    for recurring in found:
        active = schedules.active_runs(server, recurring)
        _say(f"{schedules.line(recurring)} active_runs={','.join(run.run_id for run in active) or 'none'}")
    if not found:
        _say(f"schedule={_schedule_name(options)} state=none")


def _schedule_off(server: Server, options: Namespace) -> None:
    from rlpipe.kubeflow import schedule as schedules

    found = schedules.switch_off(server, _schedule_name(options))
    for recurring in found:
        active = schedules.active_runs(server, recurring)
        _say(f"recurring_run={recurring.recurring_run_id} state=off active_runs={','.join(run.run_id for run in active) or 'none'}")
    if not found:
        _say(f"schedule={_schedule_name(options)} state=was_not_on")


def _schedule_name(options: Namespace) -> str:
    return str(options.name or options.pipeline)
