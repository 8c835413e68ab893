"""Which samples make which mini-batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayfl.engine.updates.batches import epoch_samples, num_steps, plan_batches, poisson_batches

SAMPLES, SIZES, EPOCHS = st.integers(0, 60), st.one_of(st.none(), st.integers(1, 70)), st.integers(0, 4)


@given(SAMPLES, SIZES, EPOCHS)
def test_every_epoch_visits_every_sample_once(samples: int, size: int | None, epochs: int) -> None:
    plan = plan_batches(samples, size, num_steps(samples, size, epochs), np.random.default_rng(0))
    batches = plan.batches(torch.device("cpu"))
    assert len(batches) == plan.steps == num_steps(samples, size, epochs)
    per_epoch = num_steps(samples, size, 1)
    for epoch in range(epochs if samples else 0):
        mine = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(torch.cat(mine).tolist()) == list(range(samples))
        full = size or samples
        assert [len(batch) for batch in mine[:-1]] == [full] * (per_epoch - 1)
        assert len(mine[-1]) == samples - full * (per_epoch - 1)


@pytest.mark.parametrize(
    ("samples", "size", "epochs", "steps"),
    [(10, 3, 1, 4), (10, 3, 5, 20), (9, 3, 2, 6), (10, None, 3, 3), (3, 10, 2, 2), (0, 3, 2, 0), (0, None, 2, 0)],
)
def test_the_last_partial_batch_counts(samples: int, size: int | None, epochs: int, steps: int) -> None:
    assert num_steps(samples, size, epochs) == steps


def test_epochs_are_shuffled_again_and_a_longer_plan_begins_like_a_shorter_one() -> None:
    short = plan_batches(20, 6, 8, np.random.default_rng(3))
    long = plan_batches(20, 6, 12, np.random.default_rng(3))
    assert torch.equal(long.order[:40], short.order)
    assert not torch.equal(short.order[:20], short.order[20:])


def test_the_order_does_not_depend_on_the_batch_size() -> None:
    plans = [plan_batches(20, size, num_steps(20, size, 2), np.random.default_rng(3)) for size in (1, 6, None)]
    assert torch.equal(plans[0].order, plans[1].order)
    assert torch.equal(plans[0].order, plans[2].order)


def test_a_plan_of_some_steps_ends_within_an_epoch() -> None:
    whole, part = (plan_batches(20, 6, steps, np.random.default_rng(3)) for steps in (8, 5))
    assert part.steps == 5
    assert part.bounds == whole.bounds[:6]
    assert torch.equal(part.order, whole.order[: part.bounds[-1]])


def test_repeated_batches_follow_each_other() -> None:
    once, thrice = (plan_batches(7, 3, 4, np.random.default_rng(3), repeats).batches(torch.device("cpu"))
                    for repeats in (1, 3))  # fmt: skip
    assert len(thrice) == 3 * len(once)
    for step, batch in enumerate(thrice):
        assert torch.equal(batch, once[step // 3])


@given(SAMPLES, SIZES, EPOCHS)
def test_without_last_batches_all_are_full_but_an_only_one(samples: int, size: int | None, epochs: int) -> None:
    steps = num_steps(samples, size, epochs, drop_last=True)
    batches = plan_batches(samples, size, steps, np.random.default_rng(0), drop_last=True).batches(torch.device("cpu"))
    full = size or samples
    assert len(batches) == steps == (epochs * max(1, samples // full) if samples else 0)
    assert all(len(batch) == min(full, samples) for batch in batches)
    used = epoch_samples(samples, size, drop_last=True)
    for epoch in range(epochs if samples else 0):
        mine = torch.cat(batches[epoch * (steps // epochs) : (epoch + 1) * (steps // epochs)])
        assert len(mine) == len(mine.unique()) == used


def test_other_samples_are_dropped_in_every_epoch_unless_there_is_no_shuffling() -> None:
    def dropped(shuffle: bool) -> set[int]:
        plan = plan_batches(23, 10, 20, np.random.default_rng(0), drop_last=True, shuffle=shuffle)
        epochs = plan.order.reshape(10, 20).tolist()
        return set.union(*(set(range(23)) - set(epoch) for epoch in epochs))

    assert len(dropped(shuffle=True)) > 10
    assert len(dropped(shuffle=False)) == 3


def test_without_shuffling_all_epochs_have_the_first_ones_order() -> None:
    plans = [plan_batches(20, 6, 8, np.random.default_rng(3), shuffle=shuffle) for shuffle in (True, False)]
    first, second = plans[1].order.reshape(2, 20)
    assert torch.equal(first, second)
    assert torch.equal(first, plans[0].order[:20])
    assert not torch.equal(first, torch.arange(20))


def test_poisson_mini_batches() -> None:
    generator = np.random.default_rng(0)
    plan = poisson_batches(20, 5, 4000, generator)
    sizes = np.diff(plan.bounds)
    assert plan.steps == 4000 and sizes.min() == 0
    assert sizes.mean() == pytest.approx(5, abs=0.15)
    assert sizes.var() == pytest.approx(20 * 0.25 * 0.75, rel=0.1)
    counts = np.bincount(plan.order.numpy(), minlength=20)
    assert counts.min() > 850 and counts.max() < 1150
    assert all(len(set(batch.tolist())) == len(batch) for batch in plan.batches(torch.device("cpu"))[:50])
    twice = poisson_batches(20, 5, 3, np.random.default_rng(1), repeats=2)
    batches = [batch.tolist() for batch in twice.batches(torch.device("cpu"))]
    assert batches[::2] == batches[1::2] and len(batches) == 6
    for few in (poisson_batches(3, 5, 2, generator), poisson_batches(3, None, 2, generator)):
        assert few.order.tolist() == [0, 1, 2, 0, 1, 2] and few.bounds == (0, 3, 6)
    assert poisson_batches(0, 5, 2, generator).steps == 0
