"""The wrapper: nothing half-written is believed, what is finished is not run again, what is unfinished goes on."""

import json
from pathlib import Path

import pytest

from rlpipe import artifact, layout
from rlpipe.errors import ArtifactError
from rlpipe.execute import Call, execute
from rlpipe.params import Section
from rlpipe.step import In, Out, Report, signature
from rlpipe.steps import Step


class Config(Section):
    text: str = "b"
    fail_after: int = 9


calls: list[str] = []


def run(config: Config, *, source: In, copy: Out, second: Out, round_index: int) -> Report:
    """Write three files, going on after those an interrupted call wrote."""
    calls.append("run")
    for i in range(3):
        if (copy / f"{i}.txt").exists():
            continue
        if i >= config.fail_after:
            raise OSError("stopped")
        (copy / f"{i}.txt").write_text((source / "a.txt").read_text() + config.text)
        calls.append(str(i))
    (second / "x.txt").write_text("x")
    return Report(numbers={"num_files": 3}, outcome=None, facts={"kept": True})


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls.clear()
    monkeypatch.setitem(layout.CODE, "toy", ("errors.py",))
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.txt").write_text("a")
    artifact.write_manifest(tmp_path / "source")

    def make(**config: object) -> Call:
        paths = {"source": tmp_path / "source", "copy": tmp_path / "rounds/01/copy", "second": tmp_path / "rounds/01/second"}
        return Call(Step("toy", run, signature(run), ""), Config(**config), paths, 1, tmp_path)

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
