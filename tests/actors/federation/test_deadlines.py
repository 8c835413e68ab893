"""How long a host may be silent: clients have a deadline, a host's own work a longer one."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from actors.hosting.running_clients import Report
from actors.processes.pool import HostDiedError
from actors.processes.ray_host import RayHost
from actors.processes.waiting import OWN_WORK_S, silence
from rayfl.engine.updates.requests import SERVER

DEADLINE_S = 3.0


class Reporting(RayHost):
    """A host without a process that says what it does."""

    def __init__(self, report: Report | None) -> None:
        self.actor = self
        self._report = report

    def doing(self) -> Report | None:
        return self._report


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The actors that were ended."""
    found: list[Any] = []
    monkeypatch.setattr(ray, "kill", found.append)
    return found


def at(*clients: int, seconds: float = 0.0, **work: float) -> Reporting:
    return Reporting(Report(clients, seconds, (), work))


@pytest.mark.parametrize("of_clients", [True, False])
@pytest.mark.parametrize(
    ("host", "silent_s", "expected"),
    [
        (at(7, seconds=2.0), 50.0, 2.0),
        (at(7, seconds=2.0, committing=700.0), 700.0, 2.0),
        (at(SERVER, seconds=5000.0), 5000.0, 0.0),
        (at(committing=5.0), 5.0, 0.0),
        (at(restoring=500.0), 700.0, 0.0),
        (at(waiting=9000.0), 5.0, 0.0),  # it had nothing to do before
        (at(waiting=0.1, committing=599.0), 599.0, 0.0),
    ],
)
def test_clients_have_their_own_time_and_other_work_has_more(
    host: Reporting, silent_s: float, expected: float, of_clients: bool, ended: list[Any]
) -> None:
    assert silence(host, 0, DEADLINE_S, of_clients, silent_s) == expected
    assert not ended


@pytest.mark.parametrize(
    ("host", "of_clients", "blamed", "message"),
    [
        (at(7, seconds=3.0), True, (7,), r"no answer within clients\.deadline_s=3 s"),
        (at(7, seconds=3.0, committing=1.0), True, (7,), r"no answer within clients\.deadline_s=3 s"),
        (at(7, seconds=3.0), False, (), r"no answer within clients\.deadline_s=3 s"),
        (at(), True, (), r"no answer within clients\.deadline_s=3 s"),
        (Reporting(None), False, (), r"no answer within clients\.deadline_s=3 s"),
        (at(committing=OWN_WORK_S), False, (), "no end of committing within 600 s"),
        (at(restoring=OWN_WORK_S, committing=1.0), True, (), "no end of restoring within 600 s"),
    ],
)
def test_a_host_that_hangs_is_ended(
    host: Reporting, of_clients: bool, blamed: tuple[int, ...], message: str, ended: list[Any]
) -> None:
    with pytest.raises(HostDiedError, match=message) as caught:
        silence(host, 0, DEADLINE_S, of_clients, OWN_WORK_S)
    assert ended == [host]
    assert (caught.value.clients, caught.value.certain, caught.value.suspicious) == (blamed, *[bool(blamed)] * 2)


def test_a_process_that_reports_nothing_may_be_blocked_by_a_client() -> None:
    with pytest.raises(HostDiedError) as caught:
        silence(Reporting(None), 0, DEADLINE_S, True, 4.0)
    assert (caught.value.clients, caught.value.certain, caught.value.suspicious) == ((), False, True)


def test_a_longer_deadline_is_that_of_other_work_too() -> None:
    assert silence(at(committing=900.0), 0, 1000.0, False, 900.0) == 0.0
