"""Params: typed, unknown keys refused, shared sections once, every shipped file parsed."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from rlpipe import layout, params, steps, workspace
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


@pytest.mark.parametrize(
    ("assignments", "place", "expected"),
    [
        (["train.trainable.type=lora"], "train.trainable", {"type": "lora"}),
        (["engine.type=vllm", "engine.dtype=float32"], "engine", {"type": "vllm", "dtype": "float32"}),
        (["evaluate.gate.type=bootstrap", "evaluate.gate.metric=greedy_accuracy"], "evaluate.gate", {"type": "bootstrap", "metric": "greedy_accuracy"}),
    ],
)
def test_another_type_drops_what_only_the_one_before_has(assignments: list[str], place: str, expected: dict[str, Any]) -> None:
    """A file that rlpipe wrote lists every key of the type that stands there."""
    written = steps.resolved(shipped())
    changed = steps.switched(params.override(written, assignments), assignments)
    steps.configs(changed)
    found = functools.reduce(lambda section, key: section[key], place.split("."), changed)
    assert expected.items() <= found.items()


def test_another_type_keeps_a_key_that_was_set_and_is_wrong() -> None:
    assignments = ["engine.type=vllm", "engine.max_tokens_in_flight=5"]
    with pytest.raises(ConfigError, match="unknown key"):
        steps.configs(steps.switched(params.override(steps.resolved(shipped()), assignments), assignments))


def test_messages_speak_of_params_files_not_of_pydantic() -> None:
    for assignment, said in (
        ("evaluate.gate.slices=[a]", "evaluate.gate"),
        ("evaluate.gate={slices: [a]}", "evaluate.gate: a mapping is needed here, with a key type"),
        ("evaluate.gate.must_not_fall=[greedy_accuracy]", "a mapping is needed here"),
        ("evaluate.gate.type=ttest", "no such type ttest; accepted: 'paired', 'bootstrap'"),
        ('rollout.stop=[""]', "rollout.stop.0: String should have at least 1 character"),
    ):
        with pytest.raises(ConfigError) as caught:
            steps.configs(params.override(shipped(), [assignment]))
        assert said in str(caught.value)


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


def travelled(content: Any) -> Any:
    """What Kubeflow makes of a section on its way: JSON in which every number is a double."""
    if isinstance(content, dict):
        return {key: travelled(value) for key, value in content.items()}
    if isinstance(content, list):
        return [travelled(value) for value in content]
    return float(content) if isinstance(content, int) and not isinstance(content, bool) else content


FREE_FORM = [
    "model={path: char-lm, char_lm: {width: 32, options: {low: 2, high: 9}}}",
    "tasks.train.options={low: 1, high: 20, nested: [{deep: 3}]}",
    "reward.rewards=[{type: custom, path: 'm:N', args: {most: 8, share: 0.5, sizes: [1, 2.5]}}]",
]
SEVERAL_TYPES = [
    "train.advantage={type: grpo, ddof: 0}",
    "evaluate.pass_at=[1, 4]",
    "run={seed: 9007199254740991, stop: {target: 1}}",
    "kubeflow={resources: {train: {cpu: 2, memory: 16Gi, accelerator: {count: 2}}}}",
]


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("assignments", [[], FREE_FORM, SEVERAL_TYPES], ids=["shipped", "free-form", "several-types"])
def test_sections_that_travelled_are_the_same_sections(name: str, assignments: list[str]) -> None:
    raw = params.override(shipped(name), assignments)
    sections = json.loads(json.dumps(travelled(steps.filled(raw))))
    back = {**steps.unfilled(sections), "rounds": steps.rounds(raw)}
    assert json.dumps(steps.resolved(back)) == json.dumps(steps.resolved(raw))
    for step in layout.MODULES:
        own = params.validated(steps.load(step).signature.config, sections[step], step)
        assert json.dumps(params.deciding(own)) == json.dumps(params.deciding(steps.config(step, raw)))


def test_filled_sections_are_what_each_task_needs() -> None:
    filled = steps.filled(shipped())
    assert set(filled) == {"model", "tasks", "start", "rollout", "filter", "reward", "train", "evaluate", "tracking"}
    assert set(filled["model"]) == {"run", "model"}
    assert {"run", "engine", "num_tasks", "shards"} <= set(filled["rollout"])
    assert filled["start"] == filled["evaluate"]
    assert steps.unfilled({name: filled[name] for name in ("model", "tasks", "start")}).keys() == {"run", "model", "tasks", "engine", "evaluate"}


def test_kubeflow_is_a_section_and_is_written_out_only_where_given() -> None:
    assert "kubeflow" not in steps.resolved(shipped())
    raw = params.override(shipped(), ["kubeflow.experiment=mine"])
    assert steps.resolved(raw)["kubeflow"]["experiment"] == "mine"
    with pytest.raises(ConfigError, match=r"unknown key kubeflow\.experimen; accepted in kubeflow: experiment"):
        steps.configs(params.override(shipped(), ["kubeflow.experimen=mine"]))


@pytest.mark.parametrize("key", ["run.seed", "run.data_seed", "tasks.train.seed", "rollout.num_tasks"])
def test_whole_numbers_that_json_cannot_carry_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: Input should be less than or equal to 9007199254740991; got 9007199254740992"):
        steps.configs(params.override(shipped(), [f"{key}=9007199254740992"]))


def test_whole_numbers_in_free_form_settings_are_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"model\.char_lm: .*whole numbers go up to 9007199254740991 in params, got 9007199254740992; give it as a text"):
        steps.configs(params.override(shipped("configs/tiny.yaml"), ["model.char_lm.seed=9007199254740992"]))


def test_numbers_in_free_form_settings_keep_their_value() -> None:
    raw = params.override(shipped(), ["tasks.train.options={a: 8.0, b: 0.5, c: true, d: 1e300, e: [2.0, '3.0'], f: -4.0}"])
    options = steps.resolved(raw)["tasks"]["train"]["options"]
    assert json.dumps(options) == '{"a": 8, "b": 0.5, "c": true, "d": 1e+300, "e": [2, "3.0"], "f": -4}'


SNAPSHOT = "https://bob:hunter2pw@git.example/a.git"


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        (f"kubeflow.snapshot={{repository: '{SNAPSHOT}'}}", "kubeflow.snapshot.commit: Field required"),
        (f"kubeflow.snapshot={{repository: '{SNAPSHOT}', commit: abcdef1}}", "kubeflow.snapshot.repository carries a user or password"),
        ("kubeflow.snapshot={repository: 'https://git.example/a.git?private_token=hunter2pw', commit: abcdef1}", "carries a query"),
        ("kubeflow.secrets=[{name: hf, env: {HF_TOKEN: hunter2pw-}}]", "kubeflow.secrets.0.env.HF_TOKEN: String should match pattern"),
        ("kubeflow.secrets=[{name: hf, env: hunter2pw}]", "kubeflow.secrets.0.env: a mapping is needed here"),
        ("kubeflow.secrets=hunter2pw", "kubeflow.secrets: Input should be"),
        ("kubeflow.env=hunter2pw", "kubeflow.env: a mapping is needed here"),
        ("kubeflow.snapshot=[hunter2pw]", "kubeflow.snapshot: a mapping is needed here"),
        (f"train.learning_rate={SNAPSHOT}", "got 'https://***@git.example/a.git'"),
        (f"kubeflow={SNAPSHOT}", "section kubeflow must hold a mapping; got 'https://***@git.example/a.git'"),
    ],
)
def test_b07_wrong_params_are_explained_without_what_may_be_secret(assignment: str, said: str) -> None:
    """Case B07."""
    with pytest.raises(ConfigError) as caught:
        steps.configs(params.override(shipped(), [assignment]))
    assert said in str(caught.value)
    assert "hunter2pw" not in str(caught.value)
    assert "hunter2pw" not in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "assignments", [[f"kubeflow.snapshot={{repository: {SNAPSHOT}"], [SNAPSHOT], ["kubeflow.secrets=[{name: hunter2pw}]", "kubeflow.secrets.name=hub"]]
)
def test_b07_assignments_that_cannot_be_read_are_named_without_passwords(assignments: list[str]) -> None:
    """Case B07."""
    with pytest.raises(ConfigError, match="--set") as caught:
        params.override(shipped(), assignments)
    assert "hunter2pw" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"rounds: []\nkubeflow: {{snapshot: {{repository: {SNAPSHOT}]\n", r"is not YAML; got .*, line 2$"),
        ("kubeflow:\n  env:\n    A: hunter2pw\n    A: hunter2pw\n", r'is not YAML; got found duplicate key "A", line 4$'),
    ],
)
def test_b07_a_params_file_that_is_not_yaml_is_named_without_passwords(tmp_path: Path, text: str, said: str) -> None:
    """Case B07."""
    (tmp_path / "p.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        params.read_yaml(tmp_path / "p.yaml")
    assert "hunter2pw" not in str(caught.value)


def test_b07_credentials_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Case B07."""
    with pytest.raises(ConfigError, match="carries a user or password"):
        workspace.prepare(tmp_path / "w", None, [f"kubeflow.snapshot={{repository: '{SNAPSHOT}', commit: abcdef1}}"], 1)
    assert not (tmp_path / "w").exists()
