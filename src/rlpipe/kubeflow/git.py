"""Git without a person: credentials from the environment, no prompt, no hook, no signature, a time limit on every call.

`GIT_USERNAME` and `GIT_PASSWORD` (or a token as password) for HTTP; `GIT_SSH_KEY`, a file, and `GIT_SSH_KNOWN_HOSTS`, a
file, for ssh. Git asks a script for the password, which reads it from the environment: it stands on no command line and
in no file. Host keys are checked. Who commits can be set with git's own `GIT_AUTHOR_NAME` and the like.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rlpipe.kubeflow.section import check_url
from rlpipe.redaction import without_secrets
from rlpipe.versioning import VersioningError

LIMIT_SECONDS = 900.0
"""How long one call of git may take; a transfer that stands still ends after a minute."""
PASSED = re.compile(r"GIT_(AUTHOR|COMMITTER)_(NAME|EMAIL)|GIT_SSL_CAINFO|GIT_SSL_CAPATH|GIT_EXEC_PATH|GIT_SSH|GIT_SSH_COMMAND")
"""Of git's environment, what reaches git. The rest speaks of other repositories, or traces what should not be traced."""
CONFIG = """[user]
name = rlpipe
email = rlpipe@localhost
[safe]
directory = *
[core]
autocrlf = false
[commit]
gpgSign = false
[push]
gpgSign = false
followTags = false
[credential]
helper =
[http]
lowSpeedLimit = 1
lowSpeedTime = 60
[gc]
auto = 0
"""
ASKPASS = """#!/bin/sh
case "$1" in
Username*) printf '%s\\n' "$GIT_USERNAME" ;;
*) printf '%s\\n' "$GIT_PASSWORD" ;;
esac
"""
REMEDIES = {
    r"Host key verification failed": "name a file with the host's key in GIT_SSH_KNOWN_HOSTS",
    r"Authentication failed|could not read (Username|Password)|Permission denied|error: 40[13]|not allowed to push": (
        "give the task a secret with GIT_USERNAME and GIT_PASSWORD, or with GIT_SSH_KEY, that may push"
    ),
    r"not found|does not exist|does not appear to be a git repository": "check kubeflow.snapshot.repository, and that the credentials may read it",
}


@dataclass(frozen=True)
class Clone:
    """A repository with one remote, `origin`, and the environment git runs in there."""

    folder: Path
    environment: dict[str, str]

    def git(self, *arguments: str, do: str | None = None) -> str:
        """The output of one git command.

        Raises:
            VersioningError: it failed, took too long, or git is not installed.
        """
        command = ["git", *arguments]
        options = {"cwd": self.folder, "env": self.environment, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            # a session of its own: what git started, such as ssh, ends with it
            process = subprocess.Popen(command, **options, text=True, errors="replace", start_new_session=True)  # type: ignore[call-overload]
        except FileNotFoundError as error:
            raise VersioningError("git is not installed", do="install git in the image") from error
        try:
            output, told = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise VersioningError(f"git {arguments[0]} did not end", got=f"more than {LIMIT_SECONDS:g} s", do="see whether the repository answers") from None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        if process.returncode:
            raise _failed(arguments[0], told, do)
        return str(output).strip()

    def tip(self, branch: str) -> str | None:
        """Fetch the last commit of a branch of origin, and its parents; None where there is no such branch."""
        reference = f"refs/heads/{branch}"
        if not self.git("ls-remote", "origin", reference):
            return None
        self.git("fetch", "--quiet", "--no-tags", "--depth=2", "origin", reference)
        return self.git("rev-parse", "FETCH_HEAD")

    def fetch(self, commit: str) -> str:
        """Fetch a commit of origin, which may be abbreviated; returns its full name.

        Raises:
            VersioningError: origin has no such commit on a branch or tag.
        """
        if len(commit) == 40:
            try:
                self.git("fetch", "--quiet", "--no-tags", "--depth=1", "origin", commit)
                return commit
            except VersioningError as refused:
                if not re.search("not our ref|unadvertised object|remote ref", str(refused)):
                    raise
        self.git("fetch", "--quiet", "--tags", "origin", "+refs/heads/*:refs/remotes/origin/*")
        return self.git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}", do=f"push commit {commit} to the repository")

    def parents(self, commit: str) -> list[str]:
        """The parents of a fetched commit."""
        return self.git("rev-parse", f"{commit}^@").split()


def init(url: str, scratch: Path) -> Clone:
    """An empty repository below `scratch` with `url` as origin; what git needs besides lies in `scratch`, outside the repository.

    Raises:
        ConfigError: the URL carries credentials.
        VersioningError: git is not installed, or a file that the environment names is not there.
    """
    check_url(url)
    folder = scratch / "clone"
    folder.mkdir()
    clone = Clone(folder, _environment(scratch))
    clone.git("init", "--quiet")
    clone.git("remote", "add", "--", "origin", url)
    # here only: a repository in a folder runs its own hooks when it is pushed to, under the same configuration
    clone.git("config", "core.hooksPath", "/dev/null")
    return clone


def _environment(scratch: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_") or PASSED.fullmatch(name)}
    askpass, config = scratch / "askpass", scratch / "gitconfig"
    askpass.write_text(ASKPASS, encoding="ascii")
    askpass.chmod(0o700)
    config.write_text(CONFIG, encoding="ascii")
    environment |= {"GIT_CONFIG_GLOBAL": str(config), "GIT_ASKPASS": str(askpass), "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    # a secret made from a file often ends in a line feed
    environment |= {name: os.environ.get(name, "").strip() for name in ("GIT_USERNAME", "GIT_PASSWORD")}
    if key := os.environ.get("GIT_SSH_KEY"):
        environment["GIT_SSH_COMMAND"] = _ssh(_named(key, "GIT_SSH_KEY"), scratch)
    return environment


def _ssh(key: Path, scratch: Path) -> str:
    """The ssh command with a copy of the key: ssh refuses one that others may read, as a mounted secret is, and one without a last line feed."""
    own = scratch / "ssh-key"
    own.touch(mode=0o600)
    own.write_bytes(key.read_bytes().rstrip() + b"\n")
    command = ["ssh", "-i", str(own), "-o", "IdentitiesOnly=yes", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=30"]
    if hosts := os.environ.get("GIT_SSH_KNOWN_HOSTS"):
        command += ["-o", f"UserKnownHostsFile={_named(hosts, 'GIT_SSH_KNOWN_HOSTS')}"]
    return shlex.join([*command, "-o", "StrictHostKeyChecking=yes"])


def _named(path: str, variable: str) -> Path:
    if not os.access(path, os.R_OK) or not Path(path).is_file():
        # a key given in place of its file's name must not be shown
        got = path if len(path) < 200 and "\n" not in path else "a text that is no path"
        raise VersioningError(f"{variable} names no file that can be read", got=got, do="mount the secret in the folder that it is looked for in")
    return Path(path)


def _failed(command: str, told: str, do: str | None) -> VersioningError:
    told = without_secrets(" ".join(told.split()))
    known = next((remedy for pattern, remedy in REMEDIES.items() if re.search(pattern, told)), None)
    return VersioningError(f"git {command} failed", got=told[-600:] or None, do=do or known or "see whether the repository answers from there")
