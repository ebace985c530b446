"""Tasks: what a policy is asked, and the reference its answer is held against.

A task file is JSONL (one task a line) or Parquet with the columns `task_id`, `prompt`, `reference` and, if wanted,
`metadata`. Which of the two it is shows in its first bytes, since Kubeflow names files without a suffix.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator
from typing_extensions import TypedDict

from rlpipe import artifact
from rlpipe.errors import ArtifactError, CheckError
from rlpipe.params import FreeForm, Section, Seed

NGRAM = 8
SHARED_NGRAMS = 0.8
NAMED_ROWS = 20

Split = Literal["train", "eval"]

PROCEDURAL = ("max_of_three", "sort_three", "add")
"""The generators of `rlpipe.task_sources`."""

HELD_OUT_OF = 5
"""Generated tasks: one problem in this many is held out."""


class Message(TypedDict):
    """One chat message, in the form that `apply_chat_template` takes."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Task(Section):
    """One task: a completion prompt or chat messages, and the answer that is right."""

    task_id: str = Field(min_length=1)
    prompt: str | list[Message] = Field(min_length=1)
    reference: str
    metadata: dict[str, Any] = Field(default_factory=dict)

    @field_validator("reference")
    @classmethod
    def _reference_says_something(cls, reference: str) -> str:
        # '' is contained in every answer, so a task without a reference rewards everything
        if not reference.strip():
            raise ValueError("the reference is empty")
        return reference

    @property
    def text(self) -> str:
        """The prompt as one text, for comparing and reading."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)


class Source(Section):
    """Where tasks come from."""

    source: str = Field(min_length=1)
    """`max_of_three`, `sort_three`, `add`, a reasoning-gym generator, or a JSONL or Parquet file."""
    num: int | None = Field(None, ge=1)
    """How many; needed for a generator, all rows of a file when left out."""
    seed: Seed = 0
    """Which problems a generator draws, and in which order; the rows of a file stay in their order."""
    options: FreeForm = Field(default_factory=dict)
    """The generator's own settings."""


