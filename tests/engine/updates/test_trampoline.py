"""Procedures run in lock-step; what they await is done together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rayfl.engine.updates.trampoline import Ask, run_procedures
from rayfl.errors import ExitError, StopSignal


class Squares:
    """Answers a number by its square, a negative one by an error; notes what it was asked in one call."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        self.calls.append(list(requests))
        return [ValueError(f"{r} is negative") if r < 0 else r * r for r in requests]


async def ask(number: Any) -> Any:
    return await Ask(number)


async def twice(start: int) -> int:
    return int(await ask(await ask(start)))


async def times(start: int, count: int) -> list[int]:
    return [int(await ask(start + i)) for i in range(count)]


def test_a_reply_comes_back_where_it_was_asked_for() -> None:
    engine = Squares()
    assert run_procedures({5: twice(2), 1: twice(3)}, engine) == {5: 16, 1: 81}
    assert engine.calls == [[2, 3], [4, 9]]


def test_procedures_of_different_lengths_share_the_calls_they_have_in_common() -> None:
    engine = Squares()
    results = run_procedures({k: times(10 * k, k) for k in (3, 0, 1, 2)}, engine)
    assert results == {0: [], 1: [100], 2: [400, 441], 3: [900, 961, 1024]}
    assert engine.calls == [[30, 10, 20], [31, 21], [32]]


def test_an_error_reaches_the_procedure_that_asked_and_no_other() -> None:
    async def careful(number: int) -> str:
        try:
            await ask(number)
        except ValueError as error:
            return f"caught: {error}"
        return "fine"

    results = run_procedures({0: careful(2), 1: careful(-3), 2: twice(-4), 3: twice(5)}, Squares())
    assert results[0] == "fine"
    assert results[1] == "caught: -3 is negative"
    assert isinstance(results[2], ValueError)
    assert str(results[2]) == "-4 is negative"
    assert results[3] == 625


def test_a_procedure_may_go_on_after_an_error() -> None:
    async def retries(number: int) -> int:
        for candidate in (number, -number):
            try:
                return int(await ask(candidate))
            except ValueError:
                continue
        return -1

    engine = Squares()
    assert run_procedures({0: retries(-3), 1: retries(2)}, engine) == {0: 9, 1: 4}
    assert engine.calls == [[-3, 2], [3]]


def test_what_a_procedure_raises_is_its_result() -> None:
    async def fails(number: int) -> None:
        await ask(number)
        raise KeyError(number)

    async def fails_at_once() -> None:
        raise RuntimeError("no data")

    results = run_procedures({0: fails(1), 1: fails_at_once(), 2: twice(1)}, Squares())
    assert [type(results[k]) for k in (0, 1, 2)] == [KeyError, RuntimeError, int]


def test_cleaning_up_runs_when_an_error_is_thrown_in() -> None:
    closed = []

    async def tidy() -> None:
        try:
            await ask(-1)
        finally:
            closed.append(True)

    assert isinstance(run_procedures({0: tidy()}, Squares())[0], ValueError)
    assert closed == [True]


class Stopped(StopSignal, KeyboardInterrupt):
    """What a handler of Ctrl-C raises."""


def test_a_signal_is_not_a_result() -> None:
    async def interrupted() -> None:
        raise Stopped

    with pytest.raises(Stopped):
        run_procedures({0: interrupted()}, Squares())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit("x"), BaseException("x")])
def test_what_would_end_the_process_is_the_procedures_failure(error: BaseException) -> None:
    async def exits() -> None:
        raise error

    results = run_procedures({0: exits(), 1: twice(1)}, Squares())
    assert isinstance(results[0], ExitError)
    assert str(results[0]) == f"{type(error).__name__}({error}) would end the whole process: raise an Exception"
    assert results[1] == 1


def test_whose_code_runs_is_told_before_it_does() -> None:
    told: list[Sequence[int]] = []
    run_procedures({0: twice(1), 1: twice(2)}, Squares(), told.append)
    assert told[:3] == [(0,), (1,), (0, 1)]
    assert told[3:5] == [(0,), (1,)]


def test_nothing_to_run() -> None:
    engine = Squares()
    assert run_procedures({}, engine) == {}
    assert engine.calls == []
