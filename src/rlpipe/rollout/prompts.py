"""From a task to the tokens the policy sees first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlpipe.errors import ConfigError
from rlpipe.tasks import Task


@dataclass(frozen=True, slots=True)
class Prompt:
    """One group's prompt.

    Attributes:
        text: as the model sees it, template applied.
        ids: `[P]` int32.
    """

    group_id: str
    task_id: str
    text: str
    ids: np.ndarray


def render(tokenizer: Any, task: Task, group_id: str) -> Prompt:
    """The prompt of a task.

    A text is tokenised as the tokenizer does by default (so with its begin token, if it adds one). Chat messages go through
    the chat template with the generation prompt, and nothing is added to what the template writes.

    Raises:
        ConfigError: chat messages, but a tokenizer without chat template.
    """
    if isinstance(task.prompt, str):
        return Prompt(group_id, task.task_id, task.prompt, _ids(tokenizer(task.prompt)))
    if not tokenizer.chat_template:
        raise ConfigError(
            "chat messages need a tokenizer with a chat template", got=f"task {task.task_id}", do="give the prompt as a text, or use a chat model"
        )
    text = tokenizer.apply_chat_template([dict(message) for message in task.prompt], add_generation_prompt=True, tokenize=False)
    return Prompt(group_id, task.task_id, text, encode(tokenizer, text))


def encode(tokenizer: Any, text: str) -> np.ndarray:
    """`[n]` int32: the tokens of a text, and nothing added to it."""
    return _ids(tokenizer(text, add_special_tokens=False))


def _ids(encoding: Any) -> np.ndarray:
    return np.array(encoding["input_ids"], dtype=np.int32)
