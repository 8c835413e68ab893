"""Hosts that die, and which client is to blame: without processes, by a pool that says so."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from actors.federation.federation import Federation
from actors.federation.host_deaths import HostDeaths
from actors.federation.hosts import Hosts
from actors.federation.participation import Participation
from actors.hosting.failures import Failure, RoundUndoneError
from actors.hosting.job import Job
from actors.processes.pool import HostDiedError, InlinePool
from algorithms.fedavg import FedAvg
from rayfl.config.cluster_section import ClientsConfig
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ClientError
from tests.support.toy_networks import softmax_regression
from tests.support.toys import Toy, random_clients

SKIP = ClientsConfig(on_error="skip", deadline_s=5)
RETRY = ClientsConfig(on_error="retry", retries=2)
RETRY_THEN_SKIP = ClientsConfig(on_error="retry", retries=1, after_retries="skip")


def ended(*clients: int) -> HostDiedError:
    return HostDiedError(0, "gone", clients, suspicious=True)


def hung(*clients: int) -> HostDiedError:
    return HostDiedError(0, "silent", clients, hung=True, certain=True, suspicious=True)


JOB = Job("local_update", "mean", 3, ())


def test_a_process_that_ended_makes_suspects_and_the_second_time_it_is_proven() -> None:
    deaths = HostDeaths(SKIP)
    assert deaths.suspects(JOB) == frozenset()
    assert deaths.judge(ended(1, 4, 7), JOB) is None
    assert deaths.suspects(JOB) == {1, 4, 7}
    assert deaths.suspects(Job("local_update", "mean", 2, ())) == frozenset()
    verdict = deaths.judge(ended(4), JOB)
    assert verdict is not None
    assert (verdict.client, verdict.final, verdict.explains) == (4, True, 1)
    assert verdict.failure == Failure("local_update", "its process ended, each time")
    assert deaths.suspects(JOB) == frozenset()  # the others are done together again
    # Another one of them does the same.
    assert deaths.judge(ended(1, 7), JOB) is None
    verdict = deaths.judge(ended(7), JOB)
    assert verdict is not None and (verdict.client, verdict.explains) == (7, 1)


def test_one_that_hangs_is_proven_at_once_where_the_host_names_it() -> None:
    verdict = HostDeaths(SKIP).judge(hung(4), JOB)
    assert verdict is not None
    assert (verdict.client, verdict.final, verdict.explains) == (4, True, 0)
    assert verdict.failure.reason == "no end within clients.deadline_s=5 s"
    stacked = HostDeaths(SKIP)
    assert stacked.judge(hung(4, 5), JOB) is None
    assert stacked.suspects(JOB) == {4, 5}
    verdict = stacked.judge(hung(5), JOB)
    assert verdict is not None and (verdict.client, verdict.explains) == (5, 1)


def test_a_single_death_of_a_single_client_may_be_the_machines() -> None:
    deaths = HostDeaths(SKIP)
    assert deaths.judge(ended(4), JOB) is None
    assert deaths.judge(ended(4), JOB) is not None


@pytest.mark.parametrize("death", [HostDiedError(0, "node", (1, 2)), HostDiedError(0, "gone", (), suspicious=True)])
def test_a_lost_node_is_laid_to_nobody(death: HostDiedError) -> None:
    deaths = HostDeaths(SKIP)
    for _ in range(3):
        assert deaths.judge(death, JOB) is None
    assert deaths.suspects(JOB) == frozenset()


def test_retries_are_counted_in_processes() -> None:
    deaths = HostDeaths(RETRY)
    assert deaths.judge(ended(1, 4), JOB) is None
    second, third = deaths.judge(ended(4), JOB), deaths.judge(ended(4), JOB)
    assert second is not None and (second.final, second.explains) == (False, 1)
    assert third is not None and (third.final, third.explains) == (True, 0)


def test_without_a_policy_nobody_is_left_out_but_suspects_are_done_alone_after_the_second_death() -> None:
    deaths = HostDeaths(ClientsConfig())
    assert deaths.judge(ended(1, 4), JOB) is None
    assert deaths.suspects(JOB) == frozenset()
    assert deaths.judge(ended(1, 4), JOB) is None
    assert deaths.suspects(JOB) == {1, 4}
    assert deaths.judge(ended(4), JOB) is None


def examined(deaths: HostDeaths, death: HostDiedError, job: Job = JOB, required: bool | None = False) -> BaseException:
    participation = Participation(3, (1, 4, 7), {9: Failure("x", "y")})
    with (
        pytest.raises((HostDiedError, RoundUndoneError, ClientError)) as caught,
        deaths.attributed(job, participation, {8: Failure("x", "y")}, required),
    ):
        raise death
    return caught.value


def test_what_follows_of_a_death() -> None:
    deaths = HostDeaths(SKIP)
    first = examined(deaths, ended(1, 4))
    assert isinstance(first, HostDiedError) and first.investigated
    second = examined(deaths, ended(4))
    assert isinstance(second, RoundUndoneError)
    assert (sorted(second.failures), sorted(second.unscorable), second.deaths) == ([4, 9], [8], 1)
    scoring = Job("predictors", "evaluate", 3, ())
    third = examined(deaths, hung(7), scoring)
    assert isinstance(third, RoundUndoneError)
    assert (sorted(third.failures), sorted(third.unscorable)) == ([9], [7, 8])
    needed = examined(HostDeaths(SKIP), hung(4), required=True)
    assert isinstance(needed, ClientError) and "needs every one of its clients" in str(needed)
    not_sampled = examined(HostDeaths(SKIP), hung(2), required=None)
    assert isinstance(not_sampled, ClientError)
    once = examined(HostDeaths(RETRY), hung(4))
    assert isinstance(once, RoundUndoneError) and 4 not in once.failures
    plain = examined(HostDeaths(ClientsConfig()), hung(4))
    assert isinstance(plain, HostDiedError) and not plain.investigated


class DeadlyPool(InlinePool):
    """Hosts that die with what a client does, instead of this process."""

    deadly: frozenset[int] = frozenset()

    def collect(
        self, handles: Mapping[Any, int], deadline_s: float | None = None, of_clients: bool = False
    ) -> Iterator[tuple[int, Any]]:
        for handle, host in handles.items():
            if isinstance(handle.value, Exception):
                raise HostDiedError(host, "gone", suspicious=True)
            yield host, handle.value

    def submit(self, host: int, method: str, *args: Any) -> Any:
        if method == "run" and self.deadly & set(args[0].clients):
            handle = super().submit(host, "held_states")
            handle.value = RuntimeError()
            return handle
        return super().submit(host, method, *args)


def test_a_round_finds_the_client_with_whom_hosts_die() -> None:
    train = TrainConfig(rounds=2, clients_per_round=4, local_epochs=1, batch_size=4, lr=0.1)
    toy = Toy(FedAvg(), random_clients([5, 9, 30, 4, 12, 20]), softmax_regression(), train)
    pool = DeadlyPool(toy.client_hosts)
    pool.deadly = frozenset({2})
    federation = Federation(Hosts(pool), toy.task, toy.context, toy.dataset.sizes(), SKIP)
    absent: dict[int, Failure] = {}
    happened: list[str] = []
    for _ in itertools.repeat(None, 4):
        federation.begin_round(0, cohort=(0, 2, 3, 5), absent=absent)
        try:
            changed = federation.play(toy.algorithm, toy.server, (0, 2, 3, 5))
            break
        except HostDiedError as death:
            happened.append(f"died with {death.clients}")
        except RoundUndoneError as undone:
            happened.append("undone")
            absent = undone.failures
    assert happened == ["died with (0, 2, 3, 5)", "undone"]
    assert {client: why.reason for client, why in absent.items()} == {2: "its process ended, each time"}
    assert set(changed) == {"model"}
