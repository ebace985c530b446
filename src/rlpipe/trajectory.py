"""The data item: one trajectory is one attempt at one task; a group is the siblings of one task.

Arrays carry their shape in the docstrings: T = tokens of a trajectory. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

SCHEMA_VERSION = 1

SOURCES = ("prompt", "policy", "demonstration", "environment", "context")
STATUSES = ("completed", "truncated", "partial", "aborted", "policy_error", "infra_error")

SPAN = pa.struct(
    [
        ("source", pa.string()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("turn", pa.int32()),
        ("actor", pa.string()),
        ("policy_version", pa.int64()),
        ("temperature", pa.float32()),
        ("trained", pa.bool_()),
    ]
)
REWARD = pa.struct([("name", pa.string()), ("value", pa.float64()), ("status", pa.string()), ("reason", pa.string())])
SEGMENT_REWARD = pa.struct([("name", pa.string()), ("token", pa.int32()), ("value", pa.float64())])
ARRAY = pa.struct([("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("data", pa.binary())])

SCHEMA = pa.schema(
    [
        ("trajectory_id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("index", pa.int32()),
        ("round", pa.int32()),
        ("parent_id", pa.string()),
        ("shared_prefix", pa.int32()),
        ("token_ids", pa.list_(pa.field("element", pa.int32(), nullable=False))),
        ("logprobs", pa.list_(pa.field("element", pa.float32(), nullable=False))),
        ("spans", pa.list_(SPAN)),
        ("status", pa.string()),
        ("status_reason", pa.string()),
        ("finish_reason", pa.string()),
        ("rewards", pa.list_(REWARD)),
        ("reward", pa.float64()),
        ("segment_rewards", pa.list_(SEGMENT_REWARD)),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("arrays", pa.map_(pa.string(), ARRAY)),
    ]
)

_COLUMNS = frozenset(SCHEMA.names)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[start, end)` that came from one source.

    `policy_version` and `temperature` are those the tokens were sampled with; `trained` is the training mask.
    """

    source: str
    start: int
    end: int
    turn: int = 0
    actor: str = "policy"
    policy_version: int = 0
    temperature: float = 1.0
    trained: bool = False


@dataclass(frozen=True, slots=True)
class RewardValue:
    """One reward's verdict. `value` is None where it could not be scored; `status` then says why."""

    name: str
    value: float | None
    status: str = "ok"
    reason: str | None = None


class Columns(Protocol):
    """Rows of a stored dataset, turned into Python values when first asked for."""

    def value(self, name: str, place: int) -> Any:
        """Attribute `name` of the row at `place`."""
        ...


class Stored:
    """What lets a trajectory be a view: a field that was never set is fetched from the columns it was read from."""

    __slots__ = ("_columns", "_place")

    _columns: Columns
    _place: int

    def __getattr__(self, name: str) -> Any:
        # Python calls this only where a slot is empty, so trajectories made by their constructor never come here.
        if name not in _COLUMNS:
            raise AttributeError(f"a trajectory has no {name}", name=name, obj=self)
        value = self._columns.value(name, self._place)
        object.__setattr__(self, name, value)
        return value


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory(Stored):
    """One attempt at one task: exactly the token ids the policy saw and sampled.

    Read from a dataset it is a view: a field costs nothing until it is used, arrays are slices of the shard's memory.

    Attributes:
        token_ids: `[T]` int32, prompt and everything after; never re-tokenised.
        logprobs: `[T]` float32, log-softmax(logits / temperature) of each sampled token at sampling time; NaN elsewhere.
        spans: cover `[0, T)` in order, without gap.
    """

    trajectory_id: str
    group_id: str
    task_id: str
    index: int
    round: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    spans: tuple[Span, ...]
    status: str = "completed"
    finish_reason: str = "stop"
    status_reason: str | None = None
    parent_id: str | None = None
    shared_prefix: int = 0
    rewards: tuple[RewardValue, ...] = ()
    reward: float | None = None
    segment_rewards: tuple[dict[str, Any], ...] = ()
    prompt: str = ""
    completion: str = ""
    arrays: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def mask(self) -> np.ndarray:
        """`[T]` bool, true where a token is trained: what the spans say, never a comparison of ids."""
        mask = np.zeros(len(self.token_ids), dtype=bool)
        for span in self.spans:
            if span.trained:
                mask[span.start : span.end] = True
        return mask

    @property
    def versions(self) -> np.ndarray:
        """`[T]` int64, the policy version each token was sampled with; -1 where nothing was sampled."""
        versions = np.full(len(self.token_ids), -1, dtype=np.int64)
        for span in self.spans:
            if span.source == "policy":
                versions[span.start : span.end] = span.policy_version
        return versions

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first one the policy sampled."""
        for span in self.spans:
            if span.source == "policy":
                return span.start
        return len(self.token_ids)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy sampled, over all turns."""
        return sum(span.end - span.start for span in self.spans if span.source == "policy")

    @classmethod
    def view(cls, columns: Columns, place: int, token_ids: np.ndarray, logprobs: np.ndarray) -> Trajectory:
        """The trajectory at row `place` of `columns`, with the two fields that everyone uses."""
        row, put = object.__new__(cls), object.__setattr__
        put(row, "_columns", columns)
        put(row, "_place", place)
        put(row, "token_ids", token_ids)
        put(row, "logprobs", logprobs)
        return row

    def with_rewards(self, rewards: Sequence[RewardValue], total: float | None) -> Trajectory:
        """The same attempt with its verdicts and their weighted total."""
        return replace(self, rewards=tuple(rewards), reward=total)


@dataclass(frozen=True, slots=True)
class Group:
    """Siblings of one task, ordered by index; any size."""

    group_id: str
    trajectories: tuple[Trajectory, ...]

    @property
    def task_id(self) -> str:
        return self.trajectories[0].task_id

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)


def groups_of(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Group by id, whatever the order of rows: groups in order of first appearance, members by index."""
    members: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        members.setdefault(trajectory.group_id, []).append(trajectory)
    return [Group(name, tuple(sorted(rows, key=lambda row: row.index))) for name, rows in members.items()]
