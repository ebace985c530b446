"""`params.yaml`: the only place where a knob is set. Sections are frozen pydantic models that refuse unknown keys.

Sections that several steps use (`run`, `model`, `engine`, `backend`) stand once at the top level of the file; a step's
`Config` declares a field of that name, and `section` fills it in, so that one filled section is all a step needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from rlpipe.errors import ConfigError
from rlpipe.redaction import without_secrets

MAX_WHOLE = 2**53 - 1
"""The largest whole number that JSON carries exactly everywhere: Kubeflow sends every number of a section as a double."""


def _whole(value: Any) -> Any:
    """Whole numbers as ints, at any depth, so that 8 and 8.0 are one value whichever way a section came."""
    if isinstance(value, dict):
        return {key: _whole(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(entry) for entry in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_WHOLE:
        return int(value)
    if isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise ValueError(f"whole numbers go up to {MAX_WHOLE} in params, got {value}; give it as a text")
    return value


FreeForm = Annotated[dict[str, Any], BeforeValidator(_whole)]
"""Settings whose keys another part knows. Whole numbers are ints there: 8.0 is 8."""
Seed = Annotated[int, Field(ge=0, le=MAX_WHOLE)]
PositiveInt = Annotated[int, Field(ge=1, le=MAX_WHOLE)]
NonEmpty = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Base of every section and every stateless method: frozen, unknown keys refused, defaults checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, use_attribute_docstrings=True, hide_input_in_errors=True)

    spread: ClassVar[frozenset[str]] = frozenset()
    """Keys that say only how the work is spread over processes: they decide no bytes of what the step as a whole writes."""

    def own_code(self, folders: Sequence[Path]) -> dict[str, str]:
        """Content hashes of the user's own code that this section names, by `package.module:Name`; `folders` are searched after `sys.path`."""
        return {}


class Stop(Section):
    """Stop when `metric` of the evaluation has stood at `target` or above for `patience` rounds."""

    metric: str = "greedy_accuracy"
    target: float
    patience: int = Field(1, ge=1)


class Run(Section):
    """Section `run`: what concerns the whole run."""

    seed: Seed = 0
    """Seed of everything sampled."""
    data_seed: Seed = 0
    """Seed of the order in which tasks are visited, and of nothing else."""
    threads: int = Field(0, ge=0)
    """CPU threads of torch; 0 takes the number of cores. Part of what decides the bytes."""
    no_signal: Literal["keep", "stop"] = "keep"
    """What follows a round in which no group can teach: keep the policy (exit 0) or stop the run (exit 4)."""
    stop: Stop | None = None


class Model(Section):
    """Section `model`: where the start policy comes from."""

    path: str = "smollm2-135m-instruct"
    """A built-in name (`smollm2-135m-instruct`, `char-lm`), a Hugging Face folder, or a Hugging Face id."""
    char_lm: FreeForm = Field(default_factory=dict)
    """Settings of the built-in character model, see `rlpipe.testbeds.char_lm.CharLM`."""


SHARED = ("run", "model", "engine", "backend")
STEPS = ("rollout", "filter", "reward", "train", "evaluate")
TOP_LEVEL = (*SHARED, "tasks", *STEPS, "tracking", "kubeflow", "rounds")
NOT_REPEATED = frozenset({"secrets", "env", "repository"})
"""Keys whose values no message repeats, at any depth below them: a password may stand there by mistake."""

C = TypeVar("C", bound=BaseModel)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML 1.2 file (the dialect DVC reads too, so `1e-5` is a number and `on` is text).

    Raises:
        ConfigError: the file is missing, is not YAML, or is not a mapping.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if not path.is_file():
        raise ConfigError("params file not found", got=str(path), do="give --params FILE or run in a folder that has one")
    try:
        content = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML", got=_without_excerpt(error)) from error
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping of sections", got=type(content).__name__)
    return content


def _without_excerpt(error: Exception) -> str:
    """What a reader of YAML says, without the lines and the values it quotes: a cut password can no longer be told from other text."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if problem is None or mark is None:
        return without_secrets(" ".join(str(error).split()))
    return f"{problem.partition(' with value ')[0]}, line {mark.line + 1}"


def parse_scalar(text: str) -> Any:
    """The value of a `--set key=value`, read as YAML."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise ConfigError("the value of --set is not YAML", got=without_secrets(text)) from error


