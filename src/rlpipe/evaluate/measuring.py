"""What a policy can do on held-out tasks. Every task is attempted, whatever the size of a chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe import chunks
from rlpipe.engines.base import Engine, Sampling
from rlpipe.errors import ConfigError, EngineError
from rlpipe.evaluate.results import TaskResult
from rlpipe.evaluate.section import Config
from rlpipe.policies import causal_lm
from rlpipe.reward.scoring import Scorer
from rlpipe.rollout.attempts import split_by_length
from rlpipe.rollout.generate import Origin, generate
from rlpipe.rollout.prompts import Prompt, render
from rlpipe.tasks import Task
from rlpipe.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Measurement:
    """A policy's results, one per task in the order of the tasks, and the metadata of each task."""

    policy_version: int
    results: tuple[TaskResult, ...]
    metadata: Mapping[str, Mapping[str, Any]]


def measure(config: Config, policy: Path, tasks: Sequence[Task], round_index: int, folder: Path) -> Measurement:
    """Greedy and sampled completions of every task, scored; an interrupted call goes on after the last tasks it finished.

    Args:
        policy: a policy folder, finished or not.
        folder: keeps what is finished until all is.

    Raises:
        ConfigError: more than `config.max_unscorable` of the prompts do not fit the model.
        EngineError: the engine failed at more than that share of the completions.
        ScorerError: more than `config.max_unscorable` of the completions could not be scored.
    """
    scorer = Scorer(config.reward_section)
    tokenizer = causal_lm.load_tokenizer(policy / causal_lm.POLICY_MODULE)
    origin = Origin(config.run.seed, round_index, causal_lm.policy_version(policy))
    asked = [render(tokenizer, task, f"{round_index:02d}/eval/{task.task_id}") for task in tasks]
    with config.engine.model_copy(update={"chunk_groups": config.chunk_groups}).open(policy, config.run.threads) as engine:
        prompts, rejected = split_by_length(asked, config.max_new_tokens, engine.max_length)
        if len(rejected) > config.max_unscorable * len(asked):
            got = f"{len(rejected)} of {len(asked)} prompts, the first of {rejected[0]['num_tokens']} tokens"
            accepted = f"a prompt and evaluate.max_new_tokens ({config.max_new_tokens}) within {engine.max_length} tokens together"
            raise ConfigError("evaluation tasks do not fit the model", got=got, accepted=accepted, do="lower evaluate.max_new_tokens or shorten the prompts")
        make = _Attempts(config, engine, tokenizer, prompts, origin, folder)
        made = [*make("greedy", 0.0, 1), *make("sampled", config.temperature, config.num_attempts)]
    check_made(made, config.max_unscorable)
    scored = scorer.score(made, {task.task_id: task for task in tasks})
    greedy = {row.task_id: row for row in scored[: len(prompts)]}
    sampled = _by_task(scored[len(prompts) :])
    reasons = {entry["task_id"]: f"prompt of {entry['num_tokens']} tokens, model length {entry['max_length']}" for entry in rejected}
    results = tuple(_result(config, prompt, greedy, sampled, reasons) for prompt in asked)
    return Measurement(origin.policy_version, results, {task.task_id: task.metadata for task in tasks})


@dataclass(frozen=True, slots=True)
class _Attempts:
    """Makes attempts at all prompts, `chunk_groups` tasks at a time; what is finished stays in `folder`."""

    config: Config
    engine: Engine
    tokenizer: Any
    prompts: Sequence[Prompt]
    origin: Origin
    folder: Path

    def __call__(self, kind: str, temperature: float, num_attempts: int) -> list[Trajectory]:
        size, sampling = self.config.chunk_groups, Sampling(self.config.max_new_tokens, temperature, self.config.stop)

        def make(part: Sequence[Prompt]) -> list[Trajectory]:
            return [row for group in generate(self.engine, self.tokenizer, part, sampling, num_attempts, self.origin) for row in group]

        parts = [self.prompts[i : i + size] for i in range(0, len(self.prompts), size)] if num_attempts else []
        return [row for rows in chunks.resumed(self.folder, parts, make, _was_made, kind) for row in rows]


def check_made(rows: Sequence[Trajectory], max_unscorable: float) -> None:
    """Refuse completions of which the engine failed at more than allowed: that says nothing of the policy.

    Raises:
        EngineError: with the most frequent reason.
    """
    failed = Counter(row.status_reason or "no reason given" for row in rows if not _was_made(row))
    if failed.total() > max_unscorable * len(rows):
        (reason, _), *_ = failed.most_common(1)
        got = f"{failed.total()} of {len(rows)} completions, most often: {reason}"
        raise EngineError("the engine failed during an evaluation", got=got, accepted=f"a share of at most {max_unscorable:g}", do="run the same command again")


def _was_made(row: Trajectory) -> bool:
    return row.status != "infra_error"


def _by_task(rows: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    found: dict[str, list[Trajectory]] = {}
    for row in rows:
        found.setdefault(row.task_id, []).append(row)
    return found


def _result(
    config: Config, prompt: Prompt, greedy: Mapping[str, Trajectory], sampled: Mapping[str, Sequence[Trajectory]], reasons: Mapping[str, str]
) -> TaskResult:
    row = greedy.get(prompt.task_id)
    if row is None:
        return TaskResult(prompt.task_id, None, "", None, 0, 0, reasons[prompt.task_id])
    correct = None if row.reward is None else row.reward >= config.correct_at
    scored = [attempt.reward >= config.correct_at for attempt in sampled.get(prompt.task_id, ()) if attempt.reward is not None]
    num_tokens = None if row.status == "infra_error" else row.num_sampled_tokens
    return TaskResult(prompt.task_id, correct, row.completion, num_tokens, len(scored), sum(scored), _why_unscored(row))


def _why_unscored(row: Trajectory) -> str | None:
    if row.reward is not None:
        return None
    return row.status_reason or "; ".join(f"{value.name}: {value.reason or value.status}" for value in row.rewards if value.value is None)
