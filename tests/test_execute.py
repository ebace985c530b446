"""The wrapper: nothing half-written is believed, what is finished is not run again, what is unfinished goes on."""

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlpipe import artifact, keys, layout
from rlpipe.errors import ArtifactError
from rlpipe.execute import Call, execute
from rlpipe.params import Section
from rlpipe.step import In, Out, Report, signature
from rlpipe.steps import Step


class Config(Section):
    text: str = "b"
    fail_after: int = 9


calls: list[str] = []


def run(config: Config, *, source: In, copy: Out, second: Out, round_index: int, part: int = -1) -> Report:
    """Write three files, going on after those an interrupted call wrote."""
    calls.append("run")
    for i in range(3):
        if (copy / f"{i}.txt").exists():
            continue
        if i >= config.fail_after:
            raise OSError("stopped")
        (copy / f"{i}.txt").write_text((source / "a.txt").read_text() + config.text)
        calls.append(str(i))
    (second / "x.txt").write_text("x" if part == -1 else str(part))
    return Report(numbers={"num_files": 3}, outcome=None, facts={"kept": True})


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls.clear()
    monkeypatch.setitem(layout.CODE, "toy", ("errors.py",))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.txt").write_text("a")
    artifact.write_manifest(tmp_path / "source")

    def make(scalars: dict | None = None, **config: object) -> Call:
        paths = {"source": tmp_path / "source", "copy": tmp_path / "rounds/01/copy", "second": tmp_path / "rounds/01/second"}
        return Call(Step("toy", run, signature(run), ""), Config(**config), paths, 1, tmp_path, scalars or {})

    return make


def test_outputs_have_manifests_and_the_record_has_the_numbers(call, tmp_path: Path) -> None:
    record = execute(call())
    manifest = artifact.verify(tmp_path / "rounds/01/copy")
    assert (tmp_path / "rounds/01/copy/0.txt").read_text() == "ab"
    assert manifest["params"] == {"text": "b", "fail_after": 9}
    assert manifest["inputs"] == {"source": artifact.fingerprint(tmp_path / "source")}
    assert manifest["facts"] == {"kept": True}
    assert record["numbers"] == {"num_files": 3}
    assert record == json.loads((tmp_path / "reports/01/toy.json").read_text())
    assert sorted(path.name for path in (tmp_path / "rounds/01").iterdir()) == ["copy", "second"]


def test_a_second_call_does_nothing(call) -> None:
    assert execute(call()) == execute(call())
    assert calls == ["run", "0", "1", "2"]


@pytest.mark.parametrize("change", ["params", "input", "missing", "fresh"])
def test_what_changed_runs_again(call, tmp_path: Path, change: str) -> None:
    execute(call())
    calls.clear()
    if change == "input":
        (tmp_path / "source" / "a.txt").write_text("A")
        artifact.write_manifest(tmp_path / "source")
    if change == "missing":
        (tmp_path / "rounds/01/second/manifest.json").unlink()
    execute(call(text="c" if change == "params" else "b"), fresh=change == "fresh")
    assert calls == ["run", "0", "1", "2"]


def test_an_interrupted_call_leaves_no_output_and_goes_on(call, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="stopped"):
        execute(call(fail_after=2))
    assert not (tmp_path / "rounds/01/copy").exists()
    key = json.loads((tmp_path / "rounds/01/.copy.partial.key").read_text())
    key["params"]["fail_after"] = 9
    (tmp_path / "rounds/01/.copy.partial.key").write_text(json.dumps(key))
    calls.clear()
    execute(call())
    assert calls == ["run", "2"]


def test_what_an_interrupted_call_left_under_other_params_is_dropped(call) -> None:
    with pytest.raises(OSError, match="stopped"):
        execute(call(fail_after=2))
    calls.clear()
    execute(call(text="c"))
    assert calls == ["run", "0", "1", "2"]


def test_manifests_do_not_depend_on_the_folder_or_the_clock(call, tmp_path: Path) -> None:
    execute(call())
    first = (tmp_path / "rounds/01/copy/manifest.json").read_bytes()
    execute(call(), fresh=True)
    assert (tmp_path / "rounds/01/copy/manifest.json").read_bytes() == first
    assert str(tmp_path) not in first.decode()


