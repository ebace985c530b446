"""DVC: a working folder as a DVC workspace, and outputs made outside DVC recorded in it. The only file that imports dvc.

Outputs reach DVC's cache by hard link (`cache.type = hardlink,copy`): the file in the workspace and the one in the cache are
the same bytes on disk, read-only, so a policy of 600 MB costs its md5 and nothing else. The price: a program that writes into
such a file in place, as root, would change the cache as well. rlpipe's steps never do; they write new files and put them in place.
Where the cache lies on another file system, DVC copies.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.errors import ArtifactError, RlpipeError, StorageError

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
    with _explained(workdir):
        if not (workdir / ".dvc" / "config").is_file():
            _quiet()
            from dvc.repo import Repo

            with Repo.init(str(workdir), no_scm=True) as made, made.config.edit("repo") as config:
                config["core"].update(CORE)
                config["cache"]["type"] = CACHE_TYPES
        elif not _in_git(workdir):
            _do_without_git(workdir)


def commit(workdir: Path, stages: Sequence[str]) -> None:
    """Record finished outputs as `dvc commit -f` does: cache, `dvc.lock`, and the workspace linked to the cache.

    Args:
        workdir: the folder with `dvc.yaml`.
        stages: names such as `start` or `rollout@0`.

    Raises:
        ArtifactError: an output or a dependency of a stage is missing.
        StorageError: the cache cannot be written, or the disk is full.
        VersioningError: DVC refused for another reason, such as a lock held by another process.
    """
    workdir = workdir.absolute()
    # parts of DVC resolve stages against the current folder
    with _explained(workdir), chdir(workdir):
        repo = _repo(_known_root(workdir))
        from dvc.repo import lock_repo

        # `Repo.commit` takes one stage and reads and writes the whole lock file for it, which grows with the rounds
        with lock_repo(repo):
            found = {stage.name: stage for stage in repo.stage.load_all(str(workdir / "dvc.yaml"))}
            if unknown := [name for name in stages if name not in found]:
                raise VersioningError("no such stage in dvc.yaml", got=", ".join(unknown), accepted=", ".join(found))
            wanted = [found[name] for name in stages]
            for stage in wanted:
                stage.save()
                stage.commit()
            wanted[0].dvcfile.dump_stages(wanted, update_pipeline=False)


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
    with _explained(path):
        repo = _repo(_known_root(path))
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
    with _explained(workdir), chdir(workdir):
        repo = _repo(_known_root(workdir))
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


def _known_root(place: Path) -> Path:
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
def _repo(root: Path) -> Repo:
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
def _explained(place: Path) -> Iterator[None]:
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
        raise StorageError("DVC cannot write", got=f"{type(error).__name__}: {error}", do="make the folder writable or free some space") from error
    except DvcException as error:
        cause = error.__cause__
        if isinstance(cause, OSError):
            raise StorageError("DVC cannot write", got=f"{type(cause).__name__}: {cause}", do="make the folder writable or free some space") from error
        raise VersioningError(f"DVC refused to work in {place}", got=str(error), do="see `dvc doctor` and `dvc status`") from error
