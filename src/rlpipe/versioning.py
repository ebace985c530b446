"""DVC: a working folder as a DVC workspace, outputs made outside DVC recorded in it. This file and `versioning_remote` alone import dvc.

Outputs reach DVC's cache by hard link (`cache.type = hardlink,copy`): the file in the workspace and the one in the cache are
the same bytes on disk, read-only, so a policy of 600 MB costs its md5 and nothing else. The price: a program that writes into
such a file in place, as root, would change the cache as well. rlpipe's steps never do; they write new files and put them in place.
Where the cache lies on another file system, DVC copies.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.errors import ArtifactError, RlpipeError, StorageError
from rlpipe.redaction import without_secrets

if TYPE_CHECKING:
    from dvc.repo import Repo

CACHE_TYPES = ["hardlink", "copy"]
CORE = {"analytics": False, "check_update": False, "autostage": False}


class VersioningError(RlpipeError):
    """DVC refused: its files are damaged, locked, or do not fit the working folder."""

    exit_code = 10


def ensure_repo(workdir: Path) -> None:
    """Make `workdir` a DVC workspace of its own: without git, unless it is one already.

    Raises:
        StorageError: the folder cannot be written.
        VersioningError: DVC's files are damaged.
    """
    workdir = workdir.absolute()
    with explained(workdir):
        if not (workdir / ".dvc" / "config").is_file():
            _quiet()
            from dvc.repo import Repo

            with Repo.init(str(workdir), no_scm=True) as made, made.config.edit("repo") as config:
                config["core"].update(CORE)
                config["cache"]["type"] = CACHE_TYPES
        elif not _in_git(workdir):
            _do_without_git(workdir)


def commit(workdir: Path, stages: Sequence[str], *, deps_from_lock: bool = False) -> None:
    """Record finished outputs as `dvc commit -f` does: cache, `dvc.lock`, and the workspace linked to the cache.

    Args:
        workdir: the folder with `dvc.yaml`.
        stages: names such as `start` or `rollout@0`.
        deps_from_lock: a dependency that is not in the workspace has the hash that `dvc.lock` records for it as an output.

    Raises:
        ArtifactError: an output or a dependency of a stage is missing.
        StorageError: the cache cannot be written, or the disk is full.
        VersioningError: DVC refused for another reason, such as a lock held by another process.
    """
    workdir = workdir.absolute()
    # parts of DVC resolve stages against the current folder
    with explained(workdir), chdir(workdir):
        repo = opened(known_root(workdir))
        from dvc.repo import lock_repo

        # `Repo.commit` takes one stage and reads and writes the whole lock file for it, which grows with the rounds
        with lock_repo(repo):
            file = str(workdir / "dvc.yaml")
            # the index also has what other files of the repository track, and costs more
            every = repo.index.stages if deps_from_lock else repo.stage.load_all(file)
            found = {stage.name: stage for stage in every if stage.path == file}
            if unknown := [name for name in stages if name not in found]:
                raise VersioningError("no such stage in dvc.yaml", got=", ".join(unknown), accepted=", ".join(found))
            wanted = [found[name] for name in stages]
            for stage in wanted:
                if deps_from_lock:
                    _complete(stage.deps, {out.fs_path: out for other in every for out in other.outs})
                stage.save(allow_missing=deps_from_lock, run_cache=not deps_from_lock)
                # refuses a missing output whatever the line above allowed
                stage.commit()
            wanted[0].dvcfile.dump_stages(wanted, update_pipeline=False)


def _complete(deps: Sequence[Any], outs: Mapping[str, Any]) -> None:
    """Give the dependencies that are not here the hashes of the outputs that they are."""
    for dep in (dep for dep in deps if not dep.exists):
        out = outs.get(dep.fs_path)
        if out is None or not out.hash_info:
            do = "record the stage that writes it first, or add the file to the repository"
            raise ArtifactError("a dependency is neither in the folder nor recorded as an output in dvc.lock", got=str(dep), do=do)
        dep.hash_name, dep.hash_info, dep.meta, dep.files = out.hash_name, out.hash_info, out.meta, out.files


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content by reference where the file system can (reflink), byte for byte elsewhere; never a link to the same file."""
    from dvc_objects.fs.utils import copyfile

    target.parent.mkdir(parents=True, exist_ok=True)
    copyfile(str(source), str(target))


def detach(workdir: Path, remote: str | None, state: Path) -> str:
    """Make a fresh clone's DVC depend on nothing of this machine: own cache, hard links, state in `state`, all in `.dvc/config.local`.

    Returns the name of the remote. One that is not the repository's default becomes it, so that a plain `dvc pull` finds what is pushed.

    Raises:
        VersioningError: no DVC workspace, no such remote, or one that lies in a folder of the clone.
    """
    root = _root(workdir.absolute())
    if root is None:
        raise VersioningError("the repository has no DVC workspace there", got=workdir.name, do="run `dvc init` (in a subfolder with --subdir) and commit .dvc")
    with explained(workdir):
        from dvc.config import Config
        from dvc.config_schema import RelPath

        config = Config(str(root / ".dvc"))
        name, remotes = remote or config["core"].get("remote"), config["remote"]
        if name not in remotes:
            do = "run `dvc remote add -d NAME URL`, commit .dvc/config and name that commit; a remote of DVC's global config will do too"
            raise VersioningError("the DVC remote is not configured", got=name or "no default remote", accepted=", ".join(remotes) or None, do=do)
        if isinstance(remotes[name]["url"], RelPath):
            raise VersioningError(f"the DVC remote {name} is a folder relative to the clone, which is removed", accepted="a URL or an absolute path")
        with config.edit("local") as local:
            local.update(core={**CORE, "site_cache_dir": str(state)}, cache={"type": CACHE_TYPES, "dir": str(root / ".dvc" / "cache")})
        if config["core"].get("remote") != name and name in config.read("repo")["remote"]:
            with config.edit("repo") as own:
                own["core"]["remote"] = name
        return str(name)


