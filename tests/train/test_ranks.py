"""What each rank gets of an optimizer step, and that the ranks' gradients add up to the whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.errors import EngineError
from rlpipe.policies import causal_lm
from rlpipe.train.batching import MicroBatch, TrainGroup, micro_batches, weighted
from rlpipe.train.fit import fit
from rlpipe.train.ranks import Ranks, _buckets, exchange, join, rank_of
from rlpipe.train.signal import find_signal
from rlpipe.train.update import loss_of
from rlpipe.trajectory import Group
from tests.factories import tiny_model, tiny_policy
from tests.train.factories import config, evaluation_artifact, group, random_groups
from tests.train.plain import worst_difference
from tests.train.test_gradients import AGGREGATIONS, Bare


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return causal_lm.load_module(tiny_model(tmp_path_factory.mktemp("models") / "llama", initializer_range=0.02))


def train_groups(groups: list[Group]) -> list[TrainGroup]:
    return list(find_signal(groups, config(), lambda kept: list(kept)).groups)


def of_rank(groups: list[TrainGroup], settings: Any, rank: int, size: int) -> list[MicroBatch]:
    whole_step = weighted(groups, settings.aggregation)
    return micro_batches(whole_step, settings.micro_batch, settings.max_row_tokens, settings.packing, Ranks(rank, size))


def added_up(module: Any, groups: list[TrainGroup], settings: Any, size: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient, every rank's share in turn."""
    module.zero_grad(set_to_none=True)
    total = 0.0
    for rank in range(size):
        for micro in of_rank(groups, settings, rank, size):
            loss, _ = loss_of(micro, Bare(module), settings)
            loss.backward()
            total += float(loss.detach())
    return total, {name: value.grad.clone() for name, value in module.named_parameters() if value.grad is not None}


def test_values_are_shared_without_rest() -> None:
    assert ["".join(Ranks(rank, 3).share("abcdefgh")) for rank in range(3)] == ["bch", "adg", "ef"]
    assert [Ranks(0, 3).largest_share(count) for count in (0, 1, 3, 8)] == [0, 1, 1, 3]


def test_values_sorted_by_size_are_shared_evenly() -> None:
    assert [sum(Ranks(rank, 2).share(range(1, 9))) for rank in range(2)] == [18, 18]
    assert [sum(Ranks(rank, 4).share(range(1, 17))) for rank in range(4)] == [34, 34, 34, 34]


@given(st.lists(st.integers(1, 500), max_size=40).map(sorted), st.integers(1, 5))
def test_no_rank_gets_more_than_another_by_more_than_the_largest_value(sizes: list[int], num_ranks: int) -> None:
    shares = [Ranks(rank, num_ranks).share(sizes) for rank in range(num_ranks)]
    assert sorted(size for share in shares for size in share) == sizes
    assert max(len(share) for share in shares) == Ranks(0, num_ranks).largest_share(len(sizes))
    assert max(map(sum, shares)) - min(map(sum, shares)) <= max(sizes, default=0)


def test_tensors_are_added_up_a_bucket_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.train.ranks.BUCKET", 5)
    tensors = [torch.zeros(size) for size in (2, 3, 1, 9, 1)] + [torch.zeros(2, dtype=torch.bfloat16)]
    assert [[value.numel() for value in bucket] for bucket in _buckets(tensors)] == [[2, 3], [1], [9], [1], [2]]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_attempt_is_trained_by_exactly_one_rank_and_ranks_keep_in_step(size: int) -> None:
    groups = train_groups(random_groups(4))
    shares = [of_rank(groups, config(micro_batch=2), rank, size) for rank in range(size)]
    owners = [owner for share in shares for micro in share if not micro.idle for owner in micro.owners]
    assert sorted(owners) == [(place, member) for place, each in enumerate(groups) for member in range(len(each.attempts))]
    assert len({len(share) for share in shares}) == 1


def test_a_rank_without_rows_gets_an_idle_one_that_weighs_nothing() -> None:
    groups = train_groups([group("g", ([9, 10], 1.0), ([9, 11], 0.0))])
    (working,), (idle,) = (of_rank(groups, config(), rank, 2) for rank in (0, 1))
    assert (working.idle, idle.idle) == (False, True)
    assert working.tokens.weights.tolist() == [0.25, 0.25, 0.25, 0.25]
    assert idle.tokens.weights.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda value: value["type"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_ranks_gradients_add_up_to_the_whole(module: Any, aggregation: dict[str, Any], size: int) -> None:
    settings = config(aggregation=aggregation, micro_batch=2)
    groups = train_groups(random_groups(5, temperatures=(1.0, 0.7)))
    one, many = added_up(module, groups, settings, 1), added_up(module, groups, settings, size)
    assert many[0] == pytest.approx(one[0], abs=1e-6)
    assert worst_difference(many[1], one[1]) < 1e-6


def test_without_signal_only_the_first_rank_writes(tmp_path: Path) -> None:
    policy_in, evaluation = tiny_policy(tmp_path / "start"), evaluation_artifact(tmp_path / "evaluation")
    same = [group("g", ([9], 1.0), ([10], 1.0))]
    reports = []
    for rank in (0, 1):
        policy = tmp_path / f"policy-{rank}"
        reports.append(fit(config(), same, policy_in=policy_in, evaluation_in=evaluation, policy=policy, round_index=1, ranks=Ranks(rank, 2)))
        assert policy.exists() == (rank == 0)
    assert reports[0] == reports[1]
    assert reports[0].outcome == "no_signal"


def test_each_launchers_word_for_the_rank_is_understood() -> None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    mpirun = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, ("2", "4", "0", "2"), strict=True)}
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    # DeepSpeed leaves these in the environment of whoever used it
    left_behind = {"RANK": "1", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    deepspeed = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    environs = ({}, torchrun, mpirun, deepspeed, left_behind, {**mpirun, **left_behind})
    assert [rank_of(environ) for environ in environs] == [0, 3, 2, 1, 0, 2]


def test_tensors_go_through_nccl_only_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exchange() == "gloo"
    monkeypatch.setattr("rlpipe.train.ranks.device", lambda: torch.device("cuda", 1))
    assert exchange() == "cpu:gloo,cuda:nccl"


def test_a_rank_that_nobody_launched_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no launcher started this rank"):
        join(tmp_path, 1.0, {})


def test_a_first_rank_that_never_comes_is_waited_for_no_longer_than_agreed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a rank says there what it is
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in zip(names, ("1", "2", "0", "1"), strict=True)}
    with pytest.raises(EngineError, match=r"rank 0 did not show up; got no meet-mpirun.json after 0 s"):
        join(tmp_path, 0.3, environ)
    # DeepSpeed leaves these in the environment of whoever used it
    with pytest.raises(EngineError, match="rank 0 did not show up"):
        join(tmp_path, 0.3, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **environ})


def test_sums_without_others_leave_values_alone() -> None:
    value = torch.tensor([1.5, 2.0])
    Ranks().add_up([value])
    assert (value.tolist(), Ranks().gather("a")) == ([1.5, 2.0], ["a"])
    assert np.isfinite(value.numpy()).all()
