"""Sections through Kubeflow's parameters: nulls, numbers, and what is longer than a parameter may be."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlpipe.errors import ArtifactError, ConfigError
from rlpipe.kubeflow import compile as pipelines
from rlpipe.kubeflow import wire
from tests.kubeflow.specs import raw

KEYS = st.text("ab/.~_-0 é", min_size=1, max_size=4)
NUMBERS = st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=5)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))


def travelled(value: Any) -> Any:
    """What Kubeflow makes of a parameter: protobuf's Struct and back, which knows no integer; refuses a null, as kfp does."""
    from google.protobuf import json_format, struct_pb2

    def refuse_null(inner: Any) -> None:
        assert inner is not None
        for entry in inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ():
            refuse_null(entry)

    refuse_null(value)
    return json_format.MessageToDict(json_format.ParseDict(json.loads(json.dumps(value)), struct_pb2.Struct()))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_every_section_arrives_as_it_was(section: dict[str, Any]) -> None:
    """Case B04: nulls at any place, numbers of any kind."""
    assert wire.received(travelled(wire.encoded(section))) == section


def test_a_section_without_nulls_travels_as_it_is() -> None:
    section = {"a": [1, {"b": "c"}], "d": {}}
    assert wire.encoded(section) == section


def test_the_given_section_is_not_changed() -> None:
    section = {"a": None, "b": [None, {"c": None}]}
    wire.encoded(section)
    assert section == {"a": None, "b": [None, {"c": None}]}


def of_length(characters: int) -> dict[str, Any]:
    """A section whose JSON has this many characters."""
    return {"text": "x" * (characters - len('{"text": ""}'))}


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store'}"


def sent(store: str, **sections: Any) -> dict[str, Any]:
    """The sections as they are sent, what they refer to written."""
    short, files = wire.shortened(sections, store)
    wire.put(files)
    return short


@pytest.mark.parametrize("characters", [9_999, 10_000])
def test_a_section_that_fits_is_sent_itself(characters: int, store: str) -> None:
    """Case B04."""
    assert wire.shortened({"train": of_length(characters)}, store) == ({"train": of_length(characters)}, {})
    wire.check({"train": of_length(characters)})


@pytest.mark.parametrize("characters", [10_001, 200_000])
def test_a_longer_one_is_sent_by_reference(characters: int, store: str) -> None:
    """Case B04."""
    short = sent(store, train=of_length(characters), filter={"a": 1}, name="text")
    wire.check(short)
    assert (short["filter"], short["name"]) == ({"a": 1}, "text")
    assert wire.received(travelled(short["train"])) == of_length(characters)


def test_nulls_survive_a_reference_too(store: str) -> None:
    section = {**of_length(10_001), "kl": None}
    assert wire.received(sent(store, train=wire.encoded(section))["train"]) == section


def test_the_same_content_has_the_same_place(store: str, tmp_path: Path) -> None:
    first = sent(store, train=of_length(10_001))
    assert sent(store + "/", train=of_length(10_001)) == first
    assert len(list((tmp_path / "store").iterdir())) == 1


def test_one_that_is_too_long_is_refused_with_its_length() -> None:
    """Case B04."""
    with pytest.raises(ConfigError, match=r"section train is too long.*got 10001 characters.*accepted: 10000.*kubeflow\.params_store"):
        wire.check({"train": of_length(10_001)})


def test_damaged_content_is_refused(store: str, tmp_path: Path) -> None:
    short = sent(store, train=of_length(10_001))
    (file,) = (tmp_path / "store").iterdir()
    file.write_text(file.read_text()[:-1])
    with pytest.raises(ArtifactError, match="params sent by reference are damaged"):
        wire.received(short["train"])


def test_missing_content_is_refused(store: str, tmp_path: Path) -> None:
    short = sent(store, train=of_length(10_001))
    (file,) = (tmp_path / "store").iterdir()
    file.unlink()
    with pytest.raises(ArtifactError, match=f"cannot be read.*{file.name}"):
        wire.received(short["train"])


def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"kubeflow\.params_store cannot be written"):
        sent(f"file://{tmp_path / 'file'}/store", train=of_length(10_001))


def test_what_is_submitted_goes_by_reference(store: str) -> None:
    """Case B04: the way of `rlpipe submit`; the specification does not carry what is sent by reference."""
    content = {**raw(), "filter": {"filters": [{"type": "empty"}] * 10_000}}
    compiled = pipelines.compile(content | {"kubeflow": {"params_store": store}})
    arguments = compiled.check_arguments()
    assert wire.received(arguments["filter"])["filters"] == [{"type": "empty"}] * 10_000
    assert compiled.num_bytes < 100_000


def test_without_a_store_what_is_too_long_is_not_submitted() -> None:
    """Case B04."""
    compiled = pipelines.compile({**raw(), "filter": {"filters": [{"type": "empty"}] * 10_000}})
    with pytest.raises(ConfigError, match="section filter is too long"):
        compiled.check_arguments()
