"""What ails a working folder: `rlpipe doctor`. The checks of preflight, and those of the folder's git, DVC and lock; nothing is changed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlpipe import layout, preflight, versioning_remote, workspace
from rlpipe.errors import ConfigError, RlpipeError
from rlpipe.preflight import Finding
from rlpipe.redaction import without_secrets

OUTPUTS = ("rounds", layout.MODEL.as_posix(), layout.TRAIN_TASKS.as_posix(), layout.EVAL_TASKS.as_posix())
"""What stages write: DVC's, never git's."""
SHOWN = 5


def findings(raw: Mapping[str, Any], workdir: Path, remote: str | None = None) -> list[Finding]:
    """Every check on a run with these params in this folder.

    Args:
        raw: the params as read.
        remote: the DVC remote to ask (default: the repository's default).
    """
    found = preflight.findings(raw, workdir=workdir, installed=True)
    return [*found, lock_is_free(workdir), *git_and_dvc_agree(raw, workdir), *_remote(workdir, remote)]


def lock_is_free(workdir: Path) -> Finding:
    """Whether another process is at work in the folder."""
    try:
        with workspace.locked(workdir):
            return Finding("lock", True, "no other run is at work here")
    except ConfigError as error:
        return Finding("lock", False, error.what, "see `rlpipe ps`; a dead process keeps no lock")


def git_and_dvc_agree(raw: Mapping[str, Any], workdir: Path) -> list[Finding]:
    """No output is tracked by git, and no file that a stage needs is unknown to it; nothing of a folder outside of git."""
    if _git(workdir, "rev-parse", "--is-inside-work-tree") is None:
        return [Finding("git", True, "not a git repository")]
    tracked = _git(workdir, "ls-files", "--", *OUTPUTS) or []
    needed = sorted({file for files in workspace.user_files(workdir, dict(raw)).values() for file in files})
    unknown = (_git(workdir, "ls-files", "--others", "--", *needed) or []) if needed else []
    return [
        _listed("outputs in git", tracked, "no output is tracked by git", "git rm -r --cached them, and commit: DVC keeps them"),
        _listed("inputs in git", unknown, "every file that a stage needs is tracked", "git add them: a clone, and DVC's queued experiments, lack them"),
    ]


def remote_has_all(workdir: Path, remote: str | None) -> Finding:
    """The DVC remote, asked about every file that `dvc.lock` speaks of."""
    name = remote or versioning_remote.default(workdir)
    recorded = versioning_remote.recorded(workdir)
    if name is None:
        return Finding("remote", True, "no DVC remote: what the runs made is on this machine alone")
    lacking = versioning_remote.missing(workdir, name)
    return _listed("remote", lacking, f"{name} has all {len(recorded)} outputs of dvc.lock", f"`dvc push -r {name}` where the cache still has them")


def as_text(found: Sequence[Finding]) -> str:
    """One line a finding, what to do below it."""
    width = max(len(finding.name) for finding in found)
    lines = [(f"{'ok' if one.ok else 'FAILED':<6}  {one.name:<{width}}  {one.detail}", one.do) for one in found]
    return "\n".join(line + (f"\n{'':<{width + 8}}  do: {do}" if do else "") for line, do in lines)


def as_json(found: Sequence[Finding]) -> str:
    """The findings as JSON."""
    return json.dumps([asdict(finding) for finding in found], indent=1)


def _remote(workdir: Path, remote: str | None) -> list[Finding]:
    if not (workdir / ".dvc" / "config").is_file():
        return []
    try:
        return [remote_has_all(workdir, remote)]
    except RlpipeError as error:
        return [Finding("remote", False, without_secrets(f"{error.what}: {error.got}"), error.do)]


def _listed(name: str, wrong: Sequence[str], right: str, do: str) -> Finding:
    shown = ", ".join(wrong[:SHOWN]) + (f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
    return Finding(name, not wrong, shown or right, do if wrong else None)


def _git(workdir: Path, *arguments: str) -> list[str] | None:
    """Lines that git says, None where it fails or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=workdir, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None
