"""States that stay on the device, or are brought there ahead: fewer transfers, the same results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.hosting import building, outcomes, procedures
from actors.hosting.building import build_host
from actors.hosting.device_states import DeviceStateCache
from actors.hosting.memory import SpillHandle
from actors.hosting.state import ClientStates
from algorithms.ditto import Ditto
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.engine import transfers
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import from_numpy, tensors
from tests.support.elsewhere import PRETENDED, context, elsewhere
from tests.support.experiments import small_experiment
from tests.support.launches import Launches
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_equal, random_clients

pytestmark = PRETENDED
ROOM = 1 << 30


def ditto(device: torch.device, limit: int, width: int = 4, clients: int = 12) -> Toy:
    """Clients that keep a model each, in stacks; two rounds are over."""
    train = TrainConfig(rounds=6, clients_per_round="all", local_epochs=1, batch_size=5, lr=0.1)
    data = random_clients([6 + k % 3 for k in range(clients)], seed=1)
    toy = Toy(Ditto(), data, two_layers(), train, mode="vectorized", device=device)
    (host,) = toy.client_hosts
    host.engine.width = width
    host._device_states = DeviceStateCache(limit)
    toy.run(2)
    return toy


def outcome(toy: Toy) -> dict[str, Any]:
    """The server's tree and the states after two more rounds and an evaluation."""
    toy.run(2)
    scores = {str(client): rows["personalized"].vector[:2].tolist() for client, rows in toy.scores().items()}
    states = {str(client): from_numpy(state) for client, state in toy.states().items()}
    return {"server": toy.server, "states": states, "scores": {k: torch.tensor(v) for k, v in scores.items()}}


def one_state(toy: Toy) -> int:
    """Bytes of a client's state."""
    kept = toy.client_hosts[0].states.handle(0)
    assert kept is not None
    return kept.size


def to_device(limit: int) -> int:
    """Transfers to the device in a round of three stacks."""
    with elsewhere() as device:
        toy = ditto(device, limit)
        with Launches() as counted:
            toy.step()
    return counted.waits["to device"]


@pytest.mark.slow
def test_states_that_stay_are_not_transferred_again_and_change_no_bit() -> None:
    # One transfer less for each of the three stacks.
    assert to_device(ROOM) == to_device(0) - 3
    found = []
    for limit in (0, ROOM):
        with elsewhere() as device:
            found.append(outcome(ditto(device, limit)))
    assert_equal(found[1], found[0])


def test_the_budget_holds() -> None:
    with elsewhere() as device:
        size = one_state(ditto(device, 0))
        toy = ditto(device, 5 * size)
        (host,) = toy.client_hosts
        outcome(toy)
        assert host._device_states._recent.bytes == 5 * size
        assert len(host._device_states._copies) == 5
        for _, state in host._device_states._copies.values():
            assert all(leaf.untyped_storage().nbytes() == leaf.nbytes for leaf in tensors(state))


@pytest.mark.slow
def test_what_the_next_stack_needs_is_brought_before_the_results_of_this_one_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[tuple[str, tuple[int, ...]]] = []
    load_inputs, collect = procedures.load_inputs, procedures.collect

    def bringing(device: Any, job: Any, ids: Sequence[int], state_of: Any) -> Any:
        events.append(("load_inputs", tuple(ids)))
        return load_inputs(device, job, ids, state_of)

    def settling(device: Any, job: Any, outcomes: Any, *rest: Any) -> Any:
        events.append(("collect", tuple(outcomes)))
        return collect(device, job, outcomes, *rest)

    with elsewhere() as device:
        size = one_state(ditto(device, 0))
        toy = ditto(device, 4 * size)  # the clients of a stack: none is there when its turn comes again
        expected = ditto(device, 0).step()
        monkeypatch.setattr(procedures, "load_inputs", bringing)
        monkeypatch.setattr(procedures, "collect", settling)
        found = toy.step()
    assert_equal(found, expected)
    stacks = [ids for what, ids in events if what == "collect"]
    assert [len(ids) for ids in stacks] == [4, 4, 4]
    first, second, third = stacks
    assert events == [
        ("load_inputs", first),
        ("load_inputs", second),
        ("collect", first),
        ("load_inputs", third),
        ("collect", second),
        ("collect", third),
    ]


