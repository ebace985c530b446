"""Tasks from reasoning-gym's procedural generators (https://github.com/open-thought/reasoning-gym, Apache-2.0).

Only this file imports it. A question belongs to the training or to the held-out part by the hash of its normalised text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from rlpipe import seeds, tasks
from rlpipe.errors import ConfigError
from rlpipe.tasks import PROCEDURAL, Split, Task, part

DRAWS_PER_TASK = 50
"""Questions drawn for each task asked for before a generator counts as exhausted."""


def make(name: str, split: Split, num: int, seed: int, options: dict[str, Any]) -> list[Task]:
    """`num` tasks with different questions from one generator.

    Task metadata holds `generator`, `options` and `entry` (the generator's own metadata): what `score` needs.

    Raises:
        ConfigError: reasoning-gym is not installed, it has no such generator or setting, the generator gives no single
            answer or something JSON cannot hold, or it has too few questions of this part.
    """
    generator = _create(name, options, num * DRAWS_PER_TASK, seeds.seed("reasoning_gym", name, split, seed) >> 31)
    chosen: dict[str, Task] = {}
    for entry in _entries(generator, num * DRAWS_PER_TASK):
        question = tasks.normalised(entry["question"])
        if question not in chosen and part(question) == split:
            chosen[question] = _task(name, options, entry)
        if len(chosen) == num:
            found = list(chosen.values())
            _check_reference(generator, found[0])
            return found
    raise ConfigError(f"{name} gave too few different {split} questions", got=num, accepted=f"at most {len(chosen)}", do="ask for fewer or change its options")


def score(task: Task, answer: str) -> float:
    """The generator's own verdict on an answer, from 0 to 1.

    Raises:
        ConfigError: reasoning-gym is not installed.
    """
    return _verdict(_create(task.metadata["generator"], task.metadata["options"], 1, 0), task, answer)


def _verdict(generator: Any, task: Task, answer: str) -> float:
    entry = {"question": task.prompt, "answer": task.reference, "metadata": task.metadata["entry"]}
    return float(generator.score_answer(answer, entry))


def _check_reference(generator: Any, task: Task) -> None:
    # some verifiers need objects that JSON does not keep
    if (verdict := _verdict(generator, task, task.reference)) != 1.0:
        raise ConfigError(
            f"{task.metadata['generator']} does not accept its own reference from a file", got=f"score {verdict}", accepted="1.0", do="choose another generator"
        )


def _gym() -> ModuleType:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError("no such task source, and reasoning-gym is not installed", do="pip install 'rlpipe[tasks]'") from error
    return reasoning_gym


def _create(name: str, options: dict[str, Any], size: int, seed: int) -> Any:
    gym = _gym()
    if name not in gym.factory.DATASETS:
        accepted = f"{', '.join(PROCEDURAL)}, a JSONL or Parquet file, or a reasoning-gym generator: {', '.join(sorted(gym.factory.DATASETS))}"
        raise ConfigError("unknown task source", got=name, accepted=accepted)
    for fixed in ("size", "seed"):
        if fixed in options:
            raise ConfigError(f"options of {name}: {fixed} is set by the source", do="use num and seed")
    try:
        return gym.create_dataset(name, size=size, seed=seed, **options)
    except (TypeError, ValueError, AssertionError) as error:
        # reasoning-gym checks its settings with assert
        accepted = ", ".join(key for key in gym.factory.DATASETS[name][1].__dataclass_fields__ if key not in ("size", "seed"))
        raise ConfigError(f"options of {name} do not fit", got=f"{options} ({error})", accepted=accepted) from error


def _entries(generator: Any, limit: int) -> Iterator[dict[str, Any]]:
    return (generator[i] for i in range(limit))


def _task(name: str, options: dict[str, Any], entry: dict[str, Any]) -> Task:
    if entry["answer"] is None or not str(entry["answer"]).strip():
        raise ConfigError(
            f"{name} gives no single answer", got=f"answer {entry['answer']!r}", accepted="a generator with a reference answer", do="choose another"
        )
    question = str(entry["question"])
    digest = f"{seeds.seed(tasks.normalised(question)):016x}"
    try:
        metadata = json.loads(json.dumps({"source": "reasoning_gym", "generator": name, "options": options, "entry": entry["metadata"]}, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} has metadata that JSON cannot hold", got=str(error), do="choose another generator") from error
    return Task(task_id=f"{name}-{digest}", prompt=question, reference=str(entry["answer"]), metadata=metadata)
