"""Rounds on the virtual clock, computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.randomness import RandomStreams
from rayfl.system.config import GivenSystem
from rayfl.system.devices import Device
from rayfl.system.schedule import Clock, Schedule, options_without_losses
from rayfl.system.traces import Hours

S = 1_000_000
"""Microseconds of a second."""


def schedule(devices: Sequence[Device], size: int, samples: int = 100, seed: int = 0, **options: Any) -> Schedule:
    config = GivenSystem.model_validate({"computation": [1], "communication": [1], **options})
    return Schedule(config, devices, [samples] * len(devices), size, RandomStreams(seed))


# 3 passes of 100 samples at 10 ms are 3 s; 1000 + 500 bytes through 12 kbit/s are 1 s more.
FAST, SLOW, SLOWEST = Device(10, 12), Device(20, 12), Device(100, 12)
CLOCK = Clock(0, 1000, 500)


def test_a_clients_time_is_computing_and_both_messages() -> None:
    assert FAST.duration_us(300, 1000, 500) == 4 * S
    assert SLOW.duration_us(300, 1000, 500) == 7 * S
    assert schedule([FAST], 1).plan(0, CLOCK).duration_us == 4 * S
    assert schedule([FAST], 1, forward_passes=1).plan(0, CLOCK).duration_us == 2 * S


def test_a_round_ends_with_its_slowest_client() -> None:
    turnout = schedule([FAST, SLOW, SLOWEST], 3).plan(0, CLOCK)
    assert turnout.cohort == (0, 1, 2)
    assert turnout.duration_us == 31 * S
    assert not turnout.left_out


def test_of_more_that_are_asked_the_first_count() -> None:
    turnout = schedule([SLOWEST, SLOW, FAST, FAST], 2, over_sampling=2).plan(0, CLOCK)
    assert turnout.cohort == (2, 3)
    assert turnout.duration_us == 4 * S
    assert turnout.left_out == {0: "not among the first 2", 1: "not among the first 2"}


@pytest.mark.parametrize("deadline_s", [1.001, 1.005, 4.35, 8.1])
def test_a_client_that_is_done_at_the_deadline_takes_part(deadline_s: float) -> None:
    # in floats 1.001 s are 1000999.9999999999 microseconds
    exactly = Device(round(deadline_s * 1000) / 300, 1e300)
    found = schedule([exactly], 1, deadline_s=deadline_s)
    assert found.time_us(0, CLOCK) == round(deadline_s * S)
    assert found.plan(0, CLOCK).cohort == (0,) and found.able() == 1


def test_the_deadline_drops_the_slowest() -> None:
    turnout = schedule([FAST, SLOW, SLOWEST], 3, deadline_s=10).plan(0, CLOCK)
    assert turnout.cohort == (0, 1)
    assert turnout.duration_us == 10 * S
    assert turnout.left_out == {2: "later than the deadline"}
    # over-sampling makes up for it, and nobody waits until the deadline
    turnout = schedule([FAST, SLOW, SLOWEST], 2, deadline_s=10, over_sampling=1.5).plan(0, CLOCK)
    assert turnout.cohort == (0, 1)
    assert turnout.duration_us == 7 * S


def test_nobody_waits_for_clients_that_were_not_there_to_be_asked() -> None:
    assert schedule([FAST, SLOW], 3, deadline_s=10).plan(0, CLOCK).duration_us == 7 * S


@pytest.mark.parametrize(("size", "over_sampling", "asked"), [(3, 1.3, 4), (50, 1.1, 55), (10, 1.3, 13), (7, 1, 7)])
def test_a_part_of_a_client_more_is_a_whole_one(size: int, over_sampling: float, asked: int) -> None:
    turnout = schedule([FAST] * 60, size, over_sampling=over_sampling).plan(0, CLOCK)
    assert len(turnout.cohort) + len(turnout.left_out) == asked


def test_drop_outs_are_waited_for() -> None:
    devices = [FAST] * 19 + [SLOWEST]
    turnout = schedule(devices, 20, dropout=0.5).plan(0, CLOCK)
    assert 3 < len(turnout.cohort) < 17
    assert set(turnout.left_out.values()) == {"dropped out"}
    assert turnout.duration_us == 31 * S
    assert sorted([*turnout.cohort, *turnout.left_out]) == list(range(20))
    assert schedule(devices, 20, dropout=0.5, deadline_s=5).plan(0, CLOCK).duration_us == 5 * S
    assert schedule(devices, 20, dropout=0.5).plan(1, CLOCK).cohort != turnout.cohort


def test_without_anything_simulated_the_cohort_is_the_usual_one() -> None:
    usual = RandomStreams(3).generator("sampling", 4).choice(10, size=4, replace=False)
    assert schedule([FAST] * 10, 4, seed=3).plan(4, CLOCK).cohort == tuple(sorted(map(int, usual)))


def test_who_is_not_available_is_not_asked() -> None:
    # available from 10 s to 20 s of every minute
    hours = Hours((10,), (20,), 60)
    by_day, always = Device(10, 12, hours=hours), FAST
    both = schedule([by_day, always], 2)
    assert both.plan(0, CLOCK).cohort == (1,)
    assert both.plan(0, Clock(12 * S, 1000, 500)).cohort == (0, 1)
    assert both.plan(0, Clock(72 * S, 1000, 500)).cohort == (0, 1)
    assert both.plan(0, Clock(18 * S, 1000, 500)).left_out == {0: "unavailable before it was done"}
    assert both.plan(0, Clock(20 * S, 1000, 500)).cohort == (1,)


def test_the_server_waits_for_the_first_that_becomes_available() -> None:
    devices = [Device(10, 12, hours=Hours((10,), (20,), 60)), Device(10, 12, hours=Hours((5, 40), (8, 50), 60))]
    found = schedule(devices, 1)
    assert found.plan(0, CLOCK).duration_us == 5 * S
    assert found.plan(0, Clock(25 * S)).duration_us == 15 * S
    assert found.plan(0, Clock(55 * S)).duration_us == 10 * S
    assert schedule(devices, 1, deadline_s=2).plan(0, CLOCK).duration_us == 2 * S
    assert found.plan(0, CLOCK).cohort == ()


def test_what_must_be_set_so_that_nobody_is_lost() -> None:
    config = GivenSystem.model_validate({"computation": [1], "communication": [1]})
    for partly in (Device(10, 12, 0.5), Device(10, 12, hours=Hours((10,), (20,), 60))):
        assert options_without_losses(config, [FAST, partly]) == ["devices that are always available"]
    assert not options_without_losses(config, [FAST])


def test_hours_go_on_over_the_end_of_the_trace() -> None:
    hours = Hours((0, 50), (5, 60), 60)
    assert hours.ends_us(55 * S) == 65 * S
    assert hours.ends_us(115 * S) == 125 * S
    assert hours.ends_us(2 * S) == 5 * S
    assert hours.ends_us(5 * S) is None
    assert hours.begins_us(5 * S) == 50 * S


def test_availability_is_a_probability_per_round() -> None:
    found = schedule([Device(10, 12, 0.25)] * 40, 40)
    cohorts = [found.plan(round, CLOCK).cohort for round in range(50)]
    assert 8 < np.mean([len(cohort) for cohort in cohorts]) < 12
    assert len(set(cohorts)) == 50
    assert schedule([Device(10, 12, 0.0)], 1).plan(0, CLOCK).duration_us == 0


def test_the_clock_counts_rounds_and_keeps_the_largest_messages() -> None:
    clock = CLOCK.after(4 * S, [(10, 5), (20, 1)])
    assert clock == Clock(4 * S, 20, 5)
    assert clock.after(1, []) == Clock(4 * S + 1, 20, 5)
    assert clock.seconds == 4.0


@pytest.mark.parametrize("samples", [0, 1, 3, 10, 15, 23])
@pytest.mark.parametrize("batch_size", [None, 4, 10])
@pytest.mark.parametrize("drop_last", [False, True])
def test_samples_are_those_of_all_local_steps(samples: int, batch_size: int | None, drop_last: bool) -> None:
    for epochs, least, most in product((0, 1, 3), (0, 2, 9), (None, 2, 9)):
        if most is None or most >= least:
            train = TrainConfig(
                local_epochs=epochs,
                batch_size=batch_size,
                drop_last=drop_last,
                min_local_steps=least,
                max_local_steps=most,
            )
            steps = train.steps_of(samples)
            plan = plan_batches(samples, batch_size, steps, np.random.default_rng(0), drop_last=drop_last)
            assert train.samples_in_steps(samples) == len(plan.order), train


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60, deadline=None)
@given(
    speeds=st.lists(st.integers(0, 50), min_size=1, max_size=12),
    size=st.integers(1, 12),
    over=st.floats(1, 3),
    dropout=st.floats(0, 0.9),
    deadline=st.none() | st.floats(0.5, 20),
    round=st.integers(0, 5),
)
def test_every_plan_is_consistent(
    speeds: list[int], size: int, over: float, dropout: float, deadline: float | None, round: int
) -> None:
    size = min(size, len(speeds))
    devices = [Device(speed, 12) for speed in speeds]
    options = {"over_sampling": over, "dropout": dropout, "deadline_s": deadline}
    turnout = schedule(devices, size, **options).plan(round, CLOCK)
    asked = {*turnout.cohort, *turnout.left_out}
    assert len(turnout.cohort) + len(turnout.left_out) == len(asked) <= len(devices)
    assert len(turnout.cohort) <= size <= len(asked)
    times = {client: devices[client].duration_us(300, 1000, 500) for client in asked}
    assert all(times[client] <= turnout.duration_us for client in turnout.cohort)
    assert turnout.duration_us <= max(max(times.values()), round_us(deadline))
    assert schedule(devices, size, **options).plan(round, CLOCK) == turnout


def round_us(seconds: float | None) -> int:
    return 0 if seconds is None else round(seconds * S)


def test_a_device_is_there_at_the_microsecond_at_which_the_server_has_waited_for_it() -> None:
    for hours in (Hours((100 / 3,), (200 / 3,), 1000.0), Hours((200 / 3,), (100,), 100.00000049)):
        opens = hours.begins_us(0)
        ends = hours.ends_us(opens)
        assert ends is not None and hours.ends_us(opens - 1) is None and hours.ends_us(ends) is None
        assert hours.ends_us(hours.begins_us(ends)) is not None and hours.begins_us(ends) > ends
