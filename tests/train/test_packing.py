"""The prefix tree of a micro-batch: what it holds, who sees whom, where it is cut, and that nothing is computed twice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.errors import ConfigError, TrainingError
from rlpipe.policies import causal_lm, tree_attention
from rlpipe.policies.evaluation import checkpoint_activations
from rlpipe.policies.packing import Batch, ScoredSequence, collate, pack
from rlpipe.train.backends import Torch
from rlpipe.train.batching import Attempt, TrainGroup, micro_batches, weighted
from rlpipe.train.ranks import Ranks
from rlpipe.train.signal import find_signal
from rlpipe.train.update import loss_of, update
from rlpipe.trajectory import Group
from tests.factories import tiny_model
from tests.train.factories import attempt, config, group, random_groups
from tests.train.plain import gradients, plain_loss, worst_difference
from tests.train.test_gradients import Bare, load, packed, train_groups

EXAMPLES = tuple(range(1, 41))
"""What all prompts begin with: 40 tokens, more than a tile of queries."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "llama", initializer_range=0.02)


def few_shot(num_groups: int, num_attempts: int = 3) -> list[Group]:
    """Groups whose prompts differ in the last token alone, and whose answers of two tokens all begin differently."""
    return [group(f"g{i}", *(([3 + j, 9], float(j)) for j in range(num_attempts)), prompt=[*EXAMPLES, 41 + i % 5]) for i in range(num_groups)]


def sequence(ids: list[int], num_prompt: int = 1) -> ScoredSequence:
    return ScoredSequence(np.asarray(ids), np.arange(len(ids)) >= num_prompt, np.ones(len(ids)))


def seen(batch: Batch) -> dict[int, set[int]]:
    """The positions each position attends to."""
    found: dict[int, set[int]] = {}
    for tiles in batch.tiles:
        for queries, keys, visible in zip(tiles.queries, tiles.keys, tiles.visible, strict=True):
            found |= {int(query): set(keys[row].tolist()) for query, row in zip(queries, visible, strict=True)}
    return found or {query: set(range(query + 1)) for query in range(batch.input_ids.size)}


def test_what_all_prompts_share_is_computed_once():
    (micro,) = micro_batches(train_groups(few_shot(4), config()), 8, 2048, "prefix")
    # 40 tokens of all, 4 prompts' own token, 3 siblings' first token in each; the last token of an answer is no input
    assert micro.batch.input_ids.shape == (1, 40 + 4 + 4 * 3)
    # a prompt's last position predicts three answers' first token, each first token the second
    assert len(micro.batch.predicting) == 4 + 4 * 3
    assert len(micro.batch.targets) == 4 * 3 * 2


@settings(max_examples=40, deadline=None, derandomize=True)
@given(sequences=st.lists(st.lists(st.integers(1, 2), min_size=2, max_size=12), min_size=1, max_size=12), repeats=st.integers(1, 6))
def test_a_position_sees_its_own_beginning_and_nothing_else(sequences, repeats):
    batch = collate(pack([sequence(ids * repeats) for ids in sequences], 10**6))
    ids, depths, sees = batch.input_ids[0], batch.position_ids[0], seen(batch)
    beginnings = {query: tuple(ids[sorted(keys)].tolist()) for query, keys in sees.items()}
    wanted = {tuple((each * repeats)[:length]) for each in sequences for length in range(1, len(each) * repeats)}
    assert set(beginnings.values()) == wanted
    assert len(beginnings) == len(wanted) == len(ids)
    for query, keys in sees.items():
        assert depths[sorted(keys)].tolist() == list(range(depths[query] + 1))
        assert max(keys) == query


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["float32", "float64"])
def test_a_shared_beginning_gives_the_padded_loss_and_gradient(tmp_path, family, dtype, tolerance):
    module = load(tiny_model(tmp_path / family, family, initializer_range=0.02), dtype)
    groups = train_groups([*few_shot(3), *random_groups(2)], config())
    (micro,) = micro_batches(weighted(groups, config().aggregation), 8, 2048, "prefix")
    assert len(micro.batch.tiles) >= 2
    loss, found = packed(module, groups, config())
    expected = plain_loss(module, groups, "token_mean", extra_padding=5)
    assert loss == pytest.approx(float(expected.detach()), abs=tolerance)
    assert worst_difference(found, gradients(module, expected)) < tolerance


