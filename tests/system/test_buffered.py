"""Rounds without a barrier on the virtual clock: what has to be true of every plan, and plans made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayfl.errors import ConfigError
from rayfl.randomness import RandomStreams
from rayfl.system.buffered import BufferedSchedule
from rayfl.system.config import GivenSystem
from rayfl.system.devices import Device
from rayfl.system.schedule import TOO_LATE, Clock, Schedule, Turnout, Update
from rayfl.system.traces import Hours

S = 1_000_000
"""Microseconds of a second."""


def schedule(devices: Sequence[Device], size: int, seed: int = 0, **options: Any) -> BufferedSchedule:
    config = GivenSystem.model_validate({"computation": [1], "communication": [1], "mode": "buffered", **options})
    return BufferedSchedule(config, devices, [1] * len(devices), size, RandomStreams(seed))


def lasting(*seconds: float, **options: Any) -> list[Device]:
    """Devices whose updates take so long (three forward passes of one sample, no messages)."""
    return [Device(1000 * each / 3, 1, **options) for each in seconds]


def plans(found: Schedule, rounds: int) -> list[tuple[Clock, Turnout]]:
    """The clock after each of some rounds, and the round."""
    clock, under_way, history = Clock(), (), []
    for round in range(rounds):
        turnout = found.plan(round, clock, under_way)
        clock = clock.after(turnout.duration_us, [], turnout.events)
        under_way = turnout.under_way
        history.append((clock, turnout))
    return history


def buffers(found: Schedule, rounds: int) -> list[tuple[float, list[tuple[int, int, int]]]]:
    """Seconds at the end of each round, and (client, round in which it began, staleness) of its updates."""
    return [
        (clock.seconds, [(k, turnout.started.get(k, t), t - turnout.started.get(k, t)) for k in turnout.cohort])
        for t, (clock, turnout) in enumerate(plans(found, rounds))
    ]


def test_inv_buff_6_three_clients_by_hand() -> None:
    assert buffers(schedule(lasting(1, 2, 5), 2, concurrency=3), 5) == [
        (2, [(0, 0, 0), (1, 0, 0)]),
        (4, [(0, 1, 0), (1, 1, 0)]),
        (5, [(0, 2, 0), (2, 0, 2)]),
        (6, [(0, 3, 0), (1, 2, 1)]),
        (8, [(0, 4, 0), (1, 4, 0)]),
    ]


def test_a_single_slot_is_one_client_after_another() -> None:
    history = plans(schedule(lasting(*[1] * 6), 1), 40)
    assert [clock.now_us for clock, _ in history] == [S * t for t in range(1, 41)]
    assert all(len(turnout.cohort) == 1 and not turnout.started and not turnout.under_way for _, turnout in history)
    counts = np.bincount([turnout.cohort[0] for _, turnout in history], minlength=6)
    assert counts.min() > 0, "clients are drawn uniformly"


def test_equal_devices_and_as_many_slots_as_the_buffer_holds_are_rounds_with_a_barrier() -> None:
    for clock, turnout in plans(schedule(lasting(*[3] * 9), 4), 12):
        assert len(turnout.cohort) == 4 and not turnout.started and not turnout.under_way
        assert clock.now_us % (3 * S) == 0


def test_updates_of_one_instant_are_received_by_id_and_the_next_buffer_gets_the_rest() -> None:
    (_, first), (clock, second) = plans(schedule(lasting(1, 1, 1), 2, concurrency=3), 2)
    assert first.cohort == (0, 1)
    assert first.under_way == (Update(2, 0, S),)
    # client 2 arrives at the same instant, one step of the server later; the other two begin only then
    assert second.cohort == (0, 2)
    assert dict(second.started) == {2: 0}
    assert clock.now_us == 2 * S
    assert second.under_way == (Update(1, 1, 2 * S),)


def test_an_update_that_ends_at_the_deadline_arrives() -> None:
    # in floats 1.001 s are 1000999.9999999999 microseconds
    assert buffers(schedule(lasting(1.001), 1, deadline_s=1.001), 2) == [(1.001, [(0, 0, 0)]), (2.002, [(0, 1, 0)])]


def test_a_slot_is_free_from_the_deadline_on_to_the_microsecond() -> None:
    ((_, turnout),) = plans(schedule(lasting(1, 50), 1, concurrency=2, deadline_s=1.001), 1)
    assert turnout.under_way == (Update(1, 0, 1_001_000, TOO_LATE),)


def test_lost_updates_free_their_slots() -> None:
    ((clock, turnout),) = plans(schedule(lasting(1, 1, 50), 2, concurrency=1, deadline_s=4, seed=1), 1)
    assert turnout.cohort == (0, 1)
    assert turnout.left_out[2].startswith("later than the deadline")
    lost = turnout.events - 2
    assert clock.now_us == (2 + 4 * lost) * S
    assert turnout.left_out[2] == "later than the deadline" + (f" ({lost} times)" if lost > 1 else "")


def test_one_that_drops_out_occupies_its_slot_until_it_would_have_been_done() -> None:
    dropped = plans(schedule(lasting(*[2] * 4), 2, concurrency=1, dropout=0.5), 20)
    assert any(turnout.left_out for _, turnout in dropped)
    for _, turnout in dropped:
        assert turnout.duration_us == 2 * S * turnout.events
        assert all(reason.startswith("dropped out") for reason in turnout.left_out.values())


def test_hours_end_updates_and_the_server_waits_for_the_next() -> None:
    hours = Hours((10,), (14,), 60)
    found = schedule(lasting(3, hours=hours), 1)
    assert [(clock.seconds, turnout.left_out) for clock, turnout in plans(found, 2)] == [
        (13, {}),
        # begun at 13 s, lost at 14 s, and again at 70 s
        (73, {0: "unavailable before it was done"}),
    ]


def test_the_first_reason_loses_an_update_and_frees_its_slot() -> None:
    devices = [*lasting(9, hours=Hours((0,), (4,), 60)), *lasting(1)]
    ends = {
        seed: plans(schedule(devices, 1, seed, concurrency=1, deadline_s=6), 1)[0][1].duration_us for seed in range(9)
    }
    assert set(ends.values()) == {1 * S, 5 * S}  # client 1 alone; client 0 until 4 s, then client 1


def test_the_server_waits_for_one_that_it_has_not_heard_of_yet() -> None:
    devices = [*lasting(1), *lasting(1, hours=Hours((10,), (20,), 60))]
    assert schedule(devices, 2).plan(0, Clock()).duration_us == 11 * S


def test_one_that_was_not_available_in_its_hours_is_looked_for_again() -> None:
    devices = lasting(1, availability=0.5, hours=Hours((0,), (50,), 60))
    found = [schedule(devices, 1, seed).plan(0, Clock()) for seed in range(10)]
    assert max(turnout.events for turnout in found) > 1
    assert {turnout.duration_us for turnout in found} == {S}


def test_where_most_drop_out_more_are_looked_for_before_the_server_gives_up() -> None:
    turnout = schedule(lasting(*[1] * 30), 20, dropout=0.999).plan(0, Clock())
    assert len(turnout.cohort) == 20 and turnout.events > 11_000


def test_availability_is_drawn_whenever_somebody_is_looked_for() -> None:
    devices = [*lasting(1, availability=0.1), *lasting(1, availability=0.9)]
    history = plans(schedule(devices, 1), 200)
    often = sum(turnout.cohort == (1,) for _, turnout in history)
    assert 160 < often < 199
    assert history[-1][0].events > 200 and history[-1][0].now_us == 200 * S


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        (
            lasting(1, 9),
            {"deadline_s": 4},
            r"of 2 clients .* only 1 have arrived .* later than the deadline \(\d+ times",
        ),
        (lasting(1, 1, availability=0.0), {}, "only 0 have arrived .* nobody was available"),
        (lasting(9, 9, hours=Hours((0,), (5,), 60)), {}, "unavailable before it was done"),
    ],
)
def test_a_buffer_that_is_never_full_is_refused(devices: list[Device], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule(devices, 2, **options).plan(0, Clock())


COMMON = settings(suppress_health_check=[HealthCheck.too_slow], max_examples=40, deadline=None)
SECONDS = st.lists(st.integers(0, 20), min_size=1, max_size=10)


class Watched(BufferedSchedule):
    """Makes sure that no slot stays free while a client may begin."""

    def _occupied(self, round: int, now: Clock, at_work: dict[int, Update], arrived: dict[int, int]) -> Clock:
        after = super()._occupied(round, now, at_work, arrived)
        idle = set(range(len(self._devices))) - at_work.keys() - arrived.keys()
        assert len(at_work) == self._config.concurrency or not idle
        return after


@COMMON
@given(seconds=SECONDS, size=st.integers(1, 10), slots=st.integers(1, 10), seed=st.integers(0, 3))
def test_inv_buff_3_and_4_counts_and_staleness(seconds: list[int], size: int, slots: int, seed: int) -> None:
    size, slots = min(size, len(seconds)), min(slots, len(seconds))
    found = schedule(lasting(*seconds), size, seed, concurrency=slots)
    found.__class__ = Watched
    history = plans(found, 12)
    steps = [clock.now_us for clock, _ in history]
    used: set[tuple[int, int]] = set()
    under_way: dict[int, Update] = {}
    for round, (_, turnout) in enumerate(history):
        assert len(set(turnout.cohort)) == len(turnout.cohort) == size
        assert len({update.client for update in turnout.under_way}) == len(turnout.under_way) <= slots
        for client in turnout.cohort:
            began = turnout.started.get(client, round)
            assert (client, began) not in used, "a client would have the same random numbers twice"
            used.add((client, began))
            staleness = round - began
            assert staleness >= 0
            if staleness:
                ends = under_way[client].ends_us
                begins = ends - S * seconds[client]
                assert under_way[client].began == began
                assert staleness <= sum(begins <= step <= ends for step in steps)
                assert ends <= steps[round]
        under_way = {update.client: update for update in turnout.under_way}


@COMMON
@given(seconds=SECONDS, cut=st.integers(0, 8), dropout=st.sampled_from([0.0, 0.4]))
def test_inv_buff_7_a_plan_is_a_function_of_what_is_committed(seconds: list[int], cut: int, dropout: float) -> None:
    options = {"concurrency": len(seconds), "dropout": dropout}
    size = (len(seconds) + 1) // 2
    whole = plans(schedule(lasting(*seconds), size, **options), 9)
    clock, under_way = Clock(), ()
    if cut:
        clock, under_way = whole[cut - 1][0], whole[cut - 1][1].under_way
    for round in range(cut, 9):
        turnout = schedule(lasting(*seconds), size, **options).plan(round, clock, under_way)
        clock, under_way = clock.after(turnout.duration_us, [], turnout.events), turnout.under_way
        assert (clock, turnout) == whole[round]
