"""A round recorded for good: its artifacts in the DVC remote, and a commit that names them on a branch of the run's own.

After `git switch runs/<run> && dvc pull` the very bytes are there, and `dvc repro` runs nothing. Everything happens in a
clone that is removed afterwards, in this order: data to the remote, then the commit to the branch. So a kill in between
leaves a branch that names only data that can be had, and the next try goes on from there. The branch is never forced.

The artifacts are copied into the clone (by reference where the file system can), not hard-linked: DVC makes what it links
read-only, and the files of the pipeline would be the same ones.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe import artifact, layout, versioning, versioning_remote, workspace
from rlpipe import records as run_records
from rlpipe.errors import ArtifactError, StorageError
from rlpipe.kubeflow import git
from rlpipe.kubeflow.section import Snapshot
from rlpipe.params import read_yaml
from rlpipe.versioning import VersioningError

log = logging.getLogger("rlpipe")

FIRST = ("model", "tasks", "start")
"""The stages of round 00."""
LOCK = "dvc.lock"


@dataclass(frozen=True)
class Round:
    """What a snapshot records."""

    run_id: str
    round_index: int
    artifacts: Mapping[str, Path]
    """The folder or file at hand by its place in a working folder, such as `rounds/01/policy`."""
    records: Sequence[Path]
    """Run records of the steps of this round."""
    params: Mapping[str, Any]

    @property
    def stages(self) -> list[str]:
        return [f"{step}@{self.round_index - 1}" for step in layout.ROUND_STEPS] if self.round_index else list(FIRST)

    @property
    def subject(self) -> str:
        return f"Round {layout.round_name(self.round_index)} of run {self.run_id}"


@dataclass(frozen=True)
class Recorded:
    """The pushed commit, and what `dvc_hashes` says of its `dvc.lock`."""

    commit: str
    hashes: dict[str, str]


def snapshot(
    config: Snapshot,
    *,
    run_id: str,
    round_index: int,
    artifacts: Mapping[str, Path],
    records: Sequence[Path],
    params: Mapping[str, Any],
    expect: str | None,
) -> str:
    """`record`, for those who want the commit alone."""
    return record(config, Round(run_id, round_index, artifacts, records, params), expect).commit


def record(config: Snapshot, made: Round, expect: str | None) -> Recorded:
    """Record one round (00 with the model and the tasks) on the run's branch; a second call with the same finds it done.

    Args:
        expect: the commit of the round before, which must be the branch's last; None for the first.

    Raises:
        ArtifactError: an artifact or record is missing, unfinished, or of another round.
        ConfigError: the URL carries credentials, or the params are wrong.
        StorageError: no space for the clone.
        VersioningError: git or DVC refused, the branch is not where this run left it, or the code is not the commit's.
    """
    with tempfile.TemporaryDirectory(prefix="rlpipe-snapshot-") as name:
        scratch = Path(name)
        clone = git.init(config.repository, scratch)
        branch = config.branch_prefix + made.run_id
        clone.git("check-ref-format", f"refs/heads/{branch}", do="see kubeflow.snapshot.branch_prefix: the branch's name is not one for git")
        parent, done = _parent(clone, branch, made, config.commit, expect)
        clone.git("checkout", "--quiet", "--detach", parent)
        folder = _folder(clone, config.folder)
        remote = versioning.detach(folder, config.remote, scratch / "dvc")
        try:
            hashes = _fill(folder, made)
            tree = _tree(clone, folder, made)
            if done is not None:
                _check_same(clone, branch, done, tree)
            versioning_remote.push(folder, (hashes[place] for place in made.artifacts), remote)
        finally:
            versioning.close(folder)
        commit = done or _publish(clone, branch, parent, tree, made)
    log.info("step=snapshot round=%d branch=%s commit=%s state=%s", made.round_index, branch, commit, "up-to-date" if done else "pushed")
    return Recorded(commit, hashes)


def dvc_hashes(lock: Path) -> dict[str, str]:
    """The md5 that a `dvc.lock` records for each output, by its place: `{"rounds/01/policy": "….dir"}`; nothing without the file."""
    stages = (read_yaml(lock).get("stages") or {}) if lock.is_file() else {}
    return {out["path"]: out["md5"] for stage in stages.values() for out in stage.get("outs", ())}


def _parent(clone: git.Clone, branch: str, made: Round, base: str, expect: str | None) -> tuple[str, str | None]:
    """The commit to build on, and the branch's last one where that is this round's on it."""
    tip = clone.tip(branch)
    parent = expect or clone.fetch(base)
    if tip == parent or (tip is None and expect is None):
        return parent, None
    if tip is None or not _is_of(clone, tip, parent, made):
        raise _moved(branch, tip, parent if expect else "no such branch yet")
    return parent, tip


def _is_of(clone: git.Clone, commit: str, parent: str, made: Round) -> bool:
    return clone.parents(commit) == [parent] and clone.git("log", "-1", "--format=%s", commit) == made.subject


def _moved(branch: str, tip: str | None, accepted: str) -> VersioningError:
    do = "somebody else pushed to it, or another run has the same id: keep it under another name (`git branch -m`), remove it, and start the run again"
    return VersioningError(f"branch {branch} is not where this run left it", got=tip or "no such branch", accepted=accepted, do=do)


def _folder(clone: git.Clone, name: str) -> Path:
    root = clone.folder.resolve()
    folder = (root / name).resolve()
    if not folder.is_dir() or not folder.is_relative_to(root):
        raise VersioningError("the repository has no such folder at the run's commit", got=name, do="check kubeflow.snapshot.folder and commit")
    return folder


def _fill(folder: Path, made: Round) -> dict[str, str]:
    """Bring the clone's working folder to where the run stands; returns the hash of every output recorded so far."""
    if made.round_index == 0:
        _forget_former(folder)
    _write_params(folder, dict(made.params))
    _check_code(folder, made.artifacts)
    for place, source in made.artifacts.items():
        _copy(source, folder / place)
    for path in made.records:
        _add_record(folder, path, made.round_index)
    run_records.write_run(folder, made.round_index)
    versioning.commit(folder, made.stages, deps_from_lock=True)
    hashes = dvc_hashes(folder / LOCK)
    if stray := sorted(made.artifacts.keys() - hashes.keys()):
        raise ArtifactError("not an output of this round in dvc.yaml", got=", ".join(stray), accepted=", ".join(hashes))
    return hashes