def override(raw: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """`raw` with `section.key=value` assignments applied, the last one winning.

    Raises:
        ConfigError: an assignment without `=`, or a path through something that is not a mapping.
    """
    changed = json.loads(json.dumps(raw))
    for assignment in assignments:
        path, separator, text = assignment.partition("=")
        keys = path.split(".")
        if not separator or not all(keys):
            raise ConfigError("--set needs section.key=value", got=without_secrets(assignment))
        place = changed
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {path}: {key} is not a section", got=type(place).__name__)
        place[keys[-1]] = parse_scalar(text)
    return changed


def check_top_level(raw: Mapping[str, Any]) -> None:
    """Refuse unknown top-level keys, and shared sections written inside a step's section."""
    for key in raw:
        if key not in TOP_LEVEL:
            raise ConfigError("unknown section in params", got=key, accepted=", ".join(TOP_LEVEL))
    for name, content in raw.items():
        if name != "rounds" and content is not None and not isinstance(content, Mapping):
            raise ConfigError(f"section {name} must hold a mapping", got=without_secrets(repr(content))[:200])
    for step in STEPS:
        for shared in SHARED:
            if shared in (raw.get(step) or {}):
                raise ConfigError(f"{step}.{shared} is set inside a step", do=f"set {shared} at the top level of params")


def section(config: type[C], raw: Mapping[str, Any], name: str) -> C:
    """Section `name` of the raw params as `config`, its shared fields filled from the top level.

    Raises:
        ConfigError: names the key, the value got and what is accepted.
    """
    own = {} if name in SHARED else dict(raw.get(name) or {})
    for shared in SHARED:
        if shared in config.model_fields and shared in raw:
            own[shared] = raw[shared]
    return validated(config, own, name)


def validated(config: type[C], values: Mapping[str, Any], name: str) -> C:
    """`config` from plain values, pydantic's complaint turned into one message.

    Raises:
        ConfigError: names the key, the value got and what is accepted.
    """
    try:
        return config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explained(error, name, config)) from error


def _explained(error: ValidationError, name: str, config: type[BaseModel]) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        key = ".".join(str(part) for part in (name, *problem["loc"]))
        if problem["type"] == "extra_forbidden":
            place = ".".join(str(part) for part in (name, *problem["loc"][:-1]))
            accepted = [field for field in model_at(config, problem["loc"][:-1]).model_fields if name not in STEPS or field not in SHARED]
            lines.append(f"unknown key {key}; accepted in {place}: {', '.join(accepted)}")
        else:
            lines.append(without_secrets(f"{key}: {_said(problem)}{_got(problem['input'], key.split('.'))}")[:500])
    return "\n".join(lines)


def _said(problem: Any) -> str:
    """The complaint in the words of a params file: pydantic speaks of discriminators and instances."""
    context = problem.get("ctx", {})
    if problem["type"] in ("union_tag_not_found", "model_type", "model_attributes_type", "dict_type"):
        return "a mapping is needed here" + (", with a key type" if problem["type"] == "union_tag_not_found" else "")
    if problem["type"] == "union_tag_invalid":
        return f"no such type {context['tag']}; accepted: {context['expected_tags']}"
    return str(problem["msg"])


def _got(value: Any, keys: Sequence[str]) -> str:
    """What stood there, where it is one value and may be repeated: a whole section or list may hold a secret in any of its keys."""
    if isinstance(value, Mapping | list | tuple | BaseModel) or NOT_REPEATED.intersection(keys):
        return ""
    return f"; got {value!r}"


def model_at(config: type[BaseModel], loc: Sequence[int | str]) -> type[BaseModel]:
    """The model that stands at a place in `config`: fields by name, members of a union by their `type`."""
    found: list[type[BaseModel]] = [config]
    for part in loc:
        fields = [model.model_fields[part].annotation for model in found if part in model.model_fields]
        if fields:
            found = list(models_in(fields))
        elif named := [model for model in found if "type" in model.model_fields and model.model_fields["type"].default == part]:
            found = named
    return found[0] if found else config


def models_in(hints: Sequence[Any]) -> Iterator[type[BaseModel]]:
    """The models in type hints, members of unions and elements of containers included."""
    for hint in hints:
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            yield hint
        yield from models_in(get_args(hint))


def resolved(config: BaseModel) -> dict[str, Any]:
    """The section with every default written out, as plain JSON values."""
    return config.model_dump(mode="json")


def deciding(config: Section) -> dict[str, Any]:
    """`resolved` without the keys that only spread the work."""
    return config.model_dump(mode="json", exclude=set(config.spread))
