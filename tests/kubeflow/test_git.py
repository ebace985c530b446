"""Git as a task runs it: credentials only where they belong, time limits, and messages without secrets."""

import base64
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rlpipe.errors import ConfigError
from rlpipe.kubeflow import git
from rlpipe.versioning import VersioningError

MARKER = "marker-8f3a"
IDENTITY = ["-c", "user.name=a", "-c", "user.email=a@b"]


class Handler(BaseHTTPRequestHandler):
    """git's own HTTP server behind a password."""

    root: Path

    def do_GET(self) -> None:
        wanted = base64.b64encode(f"me:{MARKER}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {wanted}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="git"')
            self.end_headers()
            return
        path, _, query = self.path.partition("?")
        length = int(self.headers.get("Content-Length", 0))
        environment = {
            **os.environ,
            "GIT_PROJECT_ROOT": str(self.root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REMOTE_USER": "me",
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(length),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
        }
        answer = subprocess.run(["git", "http-backend"], input=self.rfile.read(length), capture_output=True, env=environment).stdout
        head, _, body = answer.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.send_response(int(headers.pop("Status", "200").split()[0]))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """A bare repository with one commit on main."""
    subprocess.run(["git", "init", "-q", "--bare", "-b", "main", tmp_path / "origin.git"], check=True)
    subprocess.run(["git", "-C", tmp_path / "origin.git", "config", "http.receivepack", "true"], check=True)
    work = tmp_path / "work"
    subprocess.run(["git", "clone", "-q", tmp_path / "origin.git", work], check=True, capture_output=True)
    subprocess.run(["git", "-C", work, *IDENTITY, "commit", "-qm", "first", "--allow-empty"], check=True)
    subprocess.run(["git", "-C", work, "push", "-q", "origin", "HEAD:main"], check=True)
    return tmp_path / "origin.git"


@pytest.fixture
def server(origin: Path) -> Iterator[str]:
    kind = type("Handler", (Handler,), {"root": origin.parent})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}/origin.git"
        serving.shutdown()


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def test_b07_the_password_reaches_the_server_and_nothing_else(server: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case B07: it stands in the environment alone, with the line feed that a secret made from a file has."""
    monkeypatch.setenv("GIT_USERNAME", "me")
    monkeypatch.setenv("GIT_PASSWORD", MARKER + "\n")
    clone = git.init(server, scratch)
    tip = clone.tip("main")
    assert tip is not None
    clone.git("checkout", "--quiet", "--detach", tip)
    clone.git("commit", "--quiet", "--allow-empty", "-m", "second")
    clone.git("push", "--quiet", "origin", "HEAD:refs/heads/runs/a")
    assert clone.git("log", "-1", "--format=%an <%ae> %cn <%ce>") == "rlpipe <rlpipe@localhost> rlpipe <rlpipe@localhost>"
    pushed = clone.tip("runs/a")
    assert pushed is not None
    assert clone.parents(pushed) == [tip]
    files = [path for path in scratch.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if MARKER.encode() in path.read_bytes()] == []
    assert clone.git("remote", "get-url", "origin") == server


def test_b07_a_refusal_says_what_to_do_and_no_secret(server: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case B07."""
    monkeypatch.setenv("GIT_USERNAME", "me")
    monkeypatch.setenv("GIT_PASSWORD", MARKER + "-old")
    with pytest.raises(VersioningError, match=r"git ls-remote failed.*GIT_USERNAME and GIT_PASSWORD") as caught:
        git.init(server, scratch).tip("main")
    assert MARKER not in str(caught.value)
    assert caught.value.__cause__ is None


def test_without_credentials_nobody_is_asked(server: str, scratch: Path) -> None:
    with pytest.raises(VersioningError, match=r"git ls-remote failed.*GIT_USERNAME and GIT_PASSWORD"):
        git.init(server, scratch).tip("main")


def test_a_server_that_never_answers(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(git, "LIMIT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        clone = git.init(f"http://127.0.0.1:{port}/origin.git", scratch)
        began = time.monotonic()
        with pytest.raises(VersioningError, match="git ls-remote did not end; got more than 1 s"):
            clone.tip("main")
        assert time.monotonic() - began < 5
        left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if f":{port}/".encode() in _read(path)]
        assert left == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_clone_runs_no_hook_and_takes_no_configuration_of_its_user(origin: Path, scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A global configuration that signs and hooks, and variables that point git elsewhere."""
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / "pre-push").write_text("#!/bin/sh\nexit 1\n")
    (hooks / "pre-push").chmod(0o755)
    (tmp_path / ".gitconfig").write_text(f"[commit]\ngpgSign = true\n[user]\nname = person\n[core]\nhooksPath = {hooks}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Robot")
    monkeypatch.setenv("GIT_AUTHOR_EMAIL", "robot@example.com")
    clone = git.init(f"file://{origin}", scratch)
    tip = clone.tip("main")
    assert tip is not None
    clone.git("checkout", "--quiet", "--detach", tip)
    clone.git("commit", "--quiet", "--allow-empty", "-m", "second")
    clone.git("push", "--quiet", "origin", "HEAD:refs/heads/runs/a")
    assert clone.git("log", "-1", "--format=%an <%ae> %cn %G?") == "Robot <robot@example.com> rlpipe N"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_repository_of_another_user(origin: Path, scratch: Path) -> None:
    """As a volume shows it in a container that runs under another id."""
    for path in [origin, *origin.rglob("*")]:
        os.chown(path, 4321, 4321)
    assert git.init(f"file://{origin}", scratch).tip("main")


def test_git_is_not_there(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(scratch))
    with pytest.raises(VersioningError, match="git is not installed"):
        git.init("file:///a", scratch)


@pytest.mark.parametrize(
    "url",
    ["https://me:marker-8f3a@git.example/a.git", "https://marker-8f3a@git.example/a.git", "ssh://me:marker-8f3a@git.example/a.git", "HTTPS://marker-8f3a@a/b"],
)
def test_b07_credentials_in_a_url(url: str) -> None:
    """Case B07: refused, and not repeated."""
    with pytest.raises(ConfigError, match=r"kubeflow\.snapshot\.repository carries a user or password.*GIT_PASSWORD") as caught:
        git.check_url(url)
    assert MARKER not in str(caught.value)


@pytest.mark.parametrize("url", ["https://git.example/a.git?private_token=marker-8f3a", "HTTP://git.example?marker-8f3a"])
def test_b07_a_token_in_the_query_of_a_url(url: str) -> None:
    """Case B07: refused, and not repeated."""
    with pytest.raises(ConfigError, match=r"kubeflow\.snapshot\.repository carries a query, where a token may stand.*GIT_PASSWORD") as caught:
        git.check_url(url)
    assert MARKER not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["https://git.example/a@b/c.git", "ssh://git@git.example:22/a.git", "git@git.example:a/b.git", "file:///a/b@c.git", "https://git.example:8443/a.git"]
)
def test_urls_without_credentials(url: str) -> None:
    git.check_url(url)


def test_an_option_is_not_a_url() -> None:
    with pytest.raises(ConfigError, match="not a URL; got --upload-pack=x"):
        git.check_url("--upload-pack=x")


def test_an_ssh_key_from_a_secret(scratch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh refuses a key that others may read, as a mounted one is, and one without a last line feed. Host keys are checked."""
    key, hosts = tmp_path / "key", tmp_path / "known_hosts"
    key.write_text("-----BEGIN-----")
    key.chmod(0o644)
    hosts.write_text("git.example ssh-ed25519 AAAA")
    seen = tmp_path / "seen"
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        f'#!/bin/sh\nprintf \'%s\\n\' "$@" > {seen}\nstat -c %a "$2" >> {seen}\ncat "$2" >> {seen}\necho Host key verification failed. >&2\nexit 255\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GIT_SSH_KEY", str(key))
    monkeypatch.setenv("GIT_SSH_KNOWN_HOSTS", str(hosts))
    with pytest.raises(VersioningError, match=r"Host key verification failed.*GIT_SSH_KNOWN_HOSTS"):
        git.init("ssh://git@git.example/a.git", scratch).tip("main")
    told = seen.read_text()
    assert "StrictHostKeyChecking=yes" in told
    assert f"UserKnownHostsFile={hosts}" in told
    assert told.endswith("\n600\n-----BEGIN-----\n")


@pytest.mark.parametrize(("variable", "value"), [("GIT_SSH_KEY", "/nowhere/key"), ("GIT_SSH_KEY", "-----BEGIN-----\nmarker-8f3a\n")])
def test_b07_an_ssh_key_that_is_no_file(scratch: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    """Case B07: a key given in place of its file's name is not shown."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(VersioningError, match=f"{variable} names no file") as caught:
        git.init("ssh://git@git.example/a.git", scratch)
    assert MARKER not in str(caught.value)
