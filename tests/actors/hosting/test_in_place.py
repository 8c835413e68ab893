"""What a method is lent comes back as it was: a write in place is an error that names method, client and leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.base import Clients
from algorithms.fedavg import FedAvg
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.errors import ClientError
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch, Model, Predictor, Task
from tests.support.elsewhere import PRETENDED, elsewhere
from tests.support.in_place import TRAIN, toy_of
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_equal, random_clients

COHORT = (0, 1, 3)
GUILTY = 1
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


class Writer(FedAvg):
    """Federated averaging of whose clients one does what it must not."""

    name: str = "writer"

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        if client.id == GUILTY:
            self.write(client, model)
        return await super().local_update(client, model)

    def write(self, client: Client, model: Tree) -> None:
        model["inner.weight"].mul_(0.5)


class WritesLate(Writer):
    """After its training, when other clients have long begun theirs."""

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        result = await FedAvg.local_update(self, client, model)
        if client.id == GUILTY:
            self.write(client, model)
        return result


class WritesInputs(Writer):
    def write(self, client: Client, model: Tree) -> None:
        client.examples().x.sub_(0.5)


class WritesLabels(Writer):
    def write(self, client: Client, model: Tree) -> None:
        client.examples().y.zero_()


class WritesPublic(Writer):
    def write(self, client: Client, model: Tree) -> None:
        client.public()[0] = 0


class WritesAndFails(Writer):
    def write(self, client: Client, model: Tree) -> None:
        super().write(client, model)
        raise ArithmeticError("an error of its own")


class Teacher(Writer):
    """Runs the received model in training mode, which writes running statistics into it."""

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        if client.id == GUILTY:
            await client.outputs(lambda x, task: task.logits(model, Batch(x, x[:, 0].long())))
        return await FedAvg.local_update(self, client, model)


class Publishing(Writer):
    """A prediction that does the same."""

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        result = await FedAvg.local_update(self, client, model)
        if client.id == GUILTY:
            client.publish(both=Predictor.of(model, combine=self.predict))
        return result

    def predict(self, models: Sequence[Model], x: Tensor, task: Task) -> Tensor:
        return task.logits(models[0], Batch(x, x[:, 0].long())).log_softmax(-1)


class Comparing(FedAvg):
    """Writes in the report of an update."""

    name: str = "comparing"

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        received["model"]["head.bias"] += 1
        return super().update(trained, received, task)


RECEIVED = "'model/{}' of what is sent to all clients"


@MODES
@pytest.mark.parametrize(
    ("method", "what"),
    [
        (Writer, RECEIVED.format("inner.weight")),
        (WritesLate, RECEIVED.format("inner.weight")),
        (WritesAndFails, RECEIVED.format("inner.weight")),
        (Teacher, RECEIVED.format("norm.running_mean")),
        (Publishing, RECEIVED.format("norm.running_mean")),
        (WritesInputs, "its train inputs, which are read once for all rounds"),
        (WritesLabels, "its train labels, which are read once for all rounds"),
        (WritesPublic, "the public samples, which are read once for all rounds"),
    ],
)
def test_method_client_and_leaf_are_named(method: type[Writer], what: str, mode: str) -> None:
    with pytest.raises(ClientError) as caught:
        toy_of(method(), mode).step(COHORT)
    assert str(caught.value).startswith(
        f"client {GUILTY}, round 1, local_update: MethodError: writer writes to {what}, in place: work on a copy"
    )


@PRETENDED
@pytest.mark.parametrize("method", [Teacher, Publishing])
def test_on_a_device_values_are_compared_when_the_stack_has_ended(method: type[Writer]) -> None:
    with elsewhere() as device:
        toy = Toy(
            method(), random_clients((8, 12, 6, 10)), normalized_layers(), TRAIN, mode="vectorized", device=device
        )
        said = r"^the clients, round 1, local_update: .*'model/norm\.running_mean' of what is sent"
        with pytest.raises(ClientError, match=said):
            toy.step(COHORT)


class Assigning(Writer):
    """Puts tensors of its own into the dict that it received."""

    def write(self, client: Client, model: Tree) -> None:
        model.update({name: torch.zeros_like(leaf) for name, leaf in model.items()})

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        changed = super().round(server, cohort, clients)
        server["model"].clear()
        return changed


class Careful(Writer):
    """The same with a dict of its own."""

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        zeros = {name: torch.zeros_like(leaf) for name, leaf in model.items()}
        return await FedAvg.local_update(self, client, zeros if client.id == GUILTY else model)


@MODES
def test_dicts_that_are_lent_are_the_procedures_own(mode: str) -> None:
    """What one client assigns there, or the server's round, is nobody else's."""
    assigning, careful = toy_of(Assigning(), mode), toy_of(Careful(), mode)
    before = copy(assigning.server)
    played = assigning.federation.play(assigning.algorithm, assigning.server, COHORT)
    assert_equal(assigning.server, before)
    assert_equal(played, careful.federation.play(careful.algorithm, careful.server, COHORT))


@MODES
def test_the_report_of_an_update_may_not_write_either(mode: str) -> None:
    with pytest.raises(ClientError, match=r"client 0, round 1, local_update: .* 'model/head\.bias' of what is sent"):
        toy_of(Comparing(), mode).step(COHORT)


class Evaluated(Writer):
    """Writes when it is evaluated."""

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        return await FedAvg.local_update(self, client, model)

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        if client.id == GUILTY:
            server["model"]["head.bias"].zero_()
        return await super().predictors(client, server)


@MODES
def test_an_evaluation_may_not_write_either(mode: str) -> None:
    toy = toy_of(Evaluated(), mode)
    toy.run(1)
    with pytest.raises(ClientError, match=rf"client {GUILTY}, round 1, predictors: .* 'model/head\.bias' of what is"):
        toy.scores()


class Accumulating(FedAvg):
    """An objective that counts in what it may only read."""

    name: str = "accumulating"

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        frozen = {"seen": torch.zeros(1, dtype=torch.float64), "received": copy(model)}
        trained = await client.train(model, self.objective, frozen=frozen)
        return self.weighted(client, trained)

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        frozen["seen"].add_(1.0)
        loss: Tensor = task.loss(model, batch)
        return loss


class Distilling(Accumulating):
    """A teacher in training mode: its running statistics move from step to step."""

    def objective(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        loss: Tensor = task.loss(model, batch)
        with torch.no_grad():
            task.logits(frozen["received"], batch)
        return loss


@pytest.mark.parametrize(
    ("method", "mode", "leaf"),
    [
        (Accumulating, "looped", "seen"),
        (Accumulating, "vectorized", "seen"),
        # batch statistics are not vectorised
        (Distilling, "looped", "received/norm.running_mean"),
    ],
)
def test_an_objective_only_reads_what_is_frozen(method: type[Accumulating], mode: str, leaf: str) -> None:
    task = normalized_layers() if method is Distilling else two_layers()
    toy = Toy(method(), random_clients((8, 12, 6, 10)), task, TRAIN, mode=mode)
    with pytest.raises(ClientError) as caught:
        toy.step(COHORT)
    assert str(caught.value).startswith(
        f"client {COHORT[0]}, round 1, local_update: MethodError: the objective writes to '{leaf}' of frozen in place"
    )


class Differentiating(Accumulating):
    """The same in a gradient."""

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        slopes = await client.gradient(model, self.objective, frozen={"seen": torch.zeros(1)})
        return self.weighted(client, slopes)


@MODES
def test_nor_does_a_gradient_write(mode: str) -> None:
    with pytest.raises(ClientError, match="the objective writes to 'seen' of frozen in place"):
        toy_of(Differentiating(), mode).step(COHORT)


class Official(FedAvg):
    """Writes when the server's own model is asked for."""

    name: str = "official"

    def global_predictors(self, server: Tree, task: Task) -> dict[str, Predictor]:
        server["model"]["head.bias"].zero_()
        return super().global_predictors(server, task)

    async def predictors(self, client: Client, server: Tree) -> dict[str, Predictor]:
        return {"global": Predictor.of(server["model"])}


class EveryBias(FedAvg):
    """Writes to the first leaf of whatever model it receives."""

    name: str = "every_bias"

    async def local_update(self, client: Client, model: Tree) -> Weighted:
        next(iter(model.values())).add_(1.0)
        return await super().local_update(client, model)
