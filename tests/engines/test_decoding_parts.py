"""What decoding stands on: the store of keys and values, and the draw of a token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.engines.kv_store import Store
from rlpipe.engines.sampling import draw


class Owned:
    slot = -1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=30))
def test_a_store_keeps_each_run_under_its_owner(steps: list[tuple[bool, int]]) -> None:
    store, owners = Store(4), {}
    for i, (adds, choice) in enumerate(steps):
        if adds or not owners:
            owner = Owned()
            store.add(owner, 1)
            owners[i] = owner
            store.write(0, owner.slot, 0, torch.full((1, 1, 2), float(i)), torch.full((1, 1, 2), -float(i)))
        else:
            store.remove(owners.pop(sorted(owners)[choice % len(owners)]))
        assert sorted(owner.slot for owner in owners.values()) == list(range(len(store)))
        for number, owner in owners.items():
            keys, values = store.read(0, owner.slot, owner.slot + 1, 1)
            assert (keys.unique().tolist(), values.unique().tolist()) == ([float(number)], [-float(number) or 0.0])


@given(st.lists(st.floats(-20, 20), min_size=2, max_size=700), st.floats(0, 1, exclude_max=True), st.sampled_from([0.7, 1.0, 1.3]))
def test_a_draw_by_blocks_is_the_inverse_cdf(values: list[float], uniform: float, temperature: float) -> None:
    logits = torch.tensor([values])
    token, logprob = draw(logits.clone(), torch.tensor([temperature]), torch.tensor([uniform], dtype=torch.float64))
    cdf = (logits.double() / temperature).softmax(-1).cumsum(-1)[0]
    lower = float(cdf[token - 1]) if token > 0 else 0.0
    assert lower - 1e-6 <= uniform <= float(cdf[token]) + 1e-6
    assert float(logprob) == pytest.approx(float((logits.double() / temperature).log_softmax(-1)[0, token]), abs=1e-5)


def test_siblings_that_draw_from_one_row_get_what_rows_of_their_own_give() -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    uniform, row = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), torch.tensor([1, 0, 1])
    shared = draw(logits.clone(), torch.tensor([1.0, 0.5]), uniform, row)
    apart = draw(logits[row].clone(), torch.tensor([0.5, 1.0, 0.5]), uniform)
    assert shared[0].tolist() == apart[0].tolist()
    assert shared[1].tolist() == apart[1].tolist()
