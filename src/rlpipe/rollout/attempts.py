"""A round's attempts, chunk by chunk. A chunk is computed together, written whole or not at all, and is the unit of resume."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlpipe import chunks as finished
from rlpipe import dataset
from rlpipe.columns import from_batch
from rlpipe.engines.base import Engine
from rlpipe.errors import ConfigError
from rlpipe.policies import causal_lm
from rlpipe.progress import track
from rlpipe.rollout.generate import Origin, generate
from rlpipe.rollout.prompts import Prompt, render
from rlpipe.rollout.section import Config
from rlpipe.rollout.selectors import Visit
from rlpipe.tasks import Task
from rlpipe.trajectory import Trajectory


class Rollout:
    """One round's generation by one policy."""

    def __init__(self, config: Config, engine: Engine, policy: Path, round_index: int) -> None:
        self.config, self.engine = config, engine
        self.tokenizer = causal_lm.load_tokenizer(policy / causal_lm.POLICY_MODULE)
        self.policy_version = causal_lm.policy_version(policy)
        self.origin = Origin(config.run.seed, round_index, self.policy_version)

    def prompts(self, visits: Iterable[tuple[Task, Visit]]) -> tuple[list[Prompt], list[dict[str, Any]]]:
        """The prompts that fit the model, and those that do not with their lengths."""
        found = [render(self.tokenizer, task, f"{self.origin.round_index:02d}/{visit.task_id}/{visit.visit}") for task, visit in visits]
        return split_by_length(found, self.config.max_new_tokens, self.engine.max_length)

    def make(self, prompts: Sequence[Prompt], folder: Path, chunks: range) -> None:
        """Write those of the round's chunks that are not there yet."""
        size = self.config.engine.chunk_groups
        for k in track(chunks, total=len(chunks), label="rollout"):
            path = finished.path_of(folder, k)
            if not finished.is_whole(path):
                chunk = prompts[k * size : (k + 1) * size]
                groups = generate(self.engine, self.tokenizer, chunk, self.config.sampling, self.config.num_attempts, self.origin)
                finished.write(path, (row for group in groups for row in group))


def split_by_length(prompts: Sequence[Prompt], max_new_tokens: int, max_length: int) -> tuple[list[Prompt], list[dict[str, Any]]]:
    """The prompts that fit with their completions, and `{task_id, num_tokens, max_new_tokens, max_length}` of each other one."""
    fitting = [prompt for prompt in prompts if 0 < len(prompt.ids) <= max_length - max_new_tokens]
    kept = {prompt.group_id for prompt in fitting}
    rejected = [
        {"task_id": prompt.task_id, "num_tokens": len(prompt.ids), "max_new_tokens": max_new_tokens, "max_length": max_length}
        for prompt in prompts
        if prompt.group_id not in kept
    ]
    return fitting, rejected


def chunks_of(num_prompts: int, config: Config, shard_index: int = -1) -> range:
    """The chunks that one shard makes of those that `num_prompts` make, or all of them for -1.

    Shards take whole chunks one after the other, as evenly as that goes; a shard beyond the last chunk takes none.

    Raises:
        ConfigError: there is no such shard.
    """
    total = -(-num_prompts // config.engine.chunk_groups)
    if shard_index == -1:
        return range(total)
    if not 0 <= shard_index < config.shards:
        raise ConfigError("no such shard of the rollout", got=shard_index, accepted=f"0 to {config.shards - 1}, or -1 for all", do="set rollout.shards")
    each, left = divmod(total, config.shards)
    first = shard_index * each + min(shard_index, left)
    return range(first, first + each + (shard_index < left))


def join(folder: Path, chunks: range) -> Counts:
    """Turn the chunks into the dataset's shards, and count what is in them."""
    return write_rows(folder, (batch for k in chunks for batch in dataset.read_shard(finished.path_of(folder, k))))


def write_rows(folder: Path, batches: Iterable[pa.RecordBatch]) -> Counts:
    """Write a dataset, the same bytes however its rows are spread over batches, and count what is in it."""
    counts = Counts()
    with dataset.Writer(folder) as writer:
        for batch in row_groups(batches):
            writer.write_batch(batch)
            counts.add(from_batch(batch))
    return counts


def row_groups(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of `dataset.ROWS_PER_ROW_GROUP`."""
    waiting: list[pa.RecordBatch] = []
    num_waiting = 0
    for batch in batches:
        while num_waiting + batch.num_rows >= dataset.ROWS_PER_ROW_GROUP:
            room = dataset.ROWS_PER_ROW_GROUP - num_waiting
            yield _joined([*waiting, batch.slice(0, room)])
            batch, waiting, num_waiting = batch.slice(room), [], 0
        waiting.append(batch)
        num_waiting += batch.num_rows
    if num_waiting:
        yield _joined(waiting)


def _joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.concat_batches(batches)


@dataclass
class Counts:
    """What a round's rollout reports."""

    group_ids: set[str] = field(default_factory=set)
    num_trajectories: int = 0
    num_tokens: int = 0
    num_truncated: int = 0
    num_infra_errors: int = 0

    def add(self, rows: Iterable[Trajectory]) -> None:
        """Count trajectories; those the infrastructure lost are no trajectories of the policy."""
        for row in rows:
            self.group_ids.add(row.group_id)
            if row.status == "infra_error":
                self.num_infra_errors += 1
                continue
            self.num_trajectories += 1
            self.num_tokens += row.num_sampled_tokens
            self.num_truncated += row.status == "truncated"

    def numbers(self, num_rejected: int = 0) -> dict[str, float | int | None]:
        """The numbers of the report."""
        attempted = self.num_trajectories + self.num_infra_errors
        return {
            "num_groups": len(self.group_ids),
            "num_trajectories": self.num_trajectories,
            "num_tokens_generated": self.num_tokens,
            "num_truncated": self.num_truncated,
            "mean_completion_tokens": self.num_tokens / self.num_trajectories if self.num_trajectories else None,
            "num_infra_errors": self.num_infra_errors,
            "infra_error_rate": self.num_infra_errors / attempted if attempted else None,
            "num_rejected_prompts": num_rejected,
        }

    def reasons(self, num_rejected: int = 0) -> dict[str, int]:
        """What did not become a trajectory, by reason."""
        counts = {"infra_error": self.num_infra_errors, "prompt_too_long": num_rejected}
        return {name: count for name, count in counts.items() if count}
