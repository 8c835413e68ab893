"""Calls of a round that is played again, and what is said of the clients that failed."""

from __future__ import annotations

import pytest
import torch

from actors.federation.participation import Participation
from actors.hosting.failures import ClientsFailedError, Failure, RoundUndoneError, named, reason_of
from actors.hosting.job import JobResult
from algorithms.clients import Call
from rayfl.aggregation.contributions import Inspected
from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.magnitudes import NonFiniteError


def test_calls_are_compared_to_the_bit() -> None:
    tree = {"a": torch.zeros(2), "n": 1}
    call = Call("p", "mean", (1, 2), {"model": tree}, {1: tree})
    assert call.same(Call("p", "mean", (1, 2), {"model": {"a": torch.zeros(2), "n": 1}}, {1: tree}))
    assert call.of([1]).clients == (1,)
    assert call.of([2]).payloads == {}
    others = [
        Call("q", "mean", (1, 2), {"model": tree}, {1: tree}),
        Call("p", "map", (1, 2), {"model": tree}, {1: tree}),
        Call("p", "mean", (1, 3), {"model": tree}, {1: tree}),
        Call("p", "mean", (1, 2), {"model": tree}, {}),
        Call("p", "mean", (1, 2), {"model": {**tree, "n": 1.0}}, {1: tree}),
        Call("p", "mean", (1, 2), {"model": {**tree, "a": torch.zeros(2).double()}}, {1: tree}),
        Call("p", "mean", (1, 2), {"model": {**tree, "a": torch.full((2,), 1e-45)}}, {1: tree}),
        Call("p", "mean", (1, 2), {"model": {**tree, "list": [1]}}, {1: tree}),
    ]
    assert not any(call.same(other) for other in others)


def test_what_was_done_and_is_not_asked_for_undoes_the_round() -> None:
    participation = Participation(2, [1, 2], {})
    result = JobResult(failures={1: Failure("p", "why")})
    with pytest.raises(ClientsFailedError):
        participation.record(Call("p", "mean", (1, 2), {}, {}), [result])
    with pytest.raises(RoundUndoneError):
        participation.end()


def test_a_failure_in_a_later_call_undoes_the_round_even_if_the_call_is_the_first_once_more() -> None:
    participation, call = Participation(2, [1, 2], {}), Call("p", "map", (1, 2), {}, {})
    participation.record(call, [JobResult()])
    with pytest.raises(RoundUndoneError, match="round 3 is done again without clients 1"):
        participation.record(call, [JobResult(failures={1: Failure("p", "why")})])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NonFiniteError("model/w"), "non-finite values in 'model/w'"),
        (ValueError("one\ntwo"), "ValueError: one"),
        (KeyError(), "KeyError"),
        (RuntimeError("<x at 0x7F3a>"), "RuntimeError: <x at 0x...>"),
        (RuntimeError("long" * 999), ("RuntimeError: " + "long" * 999)[:300]),
    ],
    ids=["non-finite", "lines", "empty", "address", "long"],
)
def test_reasons_are_short_and_the_same_in_every_process(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_many_clients_are_named_in_short() -> None:
    assert named([3, 1]) == "1, 3"
    assert named(dict.fromkeys(range(20))) == "0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def test_parts_that_fit_one_by_one_fit_together() -> None:
    part = Inspected.of(Weighted({"a": torch.tensor([2.0**30])}, 2**10))
    assert part.fits(7)
    assert not part.fits(8)