@settings(max_examples=30, deadline=None, derandomize=True)
@given(seed=st.integers(0, 999), budget=st.integers(1, 80), rows=st.integers(1, 4), size=st.integers(1, 3), packing=st.sampled_from(["prefix", "none"]))
def test_micro_batches_keep_to_their_limits_and_leave_nothing_out(seed, budget, rows, size, packing):
    groups = train_groups([*random_groups(3, seed), *few_shot(2)], config())
    shares = [micro_batches(groups, rows, 2048, packing, Ranks(rank, size), budget) for rank in range(size)]
    working = [micro for share in shares for micro in share if not micro.idle]
    assert all(micro.batch.input_ids.size <= budget or len(micro.owners) == 1 for micro in working)
    assert sorted(owner for micro in working for owner in micro.owners) == [(i, j) for i, each in enumerate(groups) for j in range(len(each.attempts))]
    assert len({len(share) for share in shares}) == 1


def test_rows_that_begin_alike_come_into_one_micro_batch():
    one, other = few_shot(2)
    groups = train_groups([one, *(replace(each, group_id=f"x{i}") for i, each in enumerate(random_groups(2))), other], config())
    micros = micro_batches(groups, 8, 2048, "prefix", micro_batch_tokens=40 + 2 + 2 * 3)
    assert ("g0", "g1") in [micro.group_ids for micro in micros]


def forwards(module: Any) -> list[int]:
    """Fills with the positions of each forward of the body."""
    counted: list[int] = []
    module.get_decoder().register_forward_hook(lambda part, inputs, settings, output: counted.append(settings["input_ids"].numel()), with_kwargs=True)
    return counted


def test_groups_without_signal_are_in_no_forward_and_fresh_tokens_need_one(folder):
    module = causal_lm.load_module(folder)
    counted = forwards(module)
    same = group("same", ([3, 9], 1.0), ([4, 9], 1.0), prompt=[30, 31])
    settings = config(groups_per_step=2, micro_batch=1)
    signal = find_signal([*few_shot(2), same], settings, list)
    backend = Torch(dtype="float32").open(module, settings.adamw())
    update(signal.groups, backend, settings, version=0, round_index=1)
    # per group: 40 + 1 of the prompt, 3 first tokens; one forward each, none to find log-probs that are stored
    assert counted == [44, 44]


def test_a13_micro_batches_share_the_steps_denominator(folder):
    """Case A13: two tokens of loss 1 in one micro-batch, eight of loss 0 in another: 0.2, with the gradient of one batch."""
    module = causal_lm.load_module(folder)
    settings = config()
    rows = [attempt([9, 10], prompt=[5, 6]), attempt([9, 10, 11, 12, 13, 14, 15, 16], prompt=[7, 8])]
    for row in rows:
        with torch.no_grad():
            own = ScoredSequence(row.token_ids, row.mask, np.ones(len(row.token_ids)))
            row.logprobs[row.mask] = causal_lm.evaluate(module, collate(pack([own], 100))).logprobs.numpy()
    groups = weighted([TrainGroup("one", (Attempt(rows[0], -1.0),)), TrainGroup("zero", (Attempt(rows[1], 0.0),))], settings.aggregation)
    split = [loss_of(micro, Bare(module), settings)[0] for micro in micro_batches(groups, 1, 100, "prefix")]
    (whole,) = (loss_of(micro, Bare(module), settings)[0] for micro in micro_batches(groups, 2, 100, "prefix"))
    assert sorted(float(loss.detach()) for loss in split) == pytest.approx([0.0, 0.2], abs=1e-6)
    assert float(whole.detach()) == pytest.approx(0.2, abs=1e-6)
    assert worst_difference(gradients(module, sum(split)), gradients(module, whole)) < 1e-6


def test_a21_equal_weights_give_a_ratio_of_one_at_every_temperature(folder):
    """Case A21: stored log-probs are log-softmax(logits / T); with equal weights the ratio is 1 within 1e-5."""
    module = causal_lm.load_module(folder)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    logits = module(ids).logits[0].detach()
    for temperature in (0.5, 1.0, 1.3):
        row = attempt([9, 10, 11], temperature=temperature)
        row.logprobs[4:] = torch.log_softmax(logits[3:6] / temperature, -1)[range(3), [9, 10, 11]].numpy()
        (micro,) = micro_batches([TrainGroup("g", (Attempt(row, 1.0),))], 1, 100, "prefix")
        found = causal_lm.evaluate(module, micro.batch).logprobs.detach().numpy()
        assert np.exp(found - micro.tokens.sampling_logprobs) == pytest.approx([1.0] * 3, abs=1e-5)


