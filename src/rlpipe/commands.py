"""What each command of the CLI does. Imports of the rooms happen inside, so that `rlpipe --help` answers at once."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.errors import DIFFERENT, ConfigError

if TYPE_CHECKING:
    from rlpipe.session import Session


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def run(options: Namespace) -> None:
    """`rlpipe run`: prepare the folder, walk the rounds, show the table."""
    content, session = run_in(options.workdir, options.params, options.assignments, options.rounds, fresh=options.fresh, on=options.on, docker=options.docker)
    from rlpipe import run as rounds

    _say("\n" + rounds.table(content) + "\n\n" + rounds.places(session, content))
    if waiting := session.tracker.problems:
        _say(f"not sent to MLflow yet: {', '.join(waiting)}; do: rlpipe sync, or the next run sends it")


def run_in(
    workdir: Path, params_file: Path | None, assignments: list[str], num_rounds: int | None, *, fresh: bool, on: str | None = None, docker: Sequence[str] = ()
) -> tuple[dict[str, Any], Any]:
    """One run in one folder, in this process or on one of kfp's local runners; returns the content of `reports/run.json` and the session."""
    from rlpipe import run as rounds
    from rlpipe import workspace
    from rlpipe.session import Session

    if docker and on != "kfp-docker":
        raise ConfigError("--docker is for containers", got=" ".join(docker), do="add --on kfp-docker")
    workdir = workdir.resolve()
    with workspace.locked(workdir):
        raw = workspace.prepare(workdir, params_file, assignments, num_rounds)
        session = Session(workdir, raw, fresh=fresh)
        finished = False
        try:
            content = _on_kfp(session, on, docker) if on else rounds.run(session)
            finished = True
        finally:
            session.finish("FINISHED" if finished else "FAILED")
    return content, session


def _on_kfp(session: Session, runner: str, docker: Sequence[str]) -> dict[str, Any]:
    try:
        from rlpipe.kubeflow import local
    except ModuleNotFoundError as error:
        raise ConfigError(f"--on {runner} needs kfp", got=str(error), do="pip install 'rlpipe[kubeflow]'") from error
    return local.run(session, runner, local.parsed(docker))


def compile_pipeline(options: Namespace) -> None:
    """`rlpipe compile`: the pipeline as a file for Kubeflow, with its size and how it grows."""
    from rlpipe import steps, workspace
    from rlpipe.kubeflow import compile as pipelines

    raw = workspace.read_params(Path(), options.params, options.assignments, options.rounds)
    compiled = pipelines.compile(raw, options.pipeline)
    larger = pipelines.compile({**raw, "rounds": steps.round_list(compiled.num_rounds + 1)}, options.pipeline)
    compiled.check_arguments()
    compiled.write(options.out)
    grows = (larger.num_bytes - compiled.num_bytes) / 1000
    ten = (compiled.num_bytes / 1000) + (10 - compiled.num_rounds) * grows
    size = f"{compiled.num_bytes / 1000:.1f} KB for {compiled.num_rounds} rounds, {grows:.1f} KB more each; {ten:.0f} KB of {pipelines.BUDGET_KB} KB for 10"
    lines = {"pipeline": compiled.name, "version": compiled.version, "file": options.out, "size": size, "backend": f"{compiled.least_backend} or later"}
    _say("\n".join(f"{name:>9}  {value}" for name, value in lines.items()))


def repeat(options: Namespace) -> None:
    """`rlpipe repeat`: one folder a seed, then mean, spread and range of the last round's numbers."""
    import statistics

    last = []
    for seed in range(options.num):
        workdir = options.workdir / "repeat" / f"seed-{seed}"
        content, _ = run_in(workdir, options.params, [*options.assignments, f"run.seed={seed}"], options.rounds, fresh=False)
        last.append(content["rounds"][-1])
    for name in ("greedy_accuracy", "sampled_reward", "seconds"):
        values = [row[name] for row in last if row[name] is not None]
        if values:
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            shown = " ".join(f"{value:.4g}" for value in values)
            _say(f"{name} mean={statistics.fmean(values):.4g} std={spread:.4g} min={min(values):.4g} max={max(values):.4g} num={len(values)} values={shown}")


def step(name: str, options: Namespace, *, began: float) -> None:
    """`rlpipe <step>`: one step at the given places, or at those of its round."""
    from rlpipe import steps, workspace
    from rlpipe.session import Session

    session = Session(Path(), _params(options), fresh=options.fresh, began=began)
    signature = steps.load(name).signature
    given = {key: value for key in (*signature.inputs, *signature.outputs) if (value := vars(options)[key]) is not None}
    with workspace.locked(Path()):
        session.call(name, options.round_index, given, {scalar: vars(options)[scalar] for scalar in signature.options})


