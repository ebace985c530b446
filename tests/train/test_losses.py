"""Worked numbers of aggregations, the clipped loss, KL and log-probs at a temperature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rlpipe.errors import TrainingError
from rlpipe.policies import causal_lm
from rlpipe.policies.head import keep_exact
from rlpipe.policies.packing import ScoredSequence, collate, pack
from rlpipe.train.advantages import Reinforce
from rlpipe.train.aggregations import Constant, SequenceMean, TokenMean
from rlpipe.train.batching import Attempt, sampling_logprobs
from rlpipe.train.kl import Kl
from rlpipe.train.losses import Clipped, LossInputs
from rlpipe.train.signal import find_signal
from rlpipe.train.tally import MicroNumbers, Tally
from tests.train.factories import attempt, config, group


def test_a12_each_aggregation_has_its_number():
    losses = [[2.0] * 5, [10.0]]
    for aggregation, expected in ((TokenMean(), 20 / 6), (SequenceMean(), 6.0), (Constant(horizon=10), 1.0)):
        weights = aggregation(np.array([5, 1]))
        assert sum(weight * sum(row) for weight, row in zip(weights, losses, strict=True)) == pytest.approx(expected)


def test_a13_the_denominator_is_the_whole_steps():
    two, eight = TokenMean()(np.array([2, 8]))
    assert two * (1 + 1) + eight * 0 * 8 == pytest.approx(0.2)


def test_clipping_takes_the_gradient_away_only_where_the_bound_is_passed_for_gain():
    ratios, advantages = [1.5, 1.1, 0.5, 1.5, 0.5], [1.0, 1.0, 1.0, -1.0, -1.0]
    logprobs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    out = Clipped(clip_low=0.2, clip_high=0.3)(LossInputs(logprobs, torch.zeros(5, dtype=torch.float64), torch.tensor(advantages, dtype=torch.float64)))
    torch.testing.assert_close(out.losses.detach(), torch.tensor([-1.3, -1.1, -0.5, 1.5, 0.8], dtype=torch.float64))
    out.losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, -1.1, -0.5, 1.5, 0.0], dtype=torch.float64))
    assert out.clipped.tolist() == [True, False, False, False, True]


def test_kl_estimators():
    policy, reference = np.log([0.5]), np.log([0.25])
    for estimator, expected in (("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 - 1 + math.log(2))):
        kl = Kl(coefficient=0.1, estimator=estimator, placement="reward")
        assert kl.of(policy, reference)[0] == pytest.approx(expected)
        assert float(kl.of(torch.from_numpy(policy), torch.from_numpy(reference))) == pytest.approx(expected)


def test_a26_kl_in_the_reward_reaches_every_token():
    settings = config(advantage={"type": "reinforce"}, kl={"coefficient": 0.1, "estimator": "k1", "placement": "reward"})

    def half_a_nat_below(groups):
        return [type(each)(each.group_id, tuple(Attempt(row.trajectory, 0.0, 0.0, np.array([-2.5, -2.5])) for row in each.attempts)) for each in groups]

    signal = find_signal([group("g", ([9, 10], 1.0))], settings, half_a_nat_below)
    assert signal.groups[0].attempts[0].advantage == pytest.approx(0.95)


@pytest.mark.parametrize(
    "values",
    [
        {"coefficient": 0.1, "estimator": "k1", "placement": "loss"},
        {"coefficient": 0.1, "estimator": "k1", "placement": "reward", "reference": "incoming"},
        {"coefficient": 0.0},
    ],
)
def test_a26_a_kl_without_effect_is_refused(values):
    with pytest.raises(ValidationError):
        Kl(**values)


class FixedLogits:
    """A policy whose next-token logits are always [2, 0]."""

    class Output:
        def __init__(self, last_hidden_state):
            self.last_hidden_state = last_hidden_state

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self):
        self.head = torch.nn.Linear(1, 2)
        self.head.bias.data = torch.tensor([2.0, 0.0])
        keep_exact(self)

    def get_decoder(self):
        return lambda input_ids, **_: self.Output(torch.zeros(*input_ids.shape, 1))

    def get_output_embeddings(self):
        return self.head


def test_a21_logprobs_are_those_of_the_logits_divided_by_the_temperature():
    def logprob(temperature):
        sequence = ScoredSequence(np.array([1, 0]), np.array([False, True]), np.array([1.0, temperature]))
        with torch.no_grad():
            return causal_lm.evaluate(FixedLogits(), collate(pack([sequence], 10)), ("logprobs", "entropy"))

    assert float(logprob(0.5).logprobs) == pytest.approx(-0.018150, abs=1e-6)
    assert float(logprob(1.0).logprobs) == pytest.approx(-0.126928, abs=1e-6)
    assert float(logprob(0.0).logprobs) == pytest.approx(-0.126928, abs=1e-6)
    p = 1 / (1 + math.exp(-2))
    assert float(logprob(1.0).entropy) == pytest.approx(-p * math.log(p) - (1 - p) * math.log(1 - p), abs=1e-6)


def test_a_trained_token_without_a_sampling_logprob_is_refused():
    with pytest.raises(TrainingError, match="without sampling log-probs"):
        sampling_logprobs(attempt([9], logprob=float("nan")))


def test_zero_advantages_stay_outside_unless_a_kl_teaches_them():
    same, mixed = group("same", ([9], 1.0), ([10], 1.0)), group("mixed", ([9], 1.0), ([10], 0.0))
    signal = find_signal([same, mixed], config(), lambda groups: list(groups))
    assert [each.group_id for each in signal.groups] == ["mixed"]
    assert signal.reasons == {"unscored": 0, "no_trained_tokens": 0, "zero_advantage": 1}
    with_kl = find_signal([same, mixed], config(kl={"coefficient": 0.1}), lambda groups: list(groups))
    assert len(with_kl.groups) == 2


def test_a_group_of_one_keeps_its_raw_reward_without_a_baseline():
    signal = find_signal([group("g", ([9], 0.7))], config(advantage=Reinforce().model_dump()), lambda groups: list(groups))
    assert signal.groups[0].attempts[0].advantage == 0.7


def test_a18_metrics_average_what_is_there():
    def micro(kl):
        return MicroNumbers(loss=0.5, num_tokens=4, approx_kl=0.0, num_clipped=1, entropy=8.0, kl=kl, gaps=np.array([0.25, 0.5]))

    tally = Tally()
    for kl in (4.0, None, 4.0, None):
        tally.add(micro(kl))
    tally.finish_step(grad_norm=3.0)
    numbers = tally.numbers(seconds=2.0)
    assert (numbers["kl"], numbers["clip_fraction"], numbers["entropy"], numbers["loss"], numbers["logprob_gap_max"]) == (1.0, 0.25, 2.0, 2.0, 0.5)
    empty = Tally().numbers(seconds=0.0)
    assert [name for name, value in empty.items() if value is not None] == ["optimizer_steps", "num_tokens_trained"]


def test_an_infinite_reward_is_an_error_before_any_statistics():
    with pytest.raises(TrainingError, match="a reward is not finite"):
        find_signal([group("g", ([9], float("inf")), ([9], 0.0))], config(), lambda groups: list(groups))
