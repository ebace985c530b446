"""A working folder as a DVC workspace, with the real DVC."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe import versioning, versioning_remote
from rlpipe.errors import ArtifactError, StorageError
from rlpipe.params import read_yaml

DVC = Path(sys.executable).with_name("dvc")
ROOT = Path(__file__).parents[1]
PIPELINE = """stages:
  start:
    cmd: echo start
    outs:
    - rounds/00/policy
  train:
    foreach: ${rounds}
    do:
      cmd: echo train ${item.round}
      deps:
      - rounds/${item.previous}/policy
      params:
      - train
      outs:
      - rounds/${item.round}/policy
"""
PARAMS = """rounds:
- {round: "01", previous: "00"}
train: {learning_rate: 1e-5}
"""


def dvc(folder, *arguments):
    done = subprocess.run([DVC, *arguments], cwd=folder, capture_output=True, text=True, env={**os.environ, "DVC_NO_ANALYTICS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def workspace(folder):
    folder.mkdir(exist_ok=True)
    (folder / "dvc.yaml").write_text(PIPELINE)
    (folder / "params.yaml").write_text(PARAMS)
    for name, weight in (("00", b"start"), ("01", b"trained")):
        policy = folder / "rounds" / name / "policy"
        policy.mkdir(parents=True)
        (policy / "model.bin").write_bytes(weight)
        (policy / "manifest.json").write_text("{}")
    return folder


def test_a_bare_folder_becomes_a_workspace_without_git_once(tmp_path):
    versioning.ensure_repo(tmp_path)
    config = (tmp_path / ".dvc" / "config").read_text()
    assert "no_scm = True" in config
    assert "analytics = False" in config
    versioning.ensure_repo(tmp_path)
    assert (tmp_path / ".dvc" / "config").read_text() == config


def test_a_folder_inside_another_workspace_gets_its_own(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    versioning.ensure_repo(tmp_path)
    inner = tmp_path / "runs" / "a"
    inner.mkdir(parents=True)
    versioning.ensure_repo(inner)
    assert (inner / ".dvc" / "config").is_file()


def test_a_tracked_workspace_works_without_git_in_a_copy_of_the_files(tmp_path):
    folder = workspace(tmp_path / "copy")
    (folder / ".dvc").mkdir()
    (folder / ".dvc" / "config").write_text("[core]\n    analytics = false\n")
    versioning.ensure_repo(folder)
    versioning.commit(folder, ["start"])
    assert "train@0" in dvc(folder, "status")


def test_after_commit_dvc_has_nothing_to_do(tmp_path):
    folder = workspace(tmp_path / "w")
    versioning.ensure_repo(folder)
    before = Path.cwd()
    versioning.commit(folder, ["start", "train@0"])
    assert Path.cwd() == before
    assert versioning.status(folder) == {}
    assert "up to date" in dvc(folder, "status")
    assert "Data and pipelines are up to date." in dvc(folder, "repro")


def test_a_changed_param_shows_in_the_stages_that_read_it(tmp_path):
    folder = workspace(tmp_path / "w")
    versioning.ensure_repo(folder)
    versioning.commit(folder, ["start", "train@0"])
    (folder / "params.yaml").write_text(PARAMS.replace("1e-5", "2e-5"))
    assert list(versioning.status(folder)) == ["train@0"]


def test_a_removed_param_shows(tmp_path):
    folder = workspace(tmp_path / "w")
    (folder / "params.yaml").write_text(PARAMS.replace("1e-5", "1e-5, warmup_steps: 3"))
    versioning.ensure_repo(folder)
    versioning.commit(folder, ["start", "train@0"])
    (folder / "params.yaml").write_text(PARAMS)
    assert list(versioning.status(folder)) == ["train@0"]


def test_the_cache_holds_the_same_bytes_as_the_workspace(tmp_path):
    folder = workspace(tmp_path / "w")
    versioning.ensure_repo(folder)
    versioning.commit(folder, ["start"])
    weights = folder / "rounds/00/policy/model.bin"
    assert weights.read_bytes() == b"start"
    assert weights.stat().st_nlink == 2
    assert not weights.stat().st_mode & stat.S_IWUSR


def test_a_removed_output_comes_back_from_the_cache(tmp_path):
    folder = workspace(tmp_path / "w")
    versioning.ensure_repo(folder)
    versioning.commit(folder, ["start", "train@0"])
    shutil.rmtree(folder / "rounds/01")
    dvc(folder, "checkout")
    assert (folder / "rounds/01/policy/model.bin").read_bytes() == b"trained"


def test_a_new_output_in_place_of_a_committed_one(tmp_path):
    folder = workspace(tmp_path / "w")
    versioning.ensure_repo(folder)
    versioning.commit(folder, ["start", "train@0"])
    first = versioning.dvc_hash(folder / "rounds/01/policy")
    shutil.rmtree(folder / "rounds/01/policy")
    (folder / "rounds/01/policy").mkdir()
    (folder / "rounds/01/policy/model.bin").write_bytes(b"better")
    versioning.commit(folder, ["train@0"])
    assert versioning.status(folder) == {}
    assert versioning.dvc_hash(folder / "rounds/01/policy") != first


def test_the_hash_is_the_one_dvc_records(tmp_path):
    folder = workspace(tmp_path / "w")
    versioning.ensure_repo(folder)
    before = versioning.dvc_hash(folder / "rounds/00/policy")
    assert before.endswith(".dir")
    assert not (folder / "dvc.lock").exists()
    versioning.commit(folder, ["start"])
    assert before in (folder / "dvc.lock").read_text()
    # md5 of b"start"
    assert versioning.dvc_hash(folder / "rounds/00/policy/model.bin") == "ea2b2676c28c0db26d39331a336c6b92"


def test_a_missing_output_is_named(tmp_path):
    folder = workspace(tmp_path / "w")
    versioning.ensure_repo(folder)
    shutil.rmtree(folder / "rounds/01")
    with pytest.raises(ArtifactError, match="rounds/01/policy"):
        versioning.commit(folder, ["train@0"])
    with pytest.raises(ArtifactError, match="nothing to hash"):
        versioning.dvc_hash(folder / "rounds/01/policy")


def test_no_workspace(tmp_path):
    (tmp_path / "a").write_text("a")
    with pytest.raises(ArtifactError, match="not in a DVC workspace"):
        versioning.dvc_hash(tmp_path / "a")


def test_an_unknown_stage(tmp_path):
    folder = workspace(tmp_path / "w")
    versioning.ensure_repo(folder)
    with pytest.raises(versioning.VersioningError, match="reward@0"):
        versioning.commit(folder, ["reward@0"])


def test_a_damaged_config(tmp_path):
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc" / "config").write_text("[core\n")
    (tmp_path / "a").write_text("a")
    with pytest.raises(versioning.VersioningError):
        versioning.dvc_hash(tmp_path / "a")


def test_a_cache_that_cannot_be_written(tmp_path):
    folder = workspace(tmp_path / "w")
    versioning.ensure_repo(folder)
    (folder / ".dvc" / "cache").write_text("a file where DVC needs a folder")
    with pytest.raises(StorageError, match="DVC cannot write"):
        versioning.commit(folder, ["start"])


def test_the_shipped_pipeline_is_read_by_dvc(tmp_path):
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(ROOT / name, tmp_path)
    versioning.ensure_repo(tmp_path)
    stages = dvc(tmp_path, "stage", "list", "--name-only").split()
    assert stages[:3] == ["model", "tasks", "start"]
    assert {name.split("@")[0] for name in stages[3:]} == {"rollout", "filter", "reward", "train", "evaluate"}
    assert "rollout@0" in stages
    assert "train@1" in stages


def test_a_git_repository_gets_the_lock_file_and_nothing_else(tmp_path):
    folder = workspace(tmp_path / "w")
    subprocess.run(["git", "init", "-q", folder], check=True)
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("tmp", "cache", "*.local"))
    shutil.copy(ROOT / ".dvcignore", folder)
    (folder / ".gitignore").write_text("/rounds/\n")
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"], cwd=folder, check=True)
    versioning.ensure_repo(folder)
    versioning.commit(folder, ["start", "train@0"])
    assert versioning.status(folder) == {}
    changes = subprocess.run(["git", "status", "--short"], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert changes == "?? dvc.lock\n"
    assert not list(folder.glob("rounds/**/.gitignore"))


def test_a_lock_file_that_git_ignores_is_refused_in_words(tmp_path):
    folder = workspace(tmp_path / "w")
    subprocess.run(["git", "init", "-q", folder], check=True)
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("tmp", "cache", "*.local"))
    (folder / ".gitignore").write_text("/rounds/\n/dvc.lock\n")
    with pytest.raises(versioning.VersioningError, match=r"dvc\.lock.* is git-ignored"):
        versioning.commit(folder, ["start"])


def only_round(folder, name):
    """The workspace as a later task has it: the lock, and the outputs of one round."""
    for other in (folder / "rounds").iterdir():
        if other.name != name:
            shutil.rmtree(other)
    return folder


def test_a_dependency_that_is_elsewhere_has_the_hash_of_the_output_it_is(tmp_path):
    folder, whole = workspace(tmp_path / "w"), workspace(tmp_path / "whole")
    for place in (folder, whole):
        versioning.ensure_repo(place)
        versioning.commit(place, ["start"])
    versioning.commit(whole, ["train@0"])
    only_round(folder, "01")
    with pytest.raises(ArtifactError, match="rounds/00/policy"):
        versioning.commit(folder, ["train@0"])
    versioning.commit(folder, ["train@0"], deps_from_lock=True)
    assert (folder / "dvc.lock").read_text() == (whole / "dvc.lock").read_text()


def test_a_dependency_that_is_nowhere(tmp_path):
    folder = only_round(workspace(tmp_path / "w"), "01")
    versioning.ensure_repo(folder)
    with pytest.raises(ArtifactError, match=r"recorded as an output in dvc\.lock; got rounds/00/policy"):
        versioning.commit(folder, ["train@0"], deps_from_lock=True)


def test_a_missing_output_is_not_taken_from_the_lock(tmp_path):
    folder = workspace(tmp_path / "w")
    versioning.ensure_repo(folder)
    versioning.commit(folder, ["start", "train@0"])
    only_round(folder, "00")
    with pytest.raises(ArtifactError, match="rounds/01/policy"):
        versioning.commit(folder, ["train@0"], deps_from_lock=True)


def locked_hash(folder, out):
    return re.search(rf"path: {out}\n +hash: md5\n +md5: (\S+)", (folder / "dvc.lock").read_text())[1]


def pushable(folder, url):
    versioning.ensure_repo(folder)
    dvc(folder, "remote", "add", "--default", "store", url)
    assert versioning.detach(folder, None, folder.with_name("state")) == "store"
    versioning.commit(folder, ["start"])
    return locked_hash(folder, "rounds/00/policy")


def test_a_push_sends_every_file_and_can_be_repeated(tmp_path):
    folder = workspace(tmp_path / "w")
    md5 = pushable(folder, f"{tmp_path}/store")
    versioning_remote.push(folder, [md5], "store")
    versioning_remote.push(folder, [md5], "store")
    # md5 of b"start" and b"{}", and the listing of the folder
    sent = sorted(path.relative_to(tmp_path / "store/files/md5").as_posix() for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert sent == sorted(["ea/2b2676c28c0db26d39331a336c6b92", "99/914b932bd37a50b983c5e7c90ae93b", f"{md5[:2]}/{md5[2:]}"])


def test_what_is_neither_here_nor_there_is_not_called_pushed(tmp_path):
    folder = workspace(tmp_path / "w")
    md5 = pushable(folder, f"{tmp_path}/store")
    lost = folder / ".dvc/cache/files/md5/ea/2b2676c28c0db26d39331a336c6b92"
    lost.unlink()
    # the file, and the folder's listing with it
    with pytest.raises(versioning.VersioningError, match="2 files did not reach the remote store: not in the cache"):
        versioning_remote.push(folder, [md5], "store")


def test_b07_a_refused_push_names_the_cause_and_no_secret(tmp_path, monkeypatch, capfd):
    """Case B07."""
    folder = workspace(tmp_path / "w")
    monkeypatch.setenv("STORE_TOKEN", "marker-8f3a")
    place = tmp_path / "marker-8f3a/store/files/md5"
    md5 = pushable(folder, f"{tmp_path}/marker-8f3a/store")
    place.mkdir(parents=True)
    (place / "ea").write_text("a file where a folder should be")
    with pytest.raises((versioning.VersioningError, StorageError)) as caught:
        versioning_remote.push(folder, [md5], "store")
    assert "/***/store" in str(caught.value)
    assert "marker-8f3a" not in str(caught.value) + "".join(capfd.readouterr())


def test_stages_dropped_from_the_lock(tmp_path):
    folder = workspace(tmp_path / "w")
    versioning.ensure_repo(folder)
    versioning.forget(folder, ["train"])
    versioning.commit(folder, ["start", "train@0"])
    versioning.forget(folder, ["train"])
    assert "train@0" not in (folder / "dvc.lock").read_text()
    assert locked_hash(folder, "rounds/00/policy")
    versioning.forget(folder, ["start"])
    versioning.commit(folder, ["train@0"])


def test_a_copied_file_shares_no_bytes_with_its_source(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b/c"
    source.write_text("a")
    source.chmod(0o600)
    versioning.copy_file(source, target)
    target.write_text("b")
    assert source.read_text() == "a"
    assert stat.S_IMODE(source.stat().st_mode) == 0o600


def test_c01_a_default_changed_in_code_shows_as_a_changed_stage(tmp_path):
    """In the repository's own `dvc.yaml` every stage depends on the code of its rooms and on its whole section."""
    folder = tmp_path / "clone"
    shutil.copytree(ROOT / "src/rlpipe", folder / "src/rlpipe", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(ROOT / name, folder / name)
    for stage in read_yaml(ROOT / "dvc.yaml")["stages"].values():
        for out in stage.get("do", stage)["outs"]:
            place = folder / out.replace("${item.round}", "01")
            place.mkdir(parents=True) if "tasks" not in out else place.parent.mkdir(exist_ok=True)
            (place / "content" if "tasks" not in out else place).write_text("x")
    params = folder / "params.yaml"
    params.write_text(re.sub(r"rounds:\n.*", 'rounds:\n  - {round: "01", previous: "00"}\n', params.read_text(), flags=re.DOTALL))
    versioning.ensure_repo(folder)
    rooms = ["rollout@0", "filter@0", "reward@0", "train@0", "evaluate@0"]
    versioning.commit(folder, ["model", "tasks", "start", *rooms])
    assert versioning.status(folder) == {}
    step = folder / "src/rlpipe/train/section.py"
    step.chmod(0o644)
    assert "warmup_steps: int = Field(0" in step.read_text()
    step.write_text(step.read_text().replace("warmup_steps: int = Field(0", "warmup_steps: int = Field(9"))
    assert set(versioning.status(folder)) == {"train@0"}
    params.write_text(params.read_text().replace("  temperature: 1.0\n", ""))
    assert set(versioning.status(folder)) == {"train@0", "rollout@0"}
