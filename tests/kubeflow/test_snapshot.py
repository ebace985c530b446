"""Rounds recorded on a git branch and in a DVC remote: real git, real DVC, a real micro run."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlpipe import artifact, cli, layout, params
from rlpipe.errors import ArtifactError, StorageError
from rlpipe.kubeflow.section import Snapshot
from rlpipe.kubeflow.snapshot import Round, dvc_hashes, record
from rlpipe.versioning import VersioningError

ROOT = Path(__file__).parents[2]
DVC = Path(sys.executable).with_name("dvc")
START = ["models/start", "tasks/train.jsonl", "tasks/eval.jsonl", *(f"rounds/00/{name}" for name in ("policy", "progress", "history", "evaluation"))]
ROUND = ["trajectories", "progress", "kept", "scored", "history", "policy", "evaluation"]
BRANCH = "refs/heads/runs/abc-1"


def shell(folder: Path, *command: object) -> str:
    environment = {**os.environ, "DVC_NO_ANALYTICS": "1", "PATH": f"{DVC.parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def commit_all(folder: Path) -> str:
    shell(folder, "git", "add", "--all")
    shell(folder, "git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")
    shell(folder, "git", "push", "-q", "origin", "HEAD")
    return shell(folder, "git", "rev-parse", "HEAD")


def project(place: Path, subfolder: str = ".", config: str | None = None, add: Callable[[Path], object] = lambda folder: None) -> Snapshot:
    """A bare repository at `origin.git` with one commit that configures DVC; returns the section that names it."""
    shell(place, "git", "init", "-q", "--bare", "-b", "main", "origin.git")
    shell(place, "git", "clone", "-q", "origin.git", "author")
    folder = place / "author" / subfolder
    (folder / ".dvc").mkdir(parents=True)
    (folder / ".dvc/.gitignore").write_text("/config.local\n/tmp\n/cache\n")
    (folder / ".dvc/config").write_text(config or f"[core]\n    remote = store\n['remote \"store\"']\n    url = {place / 'store'}\n")
    add(folder)
    return Snapshot(repository=f"file://{place / 'origin.git'}", commit=commit_all(place / "author"), folder=subfolder)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two micro rounds; not to be changed."""
    workdir = tmp_path_factory.mktemp("finished")
    options = ["--rounds", "2", "--set", "tracking.enabled=false"]
    assert cli.main(["run", "--params", str(ROOT / "configs/micro.yaml"), "--workdir", str(workdir), *options]) == 0
    return workdir


@dataclass(frozen=True)
class Run:
    """A finished run, to be recorded round by round as the tasks of a pipeline do it."""

    workdir: Path
    config: Snapshot

    def round(self, index: int, **changes: Any) -> Round:
        places = [f"rounds/{index:02d}/{name}" for name in ROUND] if index else START
        steps = layout.ROUND_STEPS if index else ("model", "start")
        parts = {
            "run_id": "abc-1",
            "round_index": index,
            "artifacts": {place: self.workdir / place for place in places},
            "records": [self.workdir / layout.report_path(step, index) for step in steps],
            "params": params.read_yaml(self.workdir / "params.yaml"),
        }
        return Round(**parts | changes)

    def record(self, index: int, expect: str | None = None, **changes: Any) -> str:
        return record(self.config, self.round(index, **changes), expect).commit

    def commits(self) -> list[str]:
        """The subjects of the branch's commits, the last one first."""
        origin = self.config.repository.removeprefix("file://")
        if not shell(ROOT, "git", "ls-remote", origin, BRANCH):
            return []
        return shell(Path(origin), "git", "log", "--format=%s", f"main..{BRANCH}").splitlines()

    def file(self, name: str) -> str:
        """A file of the branch's last commit."""
        return shell(Path(self.config.repository.removeprefix("file://")), "git", "show", f"{BRANCH}:{name}")