class TasksConfig(Section):
    """Section `tasks`: what is trained on and what is held out."""

    train: Source
    eval: Source

    @model_validator(mode="before")
    @classmethod
    def _held_out_tasks_are_named(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("eval") is None:
            raise ValueError("tasks.eval is missing: held-out tasks are never split off the training tasks silently; give a source of their own")
        return values


def load(path: Path) -> list[Task]:
    """The tasks of a JSONL or Parquet file, in its order.

    Raises:
        ArtifactError: no such file, or a damaged Parquet file.
        CheckError: names the row and the rule: no rows, bad JSON, unknown or missing column, wrong type, empty
            reference, an id that was there before.
    """
    found, places = [], []
    for place, row in rows(path):
        found.append(_task(place, row))
        places.append(place)
    _check(found, places, str(path))
    return found


def rows(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a JSONL or Parquet file as they stand there, each with the words that say where; nothing is checked.

    Raises:
        ArtifactError: no such file, or a damaged Parquet file.
        CheckError: a line that is not JSON.
    """
    if not path.is_file():
        raise ArtifactError("task file not found", got=str(path), accepted="a JSONL or Parquet file", do="make one with `rlpipe tasks make`")
    with path.open("rb") as file:
        is_parquet = file.read(4) == b"PAR1"
    return _parquet_rows(path) if is_parquet else _json_rows(path)


def save(path: Path, tasks: Sequence[Task]) -> None:
    """Write tasks as JSONL, whole or not at all; the same tasks give the same bytes.

    Raises:
        CheckError: no tasks, an id that stands twice, or a text with half a surrogate pair.
    """
    _check(tasks, [f"task {i + 1}" for i in range(len(tasks))], str(path))
    lines = (json.dumps(task.model_dump(), ensure_ascii=False, allow_nan=False, separators=(", ", ": ")) for task in tasks)
    try:
        artifact.write_text(path, "".join(f"{line}\n" for line in lines))
    except UnicodeEncodeError as error:  # legal in JSON, and no text
        got = ascii(error.object[max(0, error.start - 40) : error.end])
        raise CheckError(f"{path.name} would hold half a character (a lone surrogate)", got=got, accepted="whole Unicode text") from error


def check_overlap(train: Sequence[Task], evaluation: Sequence[Task]) -> None:
    """Refuse evaluation tasks that are training tasks: the same id, or the same prompt but for case and white space.

    Raises:
        CheckError: names the rows, counted from 1.
    """
    ids = {task.task_id: row for row, task in enumerate(train, 1)}
    prompts = {normalised(task.text): row for row, task in enumerate(train, 1)}
    shared = []
    for row, task in enumerate(evaluation, 1):
        if task.task_id in ids:
            shared.append(f"eval row {row} has the id of train row {ids[task.task_id]} ({task.task_id})")
        elif (prompt := normalised(task.text)) in prompts:
            shared.append(f"eval row {row} ({task.task_id}) has the prompt of train row {prompts[prompt]}")
    if shared:
        raise CheckError(
            f"{len(shared)} of {len(evaluation)} evaluation tasks are training tasks",
            got="; ".join(shared[:NAMED_ROWS]),
            accepted="prompts and ids of which none is in both",
            do="remove the rows from one of the two files",
        )


def overlap_warnings(train: Sequence[Task], evaluation: Sequence[Task]) -> list[str]:
    """One warning for each evaluation task of whose 8-grams four fifths or more also stand in training prompts.

    What all prompts share (instructions, few-shot demonstrations) is taken off first. An n-gram is eight words, or eight
    characters where the rest is shorter than eight words. Time is linear in the text.
    """
    train_texts, eval_texts = [normalised(task.text) for task in train], [normalised(task.text) for task in evaluation]
    head, tail = _common(train_texts + eval_texts)
    seen: dict[str, int] = {}
    for row, text in enumerate(train_texts, 1):
        for gram in _grams(text[head : len(text) - tail]):
            seen.setdefault(gram, row)
    found = []
    for row, (task, text) in enumerate(zip(evaluation, eval_texts, strict=True), 1):
        grams = _grams(text[head : len(text) - tail])
        rows = [seen[gram] for gram in grams if gram in seen]
        if rows and len(rows) >= SHARED_NGRAMS * len(grams):
            found.append(f"eval row {row} ({task.task_id}): {len(rows)} of {len(grams)} {NGRAM}-grams also in training prompts, first in train row {rows[0]}")
    return found


def normalised(text: str) -> str:
    """`text` without differences of case and white space."""
    return " ".join(text.casefold().split())


def _check(tasks: Sequence[Task], places: Sequence[str], name: str) -> None:
    if not tasks:
        raise CheckError(f"{name} holds no tasks", got="0 rows", accepted="one row or more")
    first: dict[str, str] = {}
    for place, task in zip(places, tasks, strict=True):
        if task.task_id in first:
            raise CheckError(
                f"{place}: the task_id was there before", got=f"{task.task_id}, also in {first[task.task_id]}", do="give every task an id of its own"
            )
        first[task.task_id] = place


def _task(place: str, row: Any) -> Task:
    accepted = ", ".join(Task.model_fields)
    if not isinstance(row, dict):
        raise CheckError(f"{place} is not a task", got=type(row).__name__, accepted=f"an object with {accepted}")
    for column in row:
        if column not in Task.model_fields:
            raise CheckError(f"{place}: unknown column", got=column, accepted=accepted)
    for column, field in Task.model_fields.items():
        if field.is_required() and column not in row:
            raise CheckError(f"{place}: column {column} is missing", got=", ".join(row), accepted=accepted)
    try:
        return Task.model_validate(row)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        column = ".".join(str(part) for part in problem["loc"])
        raise CheckError(f"{place}: {column}: {problem['msg']}", got=repr(problem["input"])[:200]) from error


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    # newline="\n": the other line ends of Unicode may stand inside a JSON text
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    place = f"{path} line {number}"
                    yield place, _parsed(place, line)
        except UnicodeDecodeError as error:
            raise CheckError(f"{path} is neither Parquet nor UTF-8 text", got=str(error), accepted="JSONL or Parquet") from error


def _parsed(place: str, line: str) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(line, parse_constant=refuse, object_pairs_hook=_once)
    except ValueError as error:
        raise CheckError(f"{place} is not JSON", got=f"{error}: {line.strip()[:80]}", accepted="one JSON object a line") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"the key {next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))} stands twice")
    return found


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    place = f"{path} row {number}"
                    yield place, {column: _metadata(place, value) if column == "metadata" else value for column, value in row.items()}
    except (pa.ArrowInvalid, OSError) as error:
        raise ArtifactError(f"{path} is damaged", got=str(error).splitlines()[0], accepted="a whole Parquet file") from error


def _metadata(place: str, value: Any) -> Any:
    """Parquet has no free-form objects: JSON text, a map or a struct stand for one; a struct's null is an absent key."""
    if value is None:
        return {}
    if isinstance(value, str):
        return _parsed(f"{place} metadata", value)
    pairs: Iterable[tuple[str, Any]] = value.items() if isinstance(value, dict) else value
    return {key: entry for key, entry in pairs if entry is not None}


def _common(texts: Sequence[str]) -> tuple[int, int]:
    """Lengths of the head and the tail that all texts share; together never longer than the shortest text."""
    low, high = min(texts), max(texts)
    limit = min(len(text) for text in texts)
    head = _shared_prefix(low, high, limit)
    reversed_texts = [text[::-1] for text in texts]
    return head, _shared_prefix(min(reversed_texts), max(reversed_texts), limit - head)


def _shared_prefix(left: str, right: str, limit: int) -> int:
    length = 0
    while length < limit and left[length] == right[length]:
        length += 1
    return length


def _grams(text: str) -> list[str]:
    words = text.split()
    if len(words) >= NGRAM:
        return [" ".join(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]
    return [text[i : i + NGRAM] for i in range(max(1, len(text) - NGRAM + 1))] if text else []


def part(problem: str) -> Split:
    """The part a problem belongs to: decided by its sha256 and by nothing else."""
    first = int.from_bytes(hashlib.sha256(problem.encode()).digest()[:8], "big")
    return "eval" if first % HELD_OUT_OF == 0 else "train"