def _forget_former(folder: Path) -> None:
    """The commit may hold the lock and records of a run that its author made before: this branch is of another one."""
    versioning.forget(folder, (*FIRST, *layout.ROUND_STEPS))
    for former in [*(folder / layout.REPORTS).glob("[0-9][0-9]*/*.json"), folder / layout.RUN_REPORT]:
        former.unlink(missing_ok=True)


def _write_params(folder: Path, raw: dict[str, Any]) -> None:
    """Write the params, and `dvc.yaml` where the repository has none; deps on the user's files are looked up from the folder."""
    (folder / workspace.PARAMS).unlink(missing_ok=True)
    with chdir(folder):
        workspace.write_params(folder, raw)
        if not (folder / workspace.PIPELINE).is_file():
            workspace.write_pipeline(folder, raw)


def _check_code(folder: Path, artifacts: Mapping[str, Path]) -> None:
    """Where the repository is rlpipe's own, its stages depend on the source: it must be the one that made the artifacts."""
    package = folder / "src" / "rlpipe"
    if not package.is_dir():
        return
    for place, source in artifacts.items():
        manifest = artifact.read_manifest(source) if source.is_dir() else {}
        if manifest.get("step") in layout.CODE and manifest["code"] != layout.code_on_disk(manifest["step"], package):
            do = "set kubeflow.snapshot.commit to the commit that the images were built from"
            raise VersioningError(f"{place} was made by other code than the repository's at the run's commit", do=do)


def _copy(source: Path, target: Path) -> None:
    """Put a task file, or the files that an artifact's manifest names, at their place in the clone.

    Raises:
        ArtifactError: it is missing, unfinished, or a file has another size than its manifest says.
        StorageError: no space, or a file cannot be read.
    """
    if not source.is_file():
        artifact.check_sizes(source)
    names = [] if source.is_file() else [*artifact.read_manifest(source)["files"], artifact.MANIFEST]
    try:
        for name in names or [""]:
            versioning.copy_file(source / name, target / name)
    except OSError as error:
        do = "give the task more space, or a TMPDIR that has some"
        raise StorageError("an artifact cannot be copied into the clone", got=f"{type(error).__name__}: {error}", do=do) from error


def _add_record(folder: Path, path: Path, round_index: int) -> None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        step, of = str(content["step"]), int(content["round"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError("not a run record", got=f"{path.name}: {error}", accepted="JSON with step and round") from error
    if of != round_index or not step.isidentifier():
        raise ArtifactError("a run record of another round", got=f"{step} of round {of}", accepted=f"round {round_index}")
    versioning.copy_file(path, folder / layout.report_path(step, round_index))


def _tree(clone: git.Clone, folder: Path, made: Round) -> str:
    """Stage what the commit holds besides what was there; returns the name of the whole tree."""
    names = [workspace.PARAMS, workspace.PIPELINE, LOCK, layout.REPORTS.as_posix()]
    ignores = {(folder / place).parent / ".gitignore" for place in made.artifacts}
    configs = [place / ".dvc" / "config" for place in (folder, *folder.parents) if place.is_relative_to(clone.folder.resolve())]
    paths = [*(folder / name for name in names), *sorted(ignores), *configs]
    clone.git("add", "--force", "--", *(str(path) for path in paths if path.exists()))
    return clone.git("write-tree")


def _check_same(clone: git.Clone, branch: str, tip: str, tree: str) -> None:
    """Refuse a commit of this round that holds something else."""
    if differing := clone.git("diff", "--name-only", tip, tree).splitlines():
        do = "the round was made anew: remove the branch's last commit to record it as it is now"
        raise VersioningError(f"branch {branch} records this round with other contents", got=", ".join(differing[:5]), do=do)


def _publish(clone: git.Clone, branch: str, parent: str, tree: str, made: Round) -> str:
    """Commit and push; if the branch moved meanwhile to the same content, by a try whose answer was lost, that is the commit."""
    clone.git("commit", "--quiet", "--allow-empty", "--no-verify", "--message", made.subject)
    commit = clone.git("rev-parse", "HEAD")
    try:
        clone.git("push", "--quiet", "origin", f"{commit}:refs/heads/{branch}")
    except VersioningError:
        tip = clone.tip(branch)
        if tip is None or tip == parent:
            raise
        if not _is_of(clone, tip, parent, made):
            raise _moved(branch, tip, parent) from None
        _check_same(clone, branch, tip, tree)
        return tip
    return commit