def content(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Sha256, modification time and mode of every artifact's files."""
    files = [path for place in ("models", "tasks", "rounds") for path in sorted((folder / place).rglob("*")) if path.name != ".gitignore"]
    return {str(path.relative_to(folder)): (artifact.sha256(path), path.stat().st_mtime_ns, path.stat().st_mode) for path in files if path.is_file()}


def hashes(folder: Path) -> dict[str, str]:
    return {name: sha for name, (sha, _, _) in content(folder).items()}


@pytest.mark.slow
@pytest.mark.parametrize("subfolder", [".", "project"])
def test_a_laptop_gets_the_very_bytes_and_runs_nothing(tmp_path: Path, finished: Path, caplog: pytest.LogCaptureFixture, subfolder: str) -> None:
    """A user's own repository without `dvc.yaml`."""
    run = Run(finished, project(tmp_path, subfolder))
    before = content(finished)
    commit = None
    for index in (0, 1, 2):
        commit = run.record(index, commit)
    assert content(finished) == before
    assert run.commits() == ["Round 02 of run abc-1", "Round 01 of run abc-1", "Round 00 of run abc-1"]

    shell(tmp_path, "git", "clone", "-q", "origin.git", "laptop")
    shell(tmp_path / "laptop", "git", "switch", "-q", "runs/abc-1")
    folder = tmp_path / "laptop" / subfolder
    assert shell(folder, "git", "rev-parse", "HEAD") == commit
    for name in ("params.yaml", "dvc.yaml", "dvc.lock"):
        assert (folder / name).read_text() == (finished / name).read_text()
    shell(folder, DVC, "pull")
    assert hashes(folder) == hashes(finished)
    pulled = content(folder)
    assert shell(folder, DVC, "status") == "Data and pipelines are up to date."
    assert shell(folder, DVC, "repro").splitlines()[-1] == "Data and pipelines are up to date."
    assert content(folder) == pulled

    caplog.clear()
    assert cli.main(["run", "--workdir", str(folder)]) == 0
    assert caplog.text.count("state=up-to-date") == 2 + 2 * 5
    assert hashes(folder) == hashes(finished)
    # the table of the run gains the seconds DVC took here
    assert shell(folder, "git", "diff", "--name-only", "--relative", "HEAD") == "reports/run.json"


def test_b13_a_second_try_finds_the_round_recorded(tmp_path: Path, finished: Path) -> None:
    """Case B13: the same inputs again give the same commit and no second one."""
    run = Run(finished, project(tmp_path))
    first = run.record(0)
    assert run.record(0) == first
    second = run.record(1, first)
    assert run.record(1, first) == second
    assert run.commits() == ["Round 01 of run abc-1", "Round 00 of run abc-1"]


def hook(place: Path, name: str, text: str) -> Path:
    path = place / "origin.git/hooks" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def test_b13_a_push_that_git_refused_is_made_good_by_the_next_try(tmp_path: Path, finished: Path) -> None:
    """Case B13: the data is in the remote before git is asked, and what was sent is not lost."""
    run = Run(finished, project(tmp_path))
    refusing = hook(tmp_path, "pre-receive", "echo closed on Sundays >&2; exit 1")
    with pytest.raises(VersioningError, match=r"git push failed.*closed on Sundays"):
        run.record(0)
    assert run.commits() == []
    sent = sorted((tmp_path / "store").rglob("*"))
    assert len([path for path in sent if path.is_file()]) > 20
    refusing.unlink()
    run.record(0)
    assert run.commits() == ["Round 00 of run abc-1"]
    assert sorted((tmp_path / "store").rglob("*")) == sent


def test_b13_a_push_whose_answer_was_lost_counts(tmp_path: Path, finished: Path) -> None:
    """Case B13: the branch moves, and git says that it did not."""
    run = Run(finished, project(tmp_path))
    hook(tmp_path, "update", 'git update-ref "$1" "$3"; exit 1')
    commit = run.record(0)
    assert commit == shell(tmp_path / "origin.git", "git", "rev-parse", BRANCH)


def test_no_commit_names_data_that_is_not_in_the_remote(tmp_path: Path, finished: Path) -> None:
    (tmp_path / "store").write_text("a file where the remote's folder should be")
    run = Run(finished, project(tmp_path))
    with pytest.raises((VersioningError, StorageError)):
        run.record(0)
    assert run.commits() == []


def test_a_branch_that_moved_is_left_alone(tmp_path: Path, finished: Path) -> None:
    run = Run(finished, project(tmp_path))
    first = run.record(0)
    author = tmp_path / "author"
    shell(author, "git", "fetch", "-q")
    shell(author, "git", "switch", "-q", "runs/abc-1")
    (author / "note.txt").write_text("mine")
    moved = commit_all(author)
    for index, expect in ((0, None), (1, first)):
        with pytest.raises(VersioningError, match=r"runs/abc-1 is not where this run left it.*git branch -m") as caught:
            run.record(index, expect)
        assert moved in str(caught.value) or index == 0
    assert shell(tmp_path / "origin.git", "git", "rev-parse", BRANCH) == moved


def test_the_same_round_with_other_contents_is_refused(tmp_path: Path, finished: Path) -> None:
    run = Run(finished, project(tmp_path))
    first = run.record(0)
    changed = params.override(run.round(0).params, ["train.learning_rate=0.5"])
    with pytest.raises(VersioningError, match=r"with other contents; got params.yaml"):
        run.record(0, params=changed)
    assert shell(tmp_path / "origin.git", "git", "rev-parse", BRANCH) == first


def test_a_branch_that_is_gone_is_not_made_again_from_the_middle(tmp_path: Path, finished: Path) -> None:
    run = Run(finished, project(tmp_path))
    first = run.record(0)
    shell(tmp_path / "origin.git", "git", "update-ref", "-d", BRANCH)
    with pytest.raises(VersioningError, match="got no such branch"):
        run.record(1, first)


def test_what_the_author_ran_before_is_not_taken_for_this_run(tmp_path: Path, finished: Path) -> None:
    """The commit holds its author's own lock, records and `dvc.yaml`: written by hand, it stays, and so do other stages."""
    extra = "  notes:\n    cmd: echo notes\n    outs:\n    - notes.txt\n"

    def add(folder: Path) -> None:
        (folder / "dvc.yaml").write_text("# by hand\n" + re.sub("^# Written.*\n", "", (finished / "dvc.yaml").read_text()) + extra)
        lock = (finished / "dvc.lock").read_text()
        (folder / "dvc.lock").write_text(
            lock
            + "  notes:\n    cmd: echo notes\n    outs:\n    - path: notes.txt\n      hash: md5\n      md5: 0cc175b9c0f1b6a831c399e269772661\n      size: 1\n"
        )
        shutil.copytree(finished / "reports", folder / "reports")

    run = Run(finished, project(tmp_path, add=add))
    run.record(0)
    assert run.file("dvc.yaml").startswith("# by hand")
    assert set(re.findall(r"^  (\S+):$", run.file("dvc.lock"), re.MULTILINE)) == {"model", "tasks", "start", "notes"}
    listed = shell(tmp_path / "origin.git", "git", "ls-tree", "-r", "--name-only", BRANCH, "reports").splitlines()
    assert listed == ["reports/00/model.json", "reports/00/start.json", "reports/run.json"]


def test_another_remote_becomes_the_default_of_the_branch(tmp_path: Path, finished: Path) -> None:
    remotes = "".join(f"['remote \"{name}\"']\n    url = {tmp_path / name}\n" for name in ("a", "b"))
    config = project(tmp_path, config=f"[core]\n    remote = a\n{remotes}")
    run = Run(finished, config.model_copy(update={"remote": "b"}))
    run.record(0)
    assert "remote = b" in run.file(".dvc/config")
    assert (tmp_path / "b").is_dir()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("config", "remote", "message"),
    [
        ("[core]\n    analytics = false\n", None, "DVC remote is not configured; got no default remote.*dvc remote add"),
        ("['remote \"store\"']\n    url = s3://a/b\n", None, "DVC remote is not configured; got no default remote; accepted: store"),
        ("['remote \"store\"']\n    url = s3://a/b\n", "stor", "DVC remote is not configured; got stor; accepted: store"),
        ("['remote \"store\"']\n    url = ../../store\n", "store", "remote store is a folder relative to the clone"),
    ],
)
def test_a_remote_that_cannot_do(tmp_path: Path, config: str, remote: str | None, message: str) -> None:
    section = project(tmp_path, config=config).model_copy(update={"remote": remote})
    with pytest.raises(VersioningError, match=message):
        record(section, Round("abc-1", 0, {}, [], {}), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"folder": "elsewhere"}, "no such folder at the run's commit; got elsewhere"),
        ({"folder": "../.."}, "no such folder"),
        ({"folder": ".."}, "no such folder"),
        ({"commit": "0123456789abcdef0123456789abcdef01234567"}, "push commit 0123456"),
        ({"commit": "0123456"}, "push commit 0123456"),
        ({"repository": "file:///nowhere/origin.git"}, "check kubeflow.snapshot.repository"),
        ({"branch_prefix": "runs/a..b/"}, "kubeflow.snapshot.branch_prefix"),
    ],
)
def test_a_section_that_does_not_fit_the_repository(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    section = project(tmp_path).model_copy(update=changes)
    with pytest.raises(VersioningError, match=message):
        record(section, Round("abc-1", 0, {}, [], {}), None)


def test_a_folder_without_a_dvc_workspace(tmp_path: Path) -> None:
    config = project(tmp_path, "project", add=lambda folder: (folder.parent / "readme").write_text("x"))
    with pytest.raises(VersioningError, match=r"no DVC workspace.*dvc init"):
        record(config.model_copy(update={"folder": "."}), Round("abc-1", 0, {}, [], {}), None)


def test_an_abbreviated_commit_that_no_branch_ends_in(tmp_path: Path, finished: Path) -> None:
    config = project(tmp_path)
    (tmp_path / "author/later.txt").write_text("x")
    commit_all(tmp_path / "author")
    run = Run(finished, config.model_copy(update={"commit": config.commit[:9]}))
    run.record(0)
    assert shell(tmp_path / "origin.git", "git", "rev-parse", f"{BRANCH}^") == config.commit


def test_artifacts_that_are_not_this_rounds(tmp_path: Path, finished: Path) -> None:
    run = Run(finished, project(tmp_path))
    whole = run.round(0)
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    later = [finished / "reports/01/train.json"]
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"artifacts": {**whole.artifacts, "rounds/07/policy": finished / "rounds/01/policy"}},
            "not an output of this round in dvc.yaml; got rounds/07/policy",
        ),
        ({"artifacts": {**whole.artifacts, "rounds/00/policy": unfinished}}, "manifest.json: it is unfinished"),
        ({"artifacts": {name: path for name, path in whole.artifacts.items() if name != "models/start"}}, "models/start"),
        ({"records": later}, "a run record of another round; got train of round 1; accepted: round 0"),
        ({"records": [finished / "params.yaml"]}, "not a run record; got params.yaml"),
    ]
    for changes, message in wrong:
        with pytest.raises(ArtifactError, match=message):
            run.record(0, **changes)
    assert run.commits() == []