def test_a48_ratios_are_over_the_stored_logprobs_whatever_the_version():
    """Case A48: tokens of version 1 keep the log-probs they were sampled with; without them there is an error."""
    old = attempt([9, 10], logprob=-2.5)
    old = replace(old, spans=tuple(replace(span, policy_version=1) for span in old.spans))
    (micro,) = micro_batches([TrainGroup("g", (Attempt(old, 1.0),))], 1, 100, "prefix")
    assert (micro.tokens.sampling_logprobs.tolist(), micro.tokens.versions.tolist()) == ([-2.5, -2.5], [1, 1])
    missing = replace(old, logprobs=np.full(6, np.nan, dtype=np.float32))
    with pytest.raises(TrainingError, match="without sampling log-probs"):
        micro_batches([TrainGroup("g", (Attempt(missing, 1.0),))], 1, 100, "prefix")


def test_a54_masks_come_from_lengths_where_pad_is_eos_is_a_token():
    """Case A54: pad = eos = 0, prompt [0, 7], completion [8, 0]: attention [1, 1 | 1, 1, 0, 0], loss [0, 0 | 1, 1, 0, 0]."""
    short, long = attempt([8, 0], prompt=[0, 7]), attempt([8, 0, 9, 5], prompt=[0, 7], index=1)
    (padded,) = micro_batches([TrainGroup("g", (Attempt(short, 1.0), Attempt(long, 1.0)))], 2, 100, "none")
    # inputs are all but the last scored token: 3 of 4, padded to 5; the id 0 is attended to, a 0 past the end predicts nothing
    assert padded.batch.input_ids.tolist() == [[0, 7, 8, 0, 0], [0, 7, 8, 0, 9]]
    assert padded.batch.predicting.tolist() == [1, 2, 6, 7, 8, 9]
    assert padded.batch.targets.tolist() == [8, 0, 8, 0, 9, 5]
    (tree,) = micro_batches([TrainGroup("g", (Attempt(short, 1.0), Attempt(long, 1.0)))], 2, 100, "prefix")
    assert tree.batch.input_ids.tolist() == [[0, 7, 8, 0, 9]]
    assert seen(tree.batch)[4] == {0, 1, 2, 3, 4}
    assert sorted(tree.batch.targets.tolist()) == [0, 0, 5, 8, 8, 9]


@pytest.mark.parametrize("packing", ["prefix", "none"])
def test_checkpoints_change_no_gradient(folder, packing):
    settings, results = config(packing=packing), []
    for checkpointed in (False, True):
        module = causal_lm.load_module(folder)
        if checkpointed:
            checkpoint_activations(module)
        groups = train_groups(few_shot(3), settings)
        (micro,) = micro_batches(weighted(groups, settings.aggregation), 99, 2048, packing)
        loss, _ = loss_of(micro, Bare(module), settings)
        results.append((float(loss.detach()), gradients(module, loss)))
    assert results[0][0] == results[1][0]
    assert worst_difference(results[1][1], results[0][1]) == 0


def test_checkpoints_compute_each_layer_again_and_keep_what_enters_it(folder):
    module = causal_lm.load_module(folder)
    checkpoint_activations(module)
    calls: list[int] = []
    for number, each in enumerate(module.model.layers):
        each.mlp.register_forward_pre_hook(lambda part, inputs, number=number: calls.append(number))
    batch = collate(pack([sequence([1, 2, 3]), sequence([1, 3, 3])], 9))
    causal_lm.evaluate(module, batch).logprobs.sum().backward()
    assert calls == [0, 1, 1, 0]


def test_a_family_whose_attention_is_no_scaled_product_is_refused():
    heads = torch.zeros(1, 2, 3, 4)
    tree = tree_attention.Tree(collate(pack([sequence([1, 2, 3]), sequence([1, 3, 3])], 9)).tiles, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"attention with softcap.*packing: none"):
        tree_attention.attention(None, heads, heads, heads, None, tree=tree, softcap=50.0)


def test_evaluating_leaves_the_saved_config_as_it_was(tmp_path, folder):
    module = causal_lm.load_module(folder)
    causal_lm.save_module(tmp_path / "before", module, folder)
    causal_lm.evaluate(module, collate(pack([sequence([1, 2, 3]), sequence([1, 3, 3])], 9)))
    checkpoint_activations(module)
    causal_lm.save_module(tmp_path / "after", module, folder)
    assert (tmp_path / "before/config.json").read_bytes() == (tmp_path / "after/config.json").read_bytes()
