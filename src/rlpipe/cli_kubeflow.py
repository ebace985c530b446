"""The command line of what talks to a Kubeflow server; nothing of kfp is imported before a command runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

Command = Callable[[str, str, Callable[[argparse.Namespace], "int | None"]], argparse.ArgumentParser]


def add(command: Command) -> None:
    """Add `submit`, `runs` and `schedule`."""
    from rlpipe.kubeflow import cluster_commands

    submit = command("submit", "compile a pipeline and run it on Kubeflow", cluster_commands.submit)
    _add_server(submit)
    _add_pipeline(submit)
    submit.add_argument("--name", metavar="RUN", help="name of the run (default: the pipeline's, and the time)")
    _add_wait(submit)
    _add_runs(command("runs", "list, show, stop runs on Kubeflow, or read their logs", cluster_commands.runs))
    _add_schedule(command("schedule", "start runs on Kubeflow again and again", cluster_commands.schedule))


def _add_runs(runs: argparse.ArgumentParser) -> None:
    runs.add_argument("action", choices=["list", "show", "logs", "stop"])
    runs.add_argument("run", nargs="?", help="id of the run, for all but list")
    _add_server(runs)
    runs.add_argument("--experiment", metavar="E", help="list: only runs of this experiment")
    runs.add_argument("--limit", type=int, default=20, metavar="N", help="list: the newest N (default: %(default)s)")
    runs.add_argument("--task", metavar="NAME", help="logs: of this task (default: those that failed, or all)")
    _add_wait(runs)


def _add_schedule(schedule: argparse.ArgumentParser) -> None:
    schedule.add_argument("action", choices=["set", "show", "off"])
    _add_server(schedule)
    _add_pipeline(schedule)
    schedule.add_argument("--name", metavar="SCHEDULE", help="name of the schedule (default: the pipeline's)")
    schedule.add_argument("--cron", metavar="TEXT", help="six fields, seconds first: '0 0 3 * * *' is every night at three")
    schedule.add_argument("--every", type=int, metavar="SECONDS", help="instead of --cron")


def _add_server(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server", "Secrets come from RLPIPE_KFP_TOKEN, RLPIPE_KFP_COOKIES, RLPIPE_KFP_CLIENT_SECRET or from files.")
    server.add_argument("--host", metavar="URL", help="address of Kubeflow Pipelines, without user or password (default: RLPIPE_KFP_HOST)")
    server.add_argument("--ui-host", metavar="URL", help="address of its pages for links, if another (default: RLPIPE_KFP_UI_HOST)")
    server.add_argument("--namespace", metavar="N", help="your namespace, where several users share a server")
    server.add_argument("--token-file", type=Path, metavar="F", help="file with a bearer token, such as that of a Kubernetes service account")
    server.add_argument("--cookie-file", type=Path, metavar="F", help="file with cookies, as name=value; name=value")
    server.add_argument("--client-id", metavar="ID", help="OpenID Connect: client id of the server")
    server.add_argument("--other-client-id", metavar="ID", help="OpenID Connect: client id of yours, its secret in RLPIPE_KFP_CLIENT_SECRET")
    server.add_argument("--ca-cert", type=Path, metavar="F", help="certificate authority of the server, as PEM")


def _add_pipeline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pipeline", default="post_training", metavar="NAME", help="post_training or retraining (default: %(default)s)")
    parser.add_argument("--params", type=Path, metavar="FILE", help="params file (default: params.yaml of the folder, else the shipped one)")
    parser.add_argument("--set", dest="assignments", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one value; may be repeated")
    parser.add_argument("--rounds", type=int, metavar="N", help="number of rounds")
    parser.add_argument("--experiment", metavar="E", help="experiment of the runs, made where there is none (default: kubeflow.experiment of params)")
    parser.add_argument("--ensure-version", action="store_true", help="keep the pipeline on the server, as a version named by its content")
    retraining = parser.add_argument_group("pipeline retraining")
    retraining.add_argument("--champion", metavar="URI", help="URI of the policy artifact, as the registered version's `source` shows it; needed")
    retraining.add_argument("--metric", metavar="NAME", help="metric of the champion that decides (default: the pipeline's)")
    retraining.add_argument("--retrain-below", type=float, metavar="X", help="retrain where that metric is below this (default: the pipeline's)")


def _add_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wait", action="store_true", help="follow the run to its end; exit 13 if it failed, 14 if it was cancelled")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="with --wait: wait no longer; the run goes on, exit 11")