def test_unfinished_input_is_refused_by_name(call, tmp_path: Path) -> None:
    (tmp_path / "source/manifest.json").unlink()
    with pytest.raises(ArtifactError, match=r"source has no manifest\.json: it is unfinished"):
        execute(call())


def test_missing_input_is_refused_by_name(call, tmp_path: Path) -> None:
    (tmp_path / "source").rename(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="input source not found"):
        execute(call())


def test_a_changed_file_is_found(call, tmp_path: Path) -> None:
    execute(call())
    place = tmp_path / "rounds/01/copy/1.txt"
    place.write_text("other")
    with pytest.raises(ArtifactError, match=r"1\.txt is damaged"):
        artifact.verify(tmp_path / "rounds/01/copy")


def test_fingerprint_leaves_the_manifest_out_and_reads_the_files(call, tmp_path: Path) -> None:
    execute(call())
    folder = tmp_path / "rounds/01/copy"
    before = artifact.fingerprint(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert before == manifest["fingerprint"]
    (folder / "manifest.json").write_text(json.dumps({**manifest, "more": 1}))
    assert artifact.fingerprint(folder) == before
    (folder / "0.txt").write_text("zz")
    assert artifact.fingerprint(folder) != before


def test_a_record_of_other_params_is_not_believed(call, tmp_path: Path) -> None:
    """As after a kill between the outputs and the record."""
    execute(call())
    old = (tmp_path / "reports/01/toy.json").read_text()
    execute(call(text="c"))
    (tmp_path / "reports/01/toy.json").write_text(old)
    calls.clear()
    assert execute(call(text="c"))["params"]["text"] == "c"
    assert calls == ["run", "0", "1", "2"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_a_damaged_record_or_mark_is_as_none(call, tmp_path: Path, content: str) -> None:
    execute(call())
    (tmp_path / "reports/01/toy.json").write_text(content)
    (tmp_path / "rounds/01/.copy.partial.key").write_text(content)
    calls.clear()
    execute(call())
    assert calls == ["run", "0", "1", "2"]


def test_what_a_kill_left_of_a_manifest_is_not_part_of_the_artifact(call, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="stopped"):
        execute(call(fail_after=2))
    for name in (".manifest.json.partial", "manifest.json", ".0.txt.partial"):
        (tmp_path / "rounds/01/.copy.partial" / name).write_text("half")
    with pytest.raises(OSError, match="stopped"):
        execute(call(fail_after=2))
    assert sorted(path.name for path in (tmp_path / "rounds/01/.copy.partial").iterdir()) == ["0.txt", "1.txt"]


@pytest.mark.parametrize("damage", ["cut", "gone", "manifest"])
def test_a_damaged_output_is_made_again(call, tmp_path: Path, damage: str) -> None:
    execute(call())
    place = tmp_path / "rounds/01/copy" / ("manifest.json" if damage == "manifest" else "1.txt")
    place.unlink()
    if damage != "gone":
        place.write_text("x")
    execute(call())
    assert sorted(artifact.verify(tmp_path / "rounds/01/copy")["files"]) == ["0.txt", "1.txt", "2.txt"]


def test_contents_are_copied_over_what_an_interrupted_copy_left(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.txt").write_text("x")
    for _ in range(2):
        artifact.copy_contents(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b/x.txt").read_text() == "x"


def test_a_scalar_at_its_default_is_no_part_of_the_key(call, tmp_path: Path) -> None:
    record = execute(call())
    assert "scalars" not in record
    assert "scalars" not in artifact.read_manifest(tmp_path / "rounds/01/copy")
    assert execute(call({"part": -1})) == record
    assert calls == ["run", "0", "1", "2"]


def test_another_scalar_is_passed_on_and_runs_again(call, tmp_path: Path) -> None:
    execute(call())
    record = execute(call({"part": 2}))
    assert (tmp_path / "rounds/01/second/x.txt").read_text() == "2"
    assert record["scalars"] == artifact.read_manifest(tmp_path / "rounds/01/second")["scalars"] == {"part": 2}
    calls.clear()
    assert execute(call({"part": 2})) == record
    assert calls == []
    execute(call({"part": 3}))
    assert calls == ["run", "0", "1", "2"]


def test_a_scalar_without_default_is_refused() -> None:
    def unclear(config: Config, *, source: In, round_index: int, part: int) -> Report:
        return Report()

    with pytest.raises(TypeError, match="scalars of a step need a default: part"):
        signature(unclear)


def test_a_workdir_of_its_own_gets_the_record_and_nothing_else(call, tmp_path: Path) -> None:
    """As in a pod, where outputs lie wherever they are wanted."""
    tracked = []
    private = dataclasses.replace(call(), workdir=tmp_path / "private")
    record = execute(private, track=lambda done, record: tracked.append((done, record["step"])))
    assert [path.relative_to(tmp_path).as_posix() for path in (tmp_path / "private").rglob("*") if path.is_file()] == ["private/reports/01/toy.json"]
    assert not (tmp_path / "reports").exists()
    assert tracked == [(private, "toy")]
    assert execute(private) == record


class Owned(Config):
    def own_code(self, folders: Sequence[Path]) -> dict[str, str]:
        return {"my.module:Name": self.text}


def test_own_code_that_did_not_change_does_not_run_again(call) -> None:
    owned = dataclasses.replace(call(), config=Owned())
    assert execute(owned) == execute(owned)
    assert calls == ["run", "0", "1", "2"]
    assert execute(owned)["own_code"] == {"my.module:Name": "b"}


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ("none", []),
        ("record", ["not run yet"]),
        ("params", ['params changed: toy.fail_after 9 -> 8, toy.text "b" -> "c"']),
        ("input", ["input source changed (OLD -> NEW)"]),
        ("missing", ["output second missing"]),
        ("damaged", ["output second damaged"]),
        ("other", ["output second is another than recorded (OLD -> NEW)"]),
        ("scalar", ["scalars changed: part (not set) -> 4"]),
    ],
)
def test_differences_say_why(call, tmp_path: Path, change: str, reasons: list[str]) -> None:
    execute(call())
    second = tmp_path / "rounds/01/second"
    if change == "record":
        (tmp_path / "reports/01/toy.json").unlink()
    if change == "input":
        (tmp_path / "source" / "a.txt").write_text("A")
        artifact.write_manifest(tmp_path / "source")
    if change == "missing":
        shutil.rmtree(second)
    if change in ("damaged", "other"):
        (second / "x.txt").write_text("other")
    if change == "other":
        artifact.write_manifest(second)
    changed = call({"part": 4} if change == "scalar" else None, **({"text": "c", "fail_after": 8} if change == "params" else {}))
    found = list(keys.differences(changed, keys.of(changed)))
    assert [re.sub(r"\(\w{8} -> \w{8}\)", "(OLD -> NEW)", reason) for reason in found] == reasons


@pytest.mark.parametrize(("change", "named"), [("input", "input source changed"), ("code", "code changed")])
def test_c02_an_edit_while_the_step_runs_is_refused_and_the_work_is_kept(call, tmp_path: Path, change: str, named: str) -> None:
    def edited(config: Config, **given: object) -> Report:
        report = run(config, **given)
        if change == "input":
            (tmp_path / "source" / "a.txt").write_text("A")
            artifact.write_manifest(tmp_path / "source")
        else:
            layout.CODE["toy"] = ("logs.py",)  # as if errors.py had other content now
        return report

    with pytest.raises(ArtifactError, match=f"changed during the run; got {named}"):
        execute(dataclasses.replace(call(), step=Step("toy", edited, signature(run), "")))
    assert not (tmp_path / "rounds/01/copy").exists()
    layout.CODE["toy"] = ("errors.py",)
    (tmp_path / "source" / "a.txt").write_text("a")
    artifact.write_manifest(tmp_path / "source")
    calls.clear()
    execute(call())
    assert calls == ["run"]  # every file was kept


def test_changed_code_is_a_difference(call, monkeypatch: pytest.MonkeyPatch) -> None:
    execute(call())
    monkeypatch.setattr(layout, "code_hash", lambda step: "f" * 64)
    (reason,) = keys.differences(call(), keys.of(call()))
    assert re.fullmatch(r"code changed \(\w{8} -> ffffffff\)", reason)
