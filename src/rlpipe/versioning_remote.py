"""DVC's remotes: what a run made is sent there, and what they lack is found."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlpipe import params
from rlpipe.errors import ConfigError
from rlpipe.versioning import explained, known_root, opened

LOCK = "dvc.lock"


def push(workdir: Path, hashes: Iterable[str], remote: str) -> None:
    """Send what the cache holds under these hashes of `dvc.lock` to a remote, and make sure that it is there.

    Raises:
        VersioningError: the remote refused, cannot be reached, or lacks some of it afterwards.
    """
    with explained(workdir), _causes() as causes:
        from dvc.exceptions import DvcException
        from dvc_data.hashfile.hash_info import HashInfo
        from dvc_data.hashfile.status import compare_status
        from dvc_data.hashfile.transfer import transfer

        repo, wanted = opened(known_root(workdir.absolute())), [HashInfo("md5", value) for value in hashes]
        here, there = repo.cache.local, repo.cloud.get_remote_odb(remote, "push")
        # not shallow: the files of a folder too, not its listing alone
        transfer(here, there, wanted, shallow=False)
        status = compare_status(here, there, wanted, shallow=False, check_deleted=False)
        if missing := status.new | status.missing:
            raise DvcException(f"{len(missing)} files did not reach the remote {remote}: {'; '.join(causes[:3]) or 'not in the cache'}")


def default(workdir: Path) -> str | None:
    """The name of the remote that a plain `dvc push` sends to, None where there is none."""
    with explained(workdir):
        return opened(known_root(workdir.absolute())).config["core"].get("remote") or None


def missing(workdir: Path, remote: str) -> list[str]:
    """The outputs in `dvc.lock` that the remote lacks, in whole or in part; it is asked about every file, whatever DVC remembers of it.

    Raises:
        ConfigError: `dvc.lock` is not YAML, such as after a merge.
        VersioningError: the remote refused or cannot be reached.
    """
    with explained(workdir):
        from dvc_data.hashfile.hash_info import HashInfo
        from dvc_data.hashfile.status import status

        there = opened(known_root(workdir.absolute())).cloud.get_remote_odb(remote, "fetch")
        lacking = []
        for path, value in recorded(workdir).items():
            wanted = HashInfo("md5", value)
            if status(there, [wanted]).missing:
                lacking.append(path)
            elif wanted.isdir and (files := status(there, [wanted], cache_odb=there, shallow=False).missing):
                lacking.append(f"{path} ({len(files)} of its files)")
        return lacking


def recorded(workdir: Path) -> dict[str, str]:
    """The hash of every output in `dvc.lock` by its path; of none where there is no such file.

    Raises:
        ConfigError: the file is not YAML.
    """
    if not (workdir / LOCK).is_file():
        return {}
    try:
        content: dict[str, Any] = params.read_yaml(workdir / LOCK)
    except ConfigError as error:
        do = "remove dvc.lock and run again, whichever side of a merge it came from: what is finished is only recorded anew"
        raise ConfigError(f"{LOCK} is not YAML", got=error.got, do=do) from error
    return {out["path"]: out["md5"] for stage in (content.get("stages") or {}).values() for out in stage.get("outs", ()) if "md5" in out}


@contextmanager
def _causes() -> Iterator[list[str]]:
    """What DVC logs about files it could not send, kept from the terminal: its exception only counts them."""
    causes: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("dvc_data")
    handler.emit = lambda record: causes.append(str(record.exc_info[1] if record.exc_info else record.getMessage()))  # type: ignore[method-assign]
    handlers, logger.handlers, logger.propagate = logger.handlers, [handler], False
    try:
        yield causes
    finally:
        logger.handlers, logger.propagate = handlers, True
