"""Passes that need a client, and rounds that are undone because one has failed in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.hosting.failures import Failure, RoundUndoneError
from algorithms.base import Clients
from rayfl.errors import ClientError
from rayfl.params import Tree
from tests.support.unreliable import World


@pytest.mark.parametrize(("required", "cohort"), [(None, [0, 1]), (True, [0, 1, 5])])
def test_a_client_that_is_needed_ends_the_run(required: bool | None, cohort: list[int], tmp_path: Path) -> None:
    world = World(tmp_path, 2)

    def everybody(cohort: list[int], clients: Clients) -> Tree:
        return clients.map(world.algorithm.look, range(6), {}, {5: {"how": "raise"}}, required=required)

    with pytest.raises(ClientError, match="client 5, round 4, look: RuntimeError: no such thing; this pass of the"):
        world.play(3, cohort, {}, everybody)


def test_a_client_that_was_not_sampled_may_be_missed_on_request(tmp_path: Path) -> None:
    world = World(tmp_path, 2)

    def everybody(cohort: list[int], clients: Clients) -> Tree:
        return clients.map(world.algorithm.look, range(6), {}, {5: {"how": "raise"}}, required=False)

    assert list(world.play(0, [0, 1], {}, everybody)) == [0, 1, 2, 3, 4]
    assert world.federation.absent == {5: Failure("look", "RuntimeError: no such thing")}


def test_a_failure_after_the_first_call_undoes_the_round(tmp_path: Path) -> None:
    world = World(tmp_path, 2)

    def twice(cohort: list[int], clients: Clients) -> Tree:
        clients.mean(world.algorithm.visit, cohort, {})
        return clients.map(world.algorithm.look, cohort, {}, {c: {"how": "raise"} for c in cohort if c == 1})

    with pytest.raises(RoundUndoneError, match="round 5 is done again without clients 1") as undone:
        world.play(4, [0, 1, 2], {}, twice)
    world.federation.rewind()
    world.federation.begin_round(4, (), [0, 1, 2], undone.value.failures)
    assert world.federation.present([0, 1, 2]) == [0, 2]


def test_a_call_that_depends_on_who_is_there_undoes_the_round(tmp_path: Path) -> None:
    world = World(tmp_path, 2)

    def counted(cohort: list[int], clients: Clients) -> Tree:
        payloads = {client: {"how": "raise" if client == 1 else f"well, {len(cohort)}"} for client in cohort}
        return clients.mean(world.algorithm.visit, cohort, {}, payloads)

    with pytest.raises(RoundUndoneError):
        world.play(0, [0, 1, 2], {}, counted)
