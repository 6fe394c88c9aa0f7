"""The plan of the data, the packing, and decoding on paper."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkdraft.errors import UserError
from sparkdraft.features.store import Entry, Features
from sparkdraft.training.batches import Plan, collate
from sparkdraft.training.objective import walk

masks = st.lists(st.lists(st.booleans(), min_size=3, max_size=24).filter(any), min_size=1, max_size=4)


def sample(number: int, mask: list[bool]) -> Features:
    """A sample whose final states say where they are from: [position, number]."""
    n = len(mask)
    final = torch.stack([torch.arange(n), torch.full((n,), number)], 1).float()
    return Features(torch.arange(n), torch.tensor(mask), torch.zeros(n, 6), final, torch.arange(n) + 1)


def entries(trained: list[int]) -> list[Entry]:
    return [Entry(str(i), "kind", "train", n + 5, n, "shard", 0) for i, n in enumerate(trained)]


@settings(max_examples=60, deadline=None)
@given(masks, st.integers(1, 4))
def test_what_is_predicted_is_written_by_the_assistant(mask_lists, steps):
    """Every valid term: row t knows x[t+1], predicts x[t+2+s] from the teacher at p = t+1+s, all of one answer; and no
    such term is missing."""
    batch = collate([sample(n, mask) for n, mask in enumerate(mask_lists)], steps, torch.float32)
    live = [t for span in batch.spans for t in range(span.live - span.start, span.end - span.start)]
    number = [n for n, span in enumerate(batch.spans) for _ in range(span.live, span.end)]
    found = Counter()
    for step in range(steps):
        for index in range(len(batch.argmax)):
            if batch.valid[step, index]:
                row, p = int(batch.rows[step, index]), int(batch.final[index, 0])
                mask = mask_lists[number[row]]
                assert number[row] == batch.final[index, 1]
                assert live[row] == p - 1 - step
                assert all(mask[live[row] + 1 : p + 2])
                found[number[row], live[row], step] += 1
    expected = {
        (n, t, step)
        for n, mask in enumerate(mask_lists)
        for step in range(steps)
        for t in range(len(mask) - 2 - step)
        if all(mask[t + 1 : t + 3 + step])
    }
    assert set(found) == expected
    assert all(count == 1 for count in found.values())


@settings(max_examples=60, deadline=None)
@given(masks, st.integers(1, 4), st.integers(0, 2**31))
def test_walk_equals_decoding_a_token_at_a_time(mask_lists, k, seed):
    batch = collate([sample(n, mask) for n, mask in enumerate(mask_lists)], k, torch.float32)
    hits = (torch.rand(batch.valid.shape, generator=torch.Generator().manual_seed(seed)) < 0.6) & batch.valid
    index_of = {(int(n), int(p)): i for i, (p, n) in enumerate(batch.final)}
    drafts, accepted = 0, [0] * k
    for n, mask in enumerate(mask_lists):
        t = 0
        while t < len(mask) - 2:
            if not (mask[t + 1] and mask[t + 2]):
                t += 1
                continue
            drafts, run = drafts + 1, 0
            while run < k and (i := index_of.get((n, t + 1 + run))) is not None and hits[run, i]:
                accepted[run] += 1
                run += 1
            following = t + run + 1
            # an answer that ends inside the block hands over to the next one's first row
            t = next(
                (u for u in range(t + 1, following) if not mask[u + 1] or not mask[min(u + 2, len(mask) - 1)]),
                following,
            )
    counts = walk(batch, hits)
    assert (counts.drafts, counts.accepted_per_position) == (drafts, accepted)
    assert 1 <= counts.acceptance_length <= k + 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(2, 50), min_size=3, max_size=30), st.integers(1, 100), st.integers(0, 3))
def test_an_epoch_holds_every_sample_once(trained, tokens_per_batch, seed):
    plan = Plan(entries(trained), tokens_per_batch, 1, seed)
    batches = [batch for step in range(plan.batches_per_epoch) for batch in plan.step(step)]
    assert Counter(entry.id for batch in batches for entry in batch) == Counter(str(i) for i in range(len(trained)))
    assert all(len(batch) == 1 or sum(entry.trained for entry in batch) <= tokens_per_batch for batch in batches)


def test_two_processes_see_what_one_with_two_batches_a_step_sees():
    one, two = (Plan(entries([5, 9, 3, 7, 8, 2, 6]), 10, 2, 0) for _ in range(2))
    for step in range(9):
        assert one.step(step) == [*two.step(step)[0::2], *two.step(step)[1::2]]


def test_epochs_are_shuffled_apart():
    plan = Plan(entries([5] * 20), 10, 1, 0)
    order = [[entry.id for batch in plan.step(step) for entry in batch] for step in range(2 * plan.batches_per_epoch)]
    assert order[: plan.batches_per_epoch] != order[plan.batches_per_epoch :]


def test_nothing_to_train_on_is_said():
    with pytest.raises(UserError, match="no training sample"):
        Plan(entries([0, 1]), 10, 1, 0)
