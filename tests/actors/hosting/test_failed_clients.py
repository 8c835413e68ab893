"""What the error of a failed client keeps alive: nothing of the stack that it was in."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from actors.hosting.job import Job
from algorithms.ditto import Ditto
from rayfl.engine.client import Client
from rayfl.params import Tree, leaves, map_leaves, to_numpy
from tests.support.in_place import TRAIN
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, random_clients

BAD = 1


class Failing(Ditto):
    """Ditto, of whose clients one diverges or raises; notes what the clients have trained."""

    name: str = "failing"  # type: ignore[assignment]
    raises: bool = False

    async def local_update(self, client: Client, **given: Any) -> Any:
        found = await super().local_update(client, **given)
        _seen.extend(weakref.ref(leaf) for _, leaf in leaves(client.state) if isinstance(leaf, Tensor))
        if client.id != BAD:
            return found
        if self.raises:
            raise ArithmeticError("no good")
        return replace(found, tree=map_leaves(lambda leaf: leaf * float("nan"), found.tree))


_seen: list[weakref.ref[Tensor]] = []


@pytest.mark.parametrize("raises", [False, True], ids=["diverges", "raises"])
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_a_failed_client_keeps_no_stack_in_memory(mode: str, raises: bool) -> None:
    toy = Toy(Failing(raises=raises), random_clients((8, 12, 6, 10)), two_layers(), TRAIN, mode=mode)
    [host] = toy.client_hosts
    sent: dict[str, Tree] = to_numpy({"model": toy.server["model"]})
    job = Job("local_update", "mean", 0, (0, 1, 2, 3), attempts=1, skips=True)
    host.run(job, sent)  # what is kept from call to call is there now
    gc.collect()
    gc.disable()
    try:
        _seen.clear()
        failures = host.run(replace(job, round=1), sent).failures
        assert list(failures) == [BAD]
        stored = {leaf.data_ptr() for state in host.states.all().values() for _, leaf in leaves(state)}
        alive = [leaf for ref in _seen if (leaf := ref()) is not None]
        assert all(leaf.data_ptr() in stored for leaf in alive)
    finally:
        gc.enable()
    assert ("no good" in failures[BAD].trace and "test_failed_clients.py" in failures[BAD].trace) == raises
