"""What a stacked step of whole methods reads and writes, on a pretended device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.ditto import Ditto
from algorithms.fedphp import FedPHP
from algorithms.floco import Floco
from algorithms.superfed import SuPerFed
from rayfl.engine.stacks import vectorized
from rayfl.engine.updates.requests import TrainRequest
from rayfl.examples import Examples, InputSpec
from rayfl.models.base import Network
from rayfl.models.zoo import TwoNN
from rayfl.tasks.classification import Classification
from tests.support.elsewhere import PRETENDED, elsewhere
from tests.support.launches import Launches
from tests.support.problems import VECTOR, Dropping, Normalized, Recurrent, examples, request

torch.set_num_threads(1)

SPEC = InputSpec("image", (1, 28, 28), 10)
CLIENTS = 4
MOST = {"superfed": (48, 15.0), "ditto": (22, 7.0), "floco": (60, 9.0), "fedphp": (165, 10.0)}
"""Launches of a stacked step, and models that it reads and writes for each client."""


def update(method: str, network: Network, steps: int, client: int, device: torch.device, shared: Any) -> TrainRequest:
    """A local update on mini-batches of ten."""
    data, own = examples(10 * steps, SPEC, client), network.initialize(client)
    data = Examples(data.x.to(device), data.y.to(device))
    plain = request(data, own, client=client, epochs=1, momentum=0.0, weight_decay=0.0)
    frozen = {"received": shared}
    if method == "superfed":
        draws = {"coefficient": np.full(steps, 0.25)}
        trained = {"federated": shared, "local": own}
        return replace(plain, trainable=trained, objective=SuPerFed().objective, draws=draws, frozen=frozen)
    if method == "ditto":
        return replace(plain, objective=Ditto(proximal_weight=0.5).personal_objective, frozen=frozen)
    if method == "fedphp":
        return replace(plain, objective=FedPHP().objective, frozen={"hpm": network.initialize(50 + client)})
    head = own.pop(network.head_weight)
    trained = {"body": own, "endpoints": torch.stack([head, 2 * head, -head])}
    draws = {"point": np.full((steps, 3), 1 / 3)}
    return replace(plain, trainable=trained, objective=Floco(simplex_dimension=2).objective, draws=draws)


def of_one_step(few: Launches, many: Launches) -> Launches:
    """What there is more of in a pass with one step more."""
    found = Launches()
    for count in ("launches", "waits", "bytes"):
        getattr(found, count).update(getattr(many, count))
        getattr(found, count).subtract(getattr(few, count))
    return found


@PRETENDED
@pytest.mark.parametrize("method", MOST)
def test_launches_and_bytes_of_a_methods_step(method: str) -> None:
    network = Network(lambda: TwoNN().build(SPEC))
    task, counted = Classification(network), []
    with elsewhere() as device:
        shared = {name: leaf.to(device) for name, leaf in network.initialize(100).items()}
        for steps in (2, 3):
            updates = [update(method, network, steps, k, device, shared) for k in range(CLIENTS)]
            with Launches() as launches:
                vectorized.train(updates, task, device)
            counted.append(launches)
    found = of_one_step(*counted)
    models = found.bytes.total() / CLIENTS / (4 * network.num_parameters)
    assert not +found.waits
    assert found.launches.total() <= MOST[method][0], found.launches.total()
    assert models <= MOST[method][1], models


@PRETENDED
@pytest.mark.parametrize("factory", [Normalized, Dropping, Recurrent])
@pytest.mark.first_case
def test_no_layer_has_the_host_wait(factory: Any) -> None:
    network = Network(factory)
    task, counted = Classification(network), []
    with elsewhere() as device:
        for steps in (2, 3):
            updates = []
            for k in range(2):
                data = examples(10 * steps - k, VECTOR, k)
                data = Examples(data.x.to(device), data.y.to(device))
                updates.append(request(data, network.initialize(k), client=k, epochs=1))
            with Launches() as launches:
                vectorized.train(updates, task, device)
            counted.append(launches)
    assert not +of_one_step(*counted).waits