def test_the_hashes_of_a_lock_file(tmp_path: Path, finished: Path) -> None:
    """They are the ones DVC looks for in the remote."""
    run = Run(finished, project(tmp_path))
    made = record(run.config, run.round(0), None)
    assert made.hashes == {place: md5 for place, md5 in dvc_hashes(finished / "dvc.lock").items() if place in START}
    for md5 in made.hashes.values():
        assert (tmp_path / "store/files/md5" / md5[:2] / md5[2:]).is_file()
    assert dvc_hashes(tmp_path / "dvc.lock") == {}
    (tmp_path / "dvc.lock").write_text("schema: '2.0'\nstages:\n  a:\n    cmd: a\n    outs:\n    - path: b/c\n      md5: 12.dir\n")
    assert dvc_hashes(tmp_path / "dvc.lock") == {"b/c": "12.dir"}


def checkout(folder: Path) -> None:
    shutil.copytree(ROOT / "src/rlpipe", folder / "src/rlpipe", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, folder)


def test_rlpipes_own_repository(tmp_path: Path, finished: Path) -> None:
    """Its stages depend on the source, which must be the one that made the artifacts; its `.gitignore` names reports."""
    config = project(tmp_path, add=checkout)
    run = Run(finished, config)
    commit = run.record(1, run.record(0))
    shell(tmp_path, "git", "clone", "-q", "origin.git", "laptop")
    shell(tmp_path / "laptop", "git", "checkout", "-q", commit)
    assert (tmp_path / "laptop/reports/01/train.json").is_file()
    shell(tmp_path / "laptop", DVC, "pull", "start", "evaluate@0", "--with-deps")
    changed = shell(tmp_path / "laptop", DVC, "status", "tasks", "start", "train@0", "evaluate@0")
    assert changed == "Data and pipelines are up to date."

    with (tmp_path / "author/src/rlpipe/train/step.py").open("a") as file:
        file.write("# changed\n")
    later = Run(finished, config.model_copy(update={"commit": commit_all(tmp_path / "author")}))
    commit = later.record(0, run_id="abc-2")
    with pytest.raises(VersioningError, match=r"rounds/01/policy was made by other code.*kubeflow.snapshot.commit"):
        later.record(1, commit, run_id="abc-2")


def test_b07_no_secret_is_written_down(tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Case B07: neither in what the commit holds, nor in the log."""
    for name in ("GIT_USERNAME", "GIT_PASSWORD", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "marker-8f3a")
    caplog.set_level(0)
    Run(finished, project(tmp_path)).record(0)
    assert "marker-8f3a" not in shell(tmp_path / "origin.git", "git", "log", "-p", "--all")
    assert "marker-8f3a" not in caplog.text
    holding = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and b"marker-8f3a" in path.read_bytes()]
    assert holding == []
