"""Section `reward` of params.yaml."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from rlpipe.params import Section
from rlpipe.reward import own_code, sandbox
from rlpipe.reward.custom import Custom
from rlpipe.reward.digit_share import DigitShare
from rlpipe.reward.exact_match import ExactMatch
from rlpipe.reward.group_filters.zero_signal import ZeroSignal
from rlpipe.reward.length_penalty import LengthPenalty
from rlpipe.reward.math_verify import MathVerify
from rlpipe.reward.regex_format import RegexFormat

RewardConfig = Annotated[ExactMatch | RegexFormat | LengthPenalty | MathVerify | DigitShare | Custom, Field(discriminator="type")]
GroupFilter = Annotated[ZeroSignal, Field()]


def custom_paths(rewards: Iterable[RewardConfig]) -> list[str]:
    """The paths of the custom ones among `rewards`, each once."""
    return list(dict.fromkeys(reward.path for reward in rewards if isinstance(reward, Custom)))


def check_custom(rewards: Iterable[RewardConfig], folders: Sequence[Path]) -> None:
    """Let the scoring processes look for custom rewards in `folders` too, after `sys.path`, and refuse those that are not there.

    Nothing is imported, so a wrong `args` or a module that fails on import shows only once it is loaded to score.

    Raises:
        ConfigError: no such module, not Python, or without that name.
    """
    paths = custom_paths(rewards)
    for path in paths:
        own_code.check(path, folders)
    if paths:
        sandbox.shared().look_in(folders)


def code_hashes(rewards: Iterable[RewardConfig], folders: Sequence[Path]) -> dict[str, str]:
    """`Section.own_code` of a section with these rewards.

    Raises:
        ConfigError: the module of a custom reward is not there.
    """
    return {path: own_code.content_hash(path, folders) for path in custom_paths(rewards)}


class RewardSection(Section):
    """What is scored, within which limits, and which groups are kept.

    A trajectory's total is the weighted sum of its rewards. If any reward of non-zero weight could not be scored, the
    total is None: a sum over the rest would be a number for something else.
    """

    rewards: tuple[RewardConfig, ...] = Field(min_length=1)
    max_unscorable: float = Field(0.2, ge=0, le=1)
    """Share of trajectories without a total above which the step fails."""
    wall_seconds: float = Field(10.0, gt=0)
    """Wall time one reward may take for one trajectory."""
    cpu_seconds: int = Field(5, ge=1)
    """CPU time one reward may take for one trajectory; on a busy machine the wall is the longer of the two."""
    memory_mb: int = Field(1024, ge=128)
    """Memory of one scoring process."""
    workers: int = Field(2, ge=1)
    """Scoring processes. The results do not depend on it."""
    batch_deadline_seconds: float = Field(600.0, gt=0)
    """Wall time for one batch (at least `batch_rows` trajectories); what is unscored then stays so, as `timeout`."""
    batch_rows: int = Field(4096, ge=1)
    """Trajectories scored and held in memory at a time, rounded up to whole groups."""
    group_filters: tuple[GroupFilter, ...] = (ZeroSignal(),)
    keep: Literal["filtered", "all"] = "filtered"
    """`all` counts the group filters' verdicts and drops nothing."""

    def own_code(self, folders: Sequence[Path]) -> dict[str, str]:
        return code_hashes(self.rewards, folders)

    @field_validator("rewards")
    @classmethod
    def _named_apart(cls, rewards: tuple[RewardConfig, ...]) -> tuple[RewardConfig, ...]:
        twice = [label for label, count in Counter(reward.label for reward in rewards).items() if count > 1]
        if twice:
            raise ValueError(f"two rewards are called {', '.join(twice)}; give each a `name` of its own")
        return rewards