@pytest.mark.slow
def test_states_come_home_while_the_next_stack_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies home begin with the results of a stack, and are waited for once the next one has been launched."""
    events: list[str] = []
    start_copy_to_cpu, run, replace = outcomes.start_copy_to_cpu, procedures.run_procedures, ClientStates.replace

    def sending(trees: Sequence[Any]) -> Any:
        events.append(f"sent {len(trees)}")
        return start_copy_to_cpu(trees)

    def running(coroutines: Any, *rest: Any) -> Any:
        found = run(coroutines, *rest)
        events.append(f"launched {len(coroutines)}")
        return found

    def storing(self: ClientStates, *rest: Any) -> None:
        if events[-1] != "stored":
            events.append("stored")
        replace(self, *rest)

    with elsewhere() as device:
        size = one_state(ditto(device, 0))
        toy, plain = ditto(device, 4 * size), ditto(device, 4 * size - 1)
        with Launches() as at_once:
            expected = plain.step()
        monkeypatch.setattr(outcomes, "start_copy_to_cpu", sending)
        monkeypatch.setattr(procedures, "run_procedures", running)
        monkeypatch.setattr(ClientStates, "replace", storing)
        with Launches() as counted:
            found = toy.step()
    assert_equal(found, expected)
    assert_equal(
        {str(client): from_numpy(state) for client, state in toy.states().items()},
        {str(client): from_numpy(state) for client, state in plain.states().items()},
    )
    # Of the last stack nothing is left to wait for.
    assert events == [
        "launched 4",
        "sent 4",
        "launched 4",
        "stored",
        "sent 4",
        "launched 4",
        "stored",
    ]
    assert counted.waits["from device"] == at_once.waits["from device"]


@pytest.mark.parametrize("kept", [pytest.param(0, marks=pytest.mark.slow), 4])
@pytest.mark.slow
def test_states_are_stored_in_pieces_which_free_the_memory_that_the_next_one_takes(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside all clients' states at most one piece of new ones is in memory."""
    held = list[int]()
    move_to, replace = transfers._with, ClientStates.replace

    def moving(trees: Sequence[Any], moved: Any) -> Any:
        found = move_to(trees, moved)
        held.append(len(trees))
        return found

    def storing(self: ClientStates, *rest: Any) -> None:
        held.append(-1)
        replace(self, *rest)

    with elsewhere() as device:
        size = one_state(ditto(device, 0))
        expected = ditto(device, 0).step()
        toy = ditto(device, kept * size)
        with monkeypatch.context() as patched:
            patched.setattr(transfers, "MOVE_BYTES", 2 * size)
            patched.setattr(transfers, "_with", moving)
            patched.setattr(ClientStates, "replace", storing)
            found = toy.step()
    assert_equal(found, expected)
    stored = "".join("-" if one < 0 else f"({one})" for one in held if one in (-1, 2))
    assert stored == "(2)--" * 6  # three stacks of four clients


@pytest.mark.slow
def test_states_on_their_way_are_kept_where_the_next_stack_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = procedures.run_procedures, list[tuple[int, ...]]()

    def failing(coroutines: Any, *rest: Any) -> Any:
        seen.append(tuple(coroutines))
        if len(seen) == 2:
            for one in coroutines.values():
                one.close()
            raise KeyError("the second stack")
        return run(coroutines, *rest)

    with elsewhere() as device:
        size = one_state(ditto(device, 0))
        toy = ditto(device, 4 * size)
        (host,) = toy.client_hosts
        before = {client: host.states.handle(client) for client in range(12)}
        monkeypatch.setattr(procedures, "run_procedures", failing)
        with pytest.raises(KeyError, match="the second stack"):
            toy.step()
        changed = {client for client in range(12) if host.states.handle(client) is not before[client]}
    assert changed == set(seen[0])


@pytest.mark.slow
def test_memory_that_ends_while_states_are_brought_or_kept_changes_nothing() -> None:
    with elsewhere() as device:
        size = one_state(ditto(device, 0))
        expected = outcome(ditto(device, 0))
        toy = ditto(device, 4 * size)
        begun = context().made
        toy.step()
        made = context().made - begun
    for moment in range(0, made, max(made // 5, 1)):
        with elsewhere() as device:
            toy = ditto(device, 4 * size)
            now = context().made
            context().failing = range(now + moment, now + moment + 1)
            found = outcome(toy)
        assert_equal_rounded(found, expected)


def assert_equal_rounded(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Stacks of another width round otherwise."""
    for part in ("server", "states", "scores"):
        torch.testing.assert_close(left[part], right[part], rtol=0, atol=1e-10)


@pytest.mark.slow
def test_after_a_rewind_states_are_those_of_the_commit() -> None:
    with elsewhere() as device:
        toy = ditto(device, ROOM)
        (host,) = toy.client_hosts
        assert host._device_states.get(0, host.states.handle(0)) is not None
        host.rewind()
        assert not host._device_states._copies
        assert host.states.checkout(0) == {}


def test_a_copy_counts_for_the_state_that_it_is_of_and_no_other() -> None:
    cache, state = DeviceStateCache(1000), {"a": torch.ones(10)}
    mine, other = SpillHandle(0, state), SpillHandle(1, state)
    cache.put(3, mine, state)
    assert cache.get(3, mine) is not None
    assert cache.get(3, other) is None
    assert cache.get(4, mine) is None
    cache.put(3, other, {"a": torch.ones(1000)})  # too large: nor does the older one count any more
    assert cache.get(3, mine) is None
    cache.put(5, mine, {"n": 2.0, "a": torch.arange(100.0)[10:20]})
    kept = cache.get(5, mine)
    assert kept is not None
    assert kept["a"].untyped_storage().nbytes() == kept["a"].nbytes
    cache.disable()
    cache.put(5, mine, state)
    assert cache.get(5, mine) is None


def test_the_budget_is_an_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def limit(**cluster: Any) -> int:
        config = load_config(Experiment, small_experiment(tmp_path, "run", "ditto", **cluster), {})
        return building.device_state_memory_of(config.cluster, torch.device("cuda"))

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100_000, 200_000))
    assert limit() == 4000
    assert limit(actors_per_gpu=4) == 1000
    assert limit(device_state_memory="2KiB") == 2048
    assert limit(device_state_memory=0) == 0
    config = load_config(Experiment, small_experiment(tmp_path, "run", "ditto", device_state_memory="1GiB"), {})
    assert build_host(config, 0, "cpu")._device_states.limit == 0