def forget(workdir: Path, groups: Sequence[str]) -> None:
    """Drop from `dvc.lock` what was recorded for the stages of these names, all entries of a `foreach` too."""
    with explained(workdir):
        from dvc.utils.serialize import modify_yaml

        if (lock := workdir / "dvc.lock").is_file():
            with modify_yaml(str(lock)) as content:
                stages = content.get("stages") or {}
                content["stages"] = {name: stage for name, stage in stages.items() if name.partition("@")[0] not in groups}


def close(workdir: Path) -> None:
    """Forget an opened workspace, such as a clone that is about to be removed."""
    if (root := _root(workdir.absolute())) is not None:
        opened(root).close()
        opened.cache_clear()


def dvc_hash(path: Path) -> str:
    """The md5 that DVC records for a file, or for a folder with `.dir` behind it. Nothing is added.

    The hash is kept in DVC's state, so that neither this function nor a later `commit` reads the bytes again.

    Raises:
        ArtifactError: no such path, or not in a DVC workspace.
        StorageError: DVC's state cannot be written.
    """
    path = path.absolute()
    if not path.exists():
        raise ArtifactError("nothing to hash", got=str(path), accepted="a file or folder")
    with explained(path):
        repo = opened(known_root(path))
        from dvc.fs import localfs
        from dvc_data.hashfile.build import build

        _, _, found = build(repo.cache.local, str(path), localfs, "md5", ignore=repo.dvcignore, dry_run=True)
        return str(found.hash_info.value)


def status(workdir: Path) -> dict[str, Any]:
    """What `dvc status` says: changed stages, each with what changed; empty when all is up to date.

    Raises:
        VersioningError: DVC refused.
    """
    workdir = workdir.absolute()
    with explained(workdir), chdir(workdir):
        repo = opened(known_root(workdir))
        return dict(repo.status())


def _root(place: Path) -> Path | None:
    """The folder with `.dvc` that `place` lies in, looked for up to the root of its git repository."""
    git_root = next((folder for folder in (place, *place.parents) if (folder / ".git").exists()), None)
    for folder in (place, *place.parents):
        if (folder / ".dvc" / "config").is_file():
            return folder
        if folder == git_root:
            return None
    return None


def known_root(place: Path) -> Path:
    root = _root(place)
    if root is None:
        raise ArtifactError("not in a DVC workspace", got=str(place), do="run `dvc init --no-scm` in the working folder")
    return root


def _in_git(root: Path) -> bool:
    return any((folder / ".git").exists() for folder in (root, *root.parents))


def _do_without_git(root: Path) -> None:
    """A copy of a git repository without `.git`: DVC refuses to work there until it is told not to look for git."""
    from dvc.config import Config

    config = Config(str(root / ".dvc"), validate=False)
    if not config["core"].get("no_scm"):
        with config.edit("local") as local:
            local["core"]["no_scm"] = True


@cache
def opened(root: Path) -> Repo:
    """The workspace, opened once in a process: opening it costs more than using it."""
    _quiet()
    from dvc.repo import Repo

    return Repo(str(root))


def _quiet() -> None:
    os.environ["DVC_NO_ANALYTICS"] = "true"
    for name in ("dvc", "dvc_data", "dvc_objects"):
        # DVC shows progress bars and hints unless its loggers are this quiet
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def explained(place: Path) -> Iterator[None]:
    """Say in one message what DVC raises."""
    _quiet()
    try:
        from dvc.dependency.base import DependencyDoesNotExistError
        from dvc.exceptions import DvcException
        from dvc.output import OutputDoesNotExistError
    except ModuleNotFoundError as error:
        raise VersioningError("DVC is not installed", got=str(error), do="pip install 'rlpipe[versioning]'") from error

    try:
        yield
    except (OutputDoesNotExistError, DependencyDoesNotExistError) as error:
        raise ArtifactError("DVC cannot record a stage whose files are missing", got=str(error), do="run the step that writes them") from error
    except OSError as error:
        if isinstance(error, RlpipeError):
            raise
        raise StorageError(
            "DVC cannot write", got=without_secrets(f"{type(error).__name__}: {error}"), do="make the folder writable or free some space"
        ) from error
    except DvcException as error:
        cause = error.__cause__
        if isinstance(cause, OSError):
            raise StorageError("DVC cannot write", got=f"{type(cause).__name__}: {cause}", do="make the folder writable or free some space") from error
        told = without_secrets(str(error))
        # a traceback would show what the message leaves out
        raise VersioningError(f"DVC refused to work in {place}", got=told, do="see `dvc doctor` and `dvc status`") from (error if told == str(error) else None)
