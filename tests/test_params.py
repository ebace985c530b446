"""Params: typed, unknown keys refused, shared sections once, every shipped file parsed."""

from pathlib import Path

import pytest

from rlpipe import params, steps, workspace
from rlpipe.errors import ConfigError

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(["params.yaml", *(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").glob("*.yaml"))])


def shipped(name: str = "params.yaml") -> dict:
    return params.read_yaml(ROOT / name)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_params_file_parses(name: str) -> None:
    assert set(steps.configs(shipped(name))) >= {"rollout", "filter", "reward", "train", "evaluate"}


@pytest.mark.parametrize("name", SHIPPED)
def test_resolved_params_parse_to_the_same(name: str) -> None:
    once = steps.resolved(shipped(name))
    assert steps.resolved(once) == once


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("0.000001", 1e-6), ("'1e-6'", 1e-6)])
def test_c06_numbers_stay_numbers(text: str, value: float) -> None:
    raw = params.override(shipped(), [f"train.learning_rate={text}"])
    assert steps.config("train", raw).learning_rate == value


def test_c06_text_is_no_number() -> None:
    raw = params.override(shipped(), ["train.learning_rate=abc"])
    with pytest.raises(ConfigError, match=r"train\.learning_rate.*'abc'"):
        steps.config("train", raw)


def test_c06_on_stays_text(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("a: on\nb: yes\nc: true\nd: 1e-5\n")
    assert params.read_yaml(tmp_path / "p.yaml") == {"a": "on", "b": "yes", "c": True, "d": 1e-5}


def test_unknown_key_is_named_with_what_is_accepted() -> None:
    raw = params.override(shipped(), ["train.learning_rat=1"])
    with pytest.raises(ConfigError, match=r"unknown key train\.learning_rat; accepted in train: .*learning_rate"):
        steps.configs(raw)


def test_unknown_section_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown section in params; got trian"):
        steps.configs({**shipped(), "trian": {}})


def test_shared_section_inside_a_step_is_refused() -> None:
    raw = params.override(shipped(), ["rollout.engine.type=torch"])
    with pytest.raises(ConfigError, match=r"rollout\.engine is set inside a step"):
        steps.configs(raw)


def test_wrong_type_lists_the_known_ones() -> None:
    raw = params.override(shipped(), ["train.advantage.type=grpoo"])
    with pytest.raises(ConfigError, match=r"grpo.*dr_grpo"):
        steps.configs(raw)


def test_a07_one_attempt_needs_a_baseline_without_siblings() -> None:
    raw = params.override(shipped(), ["rollout.num_attempts=1"])
    with pytest.raises(ConfigError, match=r"num_attempts is 1 but the advantage grpo compares siblings"):
        steps.configs(raw)
    steps.configs(params.override(raw, ["train.advantage={type: reinforce}"]))


@pytest.mark.parametrize("rounds", [None, [], [{"round": "02", "previous": "01"}], "3"])
def test_rounds_that_do_not_count_up_are_refused(rounds: object) -> None:
    with pytest.raises(ConfigError, match="rounds must list every round"):
        steps.rounds({"rounds": rounds})


def test_set_without_equals_sign() -> None:
    with pytest.raises(ConfigError, match=r"--set needs section\.key=value; got train"):
        params.override({}, ["train"])


def test_missing_params_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="params file not found"):
        params.read_yaml(tmp_path / "none.yaml")


def test_params_that_are_no_mapping(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match="must hold a mapping"):
        params.read_yaml(tmp_path / "p.yaml")


def test_shipped_files_are_found() -> None:
    assert workspace.shipped("params.yaml").is_file()
    assert workspace.shipped("dvc.yaml").is_file()
    assert workspace.shipped("configs/tiny.yaml").is_file()