def plan(options: Namespace) -> None:
    """`rlpipe plan`: what a run would do with each step, and why."""
    import json

    from rlpipe import planning, workspace
    from rlpipe.session import Session

    workdir = options.workdir.resolve()
    raw = workspace.read_params(workdir, options.params, options.assignments, options.rounds)
    planned = planning.plan(Session(workdir, raw))
    _say(json.dumps(planning.rows(planned), indent=1) if options.json else planning.table(planned))


def sync(options: Namespace) -> None:
    """`rlpipe sync`: send to MLflow what runs of this folder could not."""
    from rlpipe import workspace

    tracker = _tracker(options)
    with workspace.locked(options.workdir):
        sent = tracker.sync()
    _say(f"sent={sent} waiting={len(tracker.problems)} place={tracker.place}")


def promote(options: Namespace) -> None:
    """`rlpipe promote`: make a registered version the champion by hand, with the reason."""
    before, tags = _tracker(options).promote_version(options.to, f"by hand: {options.reason}")
    _say(
        f"champion={options.to} before={before or 'none'} "
        + " ".join(f"{name}={tags[name]}" for name in ("policy_version", "round", "dvc", "path") if tags.get(name))
    )


def _tracker(options: Namespace) -> Any:
    from rlpipe import params, workspace
    from rlpipe.tracking import Tracker, TrackingConfig

    workdir = options.workdir.resolve()
    raw = workspace.read_params(workdir, options.params, options.assignments)
    return Tracker(params.section(TrackingConfig, raw, "tracking"), workdir, "", {})


def doctor(options: Namespace) -> int:
    """`rlpipe doctor`: what ails a working folder; all findings, those that failed with what to do."""
    from rlpipe import doctor as checks
    from rlpipe import workspace
    from rlpipe.errors import PreflightError

    workdir = options.workdir.resolve()
    found = checks.findings(workspace.read_params(workdir, options.params, options.assignments), workdir, options.remote)
    _say(checks.as_json(found) if options.json else checks.as_text(found))
    return 0 if all(one.ok for one in found) else PreflightError.exit_code


def reproduce(options: Namespace) -> int:
    """`rlpipe reproduce`: repeat a run in a folder of its own and say whether it came out the same."""
    from rlpipe import reproducing

    found = reproducing.reproduce(options.run.resolve(), (options.out or options.run / ".rlpipe" / "reproduced").resolve())
    _say(found.as_text())
    return DIFFERENT if found.verdict == "different" else 0


def diff(options: Namespace) -> None:
    """`rlpipe diff`: what differs between the runs of two working folders, and which numbers moved."""
    from rlpipe import comparing

    found = comparing.compare(options.first, options.second)
    _say(found.as_json() if options.json else found.as_text())


def ps(options: Namespace) -> None:
    """`rlpipe ps`: what of rlpipe is alive on this machine, and who works in the folder."""
    from rlpipe import processes, workspace

    _say(processes.table(processes.running(), workspace.lock_place(options.workdir)))


def _params(options: Namespace) -> dict[str, Any]:
    from rlpipe import workspace

    return workspace.read_params(Path(), options.params, options.assignments)


def model_fetch(options: Namespace) -> None:
    """`rlpipe model fetch`: a named model, or the one params name (then as a recorded stage)."""
    if options.name:
        from rlpipe.policies.fetch import fetch

        fetch(options.name, options.out)
        return
    from rlpipe.session import Session

    Session(Path(), _params(options)).call("model", 0, {"model": options.out})


def tasks_make(options: Namespace) -> None:
    """`rlpipe tasks make`: the tasks of one split from a named source, or from the one params name."""
    from rlpipe.session import Session

    raw = _params(options)
    source = {"source": options.name, "num": options.num, "seed": options.seed}
    given = {key: value for key, value in source.items() if value is not None}
    if options.name:
        raw["tasks"] = {**raw.get("tasks", {}), options.split: given}
    else:
        raw["tasks"] = {**raw.get("tasks", {}), options.split: {**raw.get("tasks", {}).get(options.split, {}), **given}}
    Session(Path(), raw).make_tasks(options.split, options.out)


def fingerprint(options: Namespace) -> None:
    """`rlpipe fingerprint`: 64 hex digits on one line."""
    from rlpipe import artifact

    _say(artifact.fingerprint(options.path))


def inspect(options: Namespace) -> None:
    """`rlpipe inspect`: a summary of a dataset and some of its trajectories."""
    from rlpipe import inspection

    _say(inspection.summary(options.path))
    for text in inspection.examples(options.path, options.num):
        _say("\n" + text)


def replay(options: Namespace) -> None:
    """`rlpipe replay`: train on earlier scored datasets from a given policy."""
    from rlpipe import replaying

    record = replaying.replay(options.scored, options.policy, options.out, _params(options))
    _say(f"policy={options.out} policy_version={record['numbers']['policy_version']} optimizer_steps={record['numbers']['optimizer_steps']}")
