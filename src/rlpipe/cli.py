"""The command line. Step commands are made from the steps' signatures; nothing heavy is imported before parsing."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rlpipe import cli_kubeflow, layout
from rlpipe.errors import INTERRUPTED, RlpipeError, StorageError
from rlpipe.logs import quiet
from rlpipe.stopping import TERMINATED, Terminated, terminating

_BEGAN = time.monotonic()

STEP_SUMMARIES = {
    "start": "make rounds/00 from a model and tasks",
    "rollout": "generate a group of trajectories for each of this round's tasks",
    "filter": "drop trajectories that should not be scored",
    "reward": "score trajectories and keep the groups that can teach",
    "train": "update the policy on scored trajectories",
    "evaluate": "measure the policy on held-out tasks and decide on promotion",
}

EXIT_CODES = """exit codes:
  0    done; also a round without signal, unless run.no_signal is stop
  1    a fault in rlpipe or in code it calls, with its traceback
  2    wrong command line or params
  3    a dataset broke a rule of its Great Expectations suite
  4    no group can teach anything and run.no_signal is stop
  5    more rewards could not be scored than reward.max_unscorable allows
  6    an artifact is missing, unfinished or damaged
  7    the disk is full or cannot be written
  8    a generation engine or training backend failed or is not installed
  9    a loss, gradient or advantage is not finite
  10   DVC could not record or find a version
  11   a step, or waiting for a run, took longer than its time limit
  12   the Kubeflow API refused, answered wrongly, or cannot be reached
  13   a run on Kubeflow failed
  14   a run on Kubeflow was cancelled
  15   preflight: something the run needs is not there
  16   MLflow refused, or cannot be reached
  17   rlpipe reproduce: the run came out different
  130  interrupted by Ctrl-C; the same command goes on
  143  ended by SIGTERM; the same command goes on
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    options = _parser(argv).parse_args(argv)
    quiet(options.debug)
    try:
        with terminating():
            return int(options.command(options) or 0)
    except RlpipeError as error:
        return _failed(error, error.exit_code, options.debug)
    except (KeyboardInterrupt, Terminated) as error:
        word, code = ("terminated", TERMINATED) if isinstance(error, Terminated) else ("interrupted", INTERRUPTED)
        return _failed(error, code, options.debug, f"{word}; nothing unfinished is believed; do: the same command goes on")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        message = (
            f"the disk is full or cannot be written ({error.strerror or error}); nothing unfinished is believed; do: free space and run the same command again"
        )
        return _failed(error, StorageError.exit_code, options.debug, message)


def _failed(error: BaseException, code: int, debug: bool, message: str | None = None) -> int:
    if debug:
        raise error
    sys.stderr.write(f"rlpipe: {message or error}\n")
    return code


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show tracebacks and debug lines")
    parser = argparse.ArgumentParser(
        prog="rlpipe",
        description="Reinforcement-learning post-training as a pipeline that can be reproduced.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, summary: str, run: Callable[[argparse.Namespace], int | None]) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".", parents=[common])
        made.set_defaults(command=run)
        return made

    _add_run(command)
    for name, summary in STEP_SUMMARIES.items():
        made = command(name, summary, _step(name))
        if name in argv[:1]:
            _add_step(made, name)
    _add_model_and_tasks(command)
    _add_tools(command)
    _add_tracking(command)
    _add_compile(command, argv)
    cli_kubeflow.add(command)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from rlpipe import __version__

        sys.stdout.write(f"rlpipe {__version__}\n")
        parser.exit()


Command = Callable[[str, str, Callable[[argparse.Namespace], "int | None"]], argparse.ArgumentParser]


def _add_params(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--params", type=Path, metavar="FILE", help="params file (default: params.yaml of the folder, else the shipped one); `run` writes it into the folder"
    )
    parser.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one value; may be repeated; `run` writes it into the folder's params.yaml",
    )


def _add_run(command: Command) -> None:
    from rlpipe import commands

    run = command("run", "run all rounds of params.yaml in one process", commands.run)
    _add_run_options(run)
    run.add_argument("--fresh", action="store_true", help="run everything again, finished or not")
    run.add_argument("--on", choices=("kfp-local", "kfp-docker"), help="run the compiled Kubeflow pipeline here: each task a subprocess, or a container")
    run.add_argument(
        "--docker", action="append", default=[], metavar="KEY=VALUE", help="argument of docker's containers.run for every container; may be repeated"
    )
    plan = command("plan", "show what a run would do with each step, and why, without doing it", commands.plan)
    _add_run_options(plan)
    plan.add_argument("--json", action="store_true", help="as JSON instead of a table")
    repeat = command("repeat", "run the same params with several seeds and show the spread", commands.repeat)
    _add_run_options(repeat)
    repeat.add_argument("-n", dest="num", type=int, default=3, metavar="K", help="number of seeds (default: 3)")


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    _add_params(parser)
    parser.add_argument("--workdir", type=Path, default=Path(), metavar="D", help="working folder (default: the current one)")
    parser.add_argument("--rounds", type=int, metavar="N", help="number of rounds; written to the folder's params.yaml")


