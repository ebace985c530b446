"""Where tasks come from: procedural generators, reasoning-gym, and the user's own files.

A generator's problems fall into a training part and a held-out part by a hash of the problem itself. The seed only
chooses among the problems of a part, so that no training seed can meet any evaluation seed.
"""

from __future__ import annotations

import itertools
import math
import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from rlpipe import layout, seeds, tasks
from rlpipe.errors import ConfigError
from rlpipe.params import Section, validated
from rlpipe.tasks import PROCEDURAL, Split, Task, TasksConfig, part

Numbers = tuple[int, ...]

COUNTED_BELOW = 100_000
GYM = "reasoning_gym:"


class Generator(Section):
    """A procedural source of problems over whole numbers from `low` to `high`."""

    low: int = Field(1, ge=0)
    high: int
    shots: int = Field(ge=0, le=4)
    """Solved examples that stand before the problem; they are never problems themselves."""

    name: ClassVar[str]
    size: ClassVar[int]
    repeats: ClassVar[bool] = False
    demonstrations: ClassVar[tuple[Numbers, ...]]

    @model_validator(mode="after")
    def _enough_numbers(self) -> Generator:
        if self.high - self.low + 1 < self.size:
            raise ValueError(f"{self.name} needs {self.size} different numbers; {self.low} to {self.high} are {max(0, self.high - self.low + 1)}")
        return self

    @abstractmethod
    def question(self, numbers: Numbers) -> str:
        """The problem as the last line of a prompt."""

    @abstractmethod
    def answer(self, numbers: Numbers) -> str:
        """The right answer."""

    @property
    def gap(self) -> str:
        """What stands between a question and its answer."""
        return " "

    def prompt(self, numbers: Numbers) -> str:
        """The solved examples, then the problem."""
        solved = [f"{self.question(shown)}{self.gap}{self.answer(shown)}\n" for shown in self.demonstrations[: self.shots]]
        return "".join(solved) + self.question(numbers)

    def split_of(self, numbers: Numbers) -> Split | None:
        """The part a problem belongs to, the same for every order of its numbers; None for a solved example."""
        problem = sorted(numbers)
        if problem in [sorted(shown) for shown in self.demonstrations[: self.shots]]:
            return None
        return part(f"{self.name}:{problem}")

    def num_problems(self) -> int:
        """Problems of both parts, different orders counted apart."""
        values = self.high - self.low + 1
        return int(values**self.size) if self.repeats else math.perm(values, self.size)

    def num_available(self, split: Split) -> int:
        """Problems of one part."""
        values = range(self.low, self.high + 1)
        sets = itertools.combinations_with_replacement(values, self.size) if self.repeats else itertools.combinations(values, self.size)
        return sum(_num_orders(numbers) for numbers in sets if self.split_of(numbers) == split)

    def draw(self, split: Split, rng: random.Random) -> Iterator[Numbers]:
        """Problems of one part without end, each as likely as any other."""
        values = range(self.low, self.high + 1)
        while True:
            numbers = tuple(rng.choices(values, k=self.size) if self.repeats else rng.sample(values, self.size))
            if self.split_of(numbers) == split:
                yield numbers

    def make(self, split: Split, num: int, seed: int) -> list[Task]:
        """`num` different tasks of one part; a smaller `num` gives the first of them.

        Raises:
            ConfigError: the part has fewer, and how many it has.
        """
        # counting is only worth its time where the part may be too small
        if (num * 20 > self.num_problems() or self.num_problems() < COUNTED_BELOW) and num > (available := self.num_available(split)):
            raise ConfigError(
                f"{self.name} has too few {split} problems from {self.low} to {self.high}", got=num, accepted=f"at most {available}", do="widen low and high"
            )
        chosen: dict[Numbers, None] = {}
        draws = self.draw(split, random.Random(seeds.seed(self.name, split, seed)))
        while len(chosen) < num:
            chosen[next(draws)] = None
        return [self.task(numbers) for numbers in chosen]

    def task(self, numbers: Numbers) -> Task:
        """A problem as a task."""
        task_id = "-".join([self.name, *map(str, numbers)])
        return Task(task_id=task_id, prompt=self.prompt(numbers), reference=self.answer(numbers), metadata={"source": self.name, "numbers": list(numbers)})


class MaxOfThree(Generator):
    """The largest of three different numbers: `max(51, 20, 44) =` asks for `51`."""

    high: int = 99
    shots: int = Field(2, ge=0, le=4)

    name: ClassVar[str] = "max_of_three"
    size: ClassVar[int] = 3
    demonstrations: ClassVar[tuple[Numbers, ...]] = ((3, 9, 2), (51, 20, 44), (7, 68, 95), (30, 12, 4))

    def question(self, numbers: Numbers) -> str:
        return f"max({', '.join(map(str, numbers))}) ="

    def answer(self, numbers: Numbers) -> str:
        return str(max(numbers))