def _add_step(parser: argparse.ArgumentParser, name: str) -> None:
    """Options of one step command from its signature."""
    from rlpipe import steps

    step = steps.load(name)
    for parameter in (*step.signature.inputs, *step.signature.outputs):
        direction = "input" if parameter in step.signature.inputs else "output"
        default = layout.place(name, parameter, 1 if name != "start" else 0)
        parser.add_argument(f"--{parameter.replace('_', '-')}", dest=parameter, type=Path, metavar="PATH", help=f"{direction} (default in round 1: {default})")
    parser.add_argument("--round-index", type=int, default=0 if name == "start" else 1, metavar="R", help="the round (default: %(default)s)")
    for scalar, default in step.signature.options.items():
        kind = step.signature.scalars[scalar]
        parser.add_argument(f"--{scalar.replace('_', '-')}", dest=scalar, type=kind, default=default, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="run although it is finished")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = steps.described(step.signature.config, name)
    _add_params(parser)


def _step(name: str) -> Callable[[argparse.Namespace], None]:
    def run(options: argparse.Namespace) -> None:
        from rlpipe import commands

        commands.step(name, options, began=_BEGAN)

    return run


def _add_model_and_tasks(command: Command) -> None:
    from rlpipe import commands

    model = command("model", "fetch the start policy's model", commands.model_fetch)
    model.add_argument("action", choices=["fetch"])
    model.add_argument("name", nargs="?", help="smollm2-135m-instruct, char-lm, or a Hugging Face folder or id (default: model.path of params)")
    model.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to put the Hugging Face folder")
    _add_params(model)
    tasks = command("tasks", "make the tasks of one split", commands.tasks_make)
    tasks.add_argument("action", choices=["make"])
    tasks.add_argument("name", nargs="?", help="max_of_three, sort_three, add, a reasoning-gym generator, or a JSONL or Parquet file (default: from params)")
    tasks.add_argument("--split", choices=["train", "eval"], required=True)
    tasks.add_argument("--num", type=int, metavar="N", help="number of tasks")
    tasks.add_argument("--seed", type=int, metavar="S", help="seed of their choice")
    tasks.add_argument("--out", type=Path, required=True, metavar="F", help="the JSONL file to write")
    _add_params(tasks)


def _add_tools(command: Command) -> None:
    from rlpipe import commands

    fingerprint = command("fingerprint", "print the sha256 of an artifact's content", commands.fingerprint)
    fingerprint.add_argument("path", type=Path)
    inspect = command("inspect", "show a trajectory dataset: counts, statuses, lengths, rewards", commands.inspect)
    inspect.add_argument("path", type=Path)
    inspect.add_argument("-n", dest="num", type=int, default=0, metavar="K", help="also show K trajectories as text, spans marked")
    doctor = command("doctor", "check what a run in this folder needs, and the folder's git, DVC and lock", commands.doctor)
    doctor.add_argument("--workdir", type=Path, default=Path(), metavar="D", help="working folder (default: the current one)")
    doctor.add_argument("--remote", metavar="NAME", help="DVC remote to ask for every file of dvc.lock (default: the repository's default)")
    doctor.add_argument("--json", action="store_true", help="as JSON instead of text")
    _add_params(doctor)
    reproduce = command("reproduce", "repeat a run in a folder of its own and say whether it comes out the same", commands.reproduce)
    reproduce.add_argument("run", type=Path, nargs="?", default=Path(), metavar="DIR", help="working folder of the run (default: the current one)")
    reproduce.add_argument("--out", type=Path, metavar="DIR", help="empty folder to repeat it in (default: .rlpipe/reproduced of the run's)")
    diff = command("diff", "show what differs between two runs, and which numbers moved", commands.diff)
    for name in ("first", "second"):
        diff.add_argument(name, type=Path, metavar="DIR", help=f"working folder of the {name} run")
    diff.add_argument("--json", action="store_true", help="as JSON instead of text")
    ps = command("ps", "show what of rlpipe is alive on this machine", commands.ps)
    ps.add_argument("--workdir", type=Path, default=Path(), metavar="D", help="working folder whose lock is looked at (default: the current one)")
    replay = command("replay", "train on scored datasets without generating", commands.replay)
    replay.add_argument("scored", type=Path, nargs="+", metavar="SCORED")
    replay.add_argument("--from", dest="policy", type=Path, required=True, metavar="POLICY", help="the policy to start from")
    replay.add_argument("--out", type=Path, default=Path("replay/policy"), metavar="DIR", help="where to write the trained policy (default: %(default)s)")
    _add_params(replay)


def _add_tracking(command: Command) -> None:
    from rlpipe import commands

    sync = command("sync", "send to MLflow what runs of this folder could not", commands.sync)
    promote = command("promote", "make a registered version the champion, such as to go back to an earlier one", commands.promote)
    promote.add_argument("--to", required=True, metavar="VERSION", help="version of the registered model in MLflow")
    promote.add_argument("--reason", required=True, metavar="TEXT", help="why; kept with the version in MLflow")
    for made in (sync, promote):
        made.add_argument("--workdir", type=Path, default=Path(), metavar="D", help="working folder (default: the current one)")
        _add_params(made)


def _add_compile(command: Command, argv: Sequence[str]) -> None:
    from rlpipe import commands

    made = command("compile", "compile the Kubeflow pipeline of params.yaml", commands.compile_pipeline)
    if argv[:1] == ["compile"]:
        from rlpipe import steps
        from rlpipe.kubeflow.section import KubeflowConfig

        made.formatter_class = argparse.RawDescriptionHelpFormatter
        made.epilog = steps.described(KubeflowConfig, "kubeflow")
    made.add_argument("-o", "--out", type=Path, required=True, metavar="F", help="the YAML file to write")
    made.add_argument("--pipeline", choices=("post_training", "retraining"), default="post_training", help="which (default: %(default)s)")
    made.add_argument("--rounds", type=int, metavar="N", help="number of rounds (default: those of params)")
    _add_params(made)


if __name__ == "__main__":
    sys.exit(main())