class SortThree(Generator):
    """Three different numbers in rising order: `sort 5 20 14=` asks for `5 14 20`."""

    high: int = 20
    shots: int = Field(0, ge=0, le=4)

    name: ClassVar[str] = "sort_three"
    size: ClassVar[int] = 3
    demonstrations: ClassVar[tuple[Numbers, ...]] = ((3, 9, 2), (18, 20, 11), (7, 15, 8), (14, 12, 4))

    @property
    def gap(self) -> str:
        return ""

    def question(self, numbers: Numbers) -> str:
        return f"sort {' '.join(map(str, numbers))}="

    def answer(self, numbers: Numbers) -> str:
        return " ".join(map(str, sorted(numbers)))


class Add(Generator):
    """The sum of two numbers: `30 + 12 =` asks for `42`."""

    high: int = 99
    shots: int = Field(2, ge=0, le=4)

    name: ClassVar[str] = "add"
    size: ClassVar[int] = 2
    repeats: ClassVar[bool] = True
    demonstrations: ClassVar[tuple[Numbers, ...]] = ((3, 4), (30, 12), (7, 95), (58, 6))

    def question(self, numbers: Numbers) -> str:
        return f"{' + '.join(map(str, numbers))} ="

    def answer(self, numbers: Numbers) -> str:
        return str(sum(numbers))


GENERATORS: dict[str, type[Generator]] = dict(zip(PROCEDURAL, (MaxOfThree, SortThree, Add), strict=True))


def generator(name: str, options: Mapping[str, Any]) -> Generator:
    """A built-in generator with its settings.

    Raises:
        ConfigError: unknown name or setting.
    """
    if name not in GENERATORS:
        raise ConfigError("unknown task generator", got=name, accepted=", ".join(GENERATORS))
    return validated(GENERATORS[name], options, f"options of {name}")


def write(config: TasksConfig, split: Split, path: Path, folders: Sequence[Path] = ()) -> int:
    """Write the tasks of one split as the params say; returns how many. For `folders` see `make`."""
    source = getattr(config, split)
    made = make(source.source, split, source.num, source.seed, source.options, folders)
    tasks.save(path, made)
    return len(made)


def make(name: str, split: Split, num: int | None, seed: int = 0, options: Mapping[str, Any] | None = None, folders: Sequence[Path] = ()) -> list[Task]:
    """Tasks of one part of a source, the same for the same arguments.

    Args:
        name: a built-in generator, a task file, or a reasoning-gym generator (`reasoning_gym:chain_sum` or `chain_sum`).
        split: `train` or `eval`. A file belongs wholly to the part it is named for.
        num: how many; None takes all rows of a file.
        seed: which problems of a generator's part, and their order.
        options: the generator's own settings.
        folders: where a task file is looked for before the current folder.

    Raises:
        ConfigError: unknown source, setting or split, no such file, or fewer tasks than asked for (with how many there are).
        CheckError: a task file breaks a rule (see `rlpipe.tasks.load`).
    """
    if split not in ("train", "eval"):
        raise ConfigError("unknown split", got=split, accepted="train, eval")
    if names_a_file(name, folders):
        return _from_file(file_of(name, folders), num, options or {})
    if num is None or num < 1:
        raise ConfigError(f"tasks from {name} need a number", got=num, accepted="1 or more", do="set num")
    if name in GENERATORS:
        return generator(name, options or {}).make(split, num, seed)
    from rlpipe import reasoning_gym_tasks

    return reasoning_gym_tasks.make(name.removeprefix(GYM), split, num, seed, dict(options or {}))


def names_a_file(name: str, folders: Sequence[Path] = ()) -> bool:
    """Whether a source is read as a file, not as the name of a generator."""
    return "/" in name or name.endswith((".jsonl", ".parquet")) or file_of(name, folders).is_file()


def file_of(name: str, folders: Sequence[Path] = ()) -> Path:
    """The task file of that name: in the first of `folders` that has it, else as seen from the current folder, be it there or not."""
    # what this step writes into a working folder is no source: the user's file of the same name would count only once
    written = Path(name) in (layout.TRAIN_TASKS, layout.EVAL_TASKS)
    return next((folder / name for folder in folders if not written and (folder / name).is_file()), Path(name))


def _from_file(path: Path, num: int | None, options: Mapping[str, Any]) -> list[Task]:
    if options:
        raise ConfigError(f"a task file takes no options: {path}", got=", ".join(options))
    if not path.is_file():
        raise ConfigError("task file not found", got=str(path), accepted="a JSONL or Parquet file, or the name of a generator")
    found = tasks.load(path)
    if num is not None and num > len(found):
        raise ConfigError(f"{path} has too few tasks", got=num, accepted=f"at most {len(found)}")
    return found[:num]


def _num_orders(numbers: Numbers) -> int:
    repeats = math.prod(math.factorial(numbers.count(value)) for value in set(numbers))
    return math.factorial(len(numbers)) // repeats
