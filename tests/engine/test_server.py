"""Training on given samples, with other settings and a rate of its own course; and the server's training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.base import Algorithm
from algorithms.fedgen import FedGen
from algorithms.pfedhn import PFedHN
from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.augmentation import Augmentation
from rayfl.engine.client import Client
from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.engine.updates.settings import TrainConfig
from rayfl.engine.updates.trampoline import run_procedures
from rayfl.errors import MethodError
from rayfl.examples import Examples
from rayfl.models.base import Network
from rayfl.optimization.schedules import Cosine, Linear, Step
from rayfl.params import Tree, leaves
from rayfl.randomness import RandomStreams
from rayfl.tasks.base import Batch, Predictor, Task
from rayfl.tasks.classification import Classification
from tests.support.client_passes import SPEC, TASK, TRAIN, clients, trained
from tests.support.problems import CPU, SmallCNN, examples
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def towards(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    """Half the squared distance of the logits to the targets."""
    return batch.mean((task.logits(model, batch) - batch.y).square().sum(-1) / 2)


def shared_samples(count: int) -> Examples:
    """Inputs that all clients train on, with targets of the shape of logits."""
    generator = torch.Generator().manual_seed(7)
    return Examples(torch.randn(count, 6, generator=generator), torch.randn(count, 4, generator=generator))


def updates(who: dict[int, Client], mode: str, **options: Any) -> dict[int, Any]:
    """What ``client.train`` makes of the initial model, by client, with targets in place of labels."""
    engine = Engine(TASK, CPU, EngineConfig(mode=mode, width=4))  # type: ignore[arg-type]
    start = TASK.network.initialize(0)
    return run_procedures({k: client.train(start, towards, **options) for k, client in who.items()}, engine)


@MODES
def test_given_samples_take_the_place_of_the_clients_own(mode: str) -> None:
    public = shared_samples(10)
    found = updates(clients(), mode, examples=public, epochs=1)
    model = {name: leaf.clone() for name, leaf in TASK.network.initialize(0).items()}
    velocity = {name: torch.zeros_like(leaf) for name, leaf in model.items()}
    order = RandomStreams(0).generator("batches", 1, 2).permutation(10)
    for rows in (order[:4], order[4:8], order[8:]):
        leaves = {name: leaf.requires_grad_() for name, leaf in model.items()}
        value = towards(leaves, Batch(public.x[rows], public.y[rows]), TASK, None, None)
        slopes = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
        with torch.no_grad():
            for name in model:
                velocity[name] = 0.9 * velocity[name] + slopes[name] + 0.01 * model[name]
            model = {name: (leaf - 0.1 * velocity[name]).detach() for name, leaf in model.items()}
    assert_close(found[2], model, 1e-5)
    assert_close(found[2], updates(clients(), "looped", examples=public, epochs=1)[2], 1e-5)


@MODES
def test_samples_with_targets_are_never_stacked_with_samples_with_labels(mode: str) -> None:
    public, own = shared_samples(8), clients((8, 8))

    async def both(client: Client) -> Tree:
        given = public if client.id else Examples(public.x, torch.zeros(8, dtype=torch.int64))

        def objective(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
            return task.loss(model, batch) if batch.y.dtype == torch.int64 else towards(model, batch, task, None, None)

        return await client.train(TASK.network.initialize(0), objective, examples=given)

    engine = Engine(TASK, CPU, EngineConfig(mode=mode, width=4))  # type: ignore[arg-type]
    found = run_procedures({k: both(client) for k, client in own.items()}, engine)
    assert all(isinstance(reply, dict) for reply in found.values())


def test_given_samples_are_not_augmented() -> None:
    flipping = Augmentation(AugmentConfig(flip=True), torch.zeros(1))
    found = []
    for augmentation in (None, flipping):
        context = RoundContext(1, 3, 1, TRAIN, RandomStreams(0), augmentation=augmentation)
        client = Client(0, {}, {"train": examples(9, SPEC, 0)}, TASK, context, CPU)
        found.append(updates({0: client}, "looped", examples=shared_samples(9)))
    assert_equal(found[0], found[1])


@pytest.mark.parametrize(
    "algorithm",
    [PFedHN(inner_steps=2, hidden=6), FedGen(generator_steps=3, generator_hidden=6, noise_dim=4)],
    ids=lambda one: one.name,
)
def test_where_images_are_augmented_the_server_has_none(algorithm: Algorithm) -> None:
    images = torch.rand(3, 8, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    data = ListDataset([(own, torch.arange(8) % 3) for own in images])
    train = TrainConfig(rounds=2, clients_per_round="all", local_epochs=1, batch_size=4, lr=0.1)
    task, servers = Classification(Network(lambda: SmallCNN(3))), []
    for augmentation in (None, Augmentation(AugmentConfig(crop=1, flip=True), torch.zeros(1))):
        servers.append(Toy(algorithm, data, task, train, augmentation=augmentation).run())
    generators = [torch.cat([leaf.flatten() for _, leaf in leaves(one["generator"])]) for one in servers]
    assert not torch.equal(*generators), "the clients' images are augmented"


def test_other_settings_are_those_of_a_training_section() -> None:
    own = TrainConfig(optimizer="adam", lr=0.01, batch_size=3, max_grad_norm=0.5, local_epochs=1, rounds=3)
    expected = trained(
        clients(
            optimizer="adam", lr=0.01, batch_size=3, max_grad_norm=0.5, local_epochs=1, momentum=0.0, weight_decay=0.0
        )
    )
    assert_equal(trained(clients(), settings=own), expected)


@MODES
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_rate_can_change_from_step_to_step(mode: str, optimizer: str) -> None:
    settings = TrainConfig(optimizer=optimizer, lr=0.1, batch_size=None, momentum=0.9 if optimizer == "sgd" else 0.0)
    found = trained(clients((5, 5)), mode, settings=settings, steps=6, schedule=Cosine())
    for client, own in clients((5, 5)).items():
        sample = own.examples()
        model = {name: leaf.clone().requires_grad_() for name, leaf in TASK.network.initialize(0).items()}
        rule: Any = torch.optim.SGD(model.values(), 0.1, momentum=0.9)
        if optimizer == "adam":
            rule = torch.optim.Adam(model.values(), 0.1)
        course = torch.optim.lr_scheduler.CosineAnnealingLR(rule, 6)
        for _ in range(6):
            rule.zero_grad()
            TASK.loss(model, Batch(sample.x, sample.y)).backward()
            rule.step()
            course.step()
        assert_close(found[client], {name: leaf.detach() for name, leaf in model.items()}, 1e-5)


def test_a_constant_rate_is_one_piece_and_the_same_bits() -> None:
    assert_equal(trained(clients(), schedule=Step(every=100)), trained(clients()))


def test_the_schedule_is_one_of_steps_whatever_the_epochs() -> None:
    seen: list[Tree] = []

    async def each(tree: Tree) -> None:
        seen.append(tree)

    found = trained(clients((8,)), schedule=Linear(), each_epoch=each)
    assert_equal(found, trained(clients((8,)), schedule=Linear()))
    assert len(seen) == 2
    assert_equal(seen[1], found[0])


def server(train: TrainConfig = TRAIN, public: Tensor | None = None) -> Server:
    context = RoundContext(1, 3, 4, train, RandomStreams(0))
    return Server(TASK, context, CPU, None if public is None else lambda: public)


def outcome(procedure: Any, mode: str = "looped") -> Any:
    engine = Engine(TASK, CPU, EngineConfig(mode=mode, width=4))  # type: ignore[arg-type]
    return run_procedures({-1: procedure}, engine)[-1]


def test_without_samples_the_objective_reads_draws_and_what_is_frozen() -> None:
    def objective(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        assert batch.y.shape == (0,)
        return (model["value"] * draw["slope"] * frozen["scale"]).sum()

    def draw(generator: np.random.Generator, steps: int) -> Tree:
        return {"slope": generator.random(steps)}

    start = {"value": torch.zeros(2, dtype=torch.float64)}
    settings = TrainConfig(lr=0.5)
    procedure = server().train(
        start, objective, frozen={"scale": torch.tensor(2.0)}, draw=draw, steps=3, settings=settings
    )
    drawn = RandomStreams(0).generator("mix", 1, -1).random(3)
    assert_close(outcome(procedure), {"value": torch.full((2,), -drawn.sum(), dtype=torch.float64)}, 1e-12)


def test_the_servers_steps_are_the_same_in_all_modes() -> None:
    looped, stacked = (
        outcome(server().train(TASK.network.initialize(0), towards, examples=shared_samples(9)), mode)
        for mode in ("looped", "vectorized")
    )
    assert_equal(looped, stacked)


def test_the_optimizer_of_an_earlier_pass_goes_on() -> None:
    def objective(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        return model["value"].sum()

    async def work(own: Server, start: Tree, memory: Tree, steps: int) -> Tree:
        own.state["optimizer"] = memory
        settings = TrainConfig(optimizer="adam", lr=0.1)
        found = await own.train(start, objective, steps=steps, settings=settings, keep_optimizer=True)
        return {"tree": found, "memory": own.state["optimizer"]}

    start = {"value": torch.zeros(2)}
    once = outcome(work(server(), start, {}, 5))
    first = outcome(work(server(), start, {}, 2))
    assert_equal(outcome(work(server(), first["tree"], first["memory"], 3)), once)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda own: own.train({"value": torch.zeros(1)}, towards), "needs examples=Examples"),
        (lambda own: own.score(Predictor.of({}), "test"), "no test samples"),
        (lambda own: own.outputs(lambda x, task: x), "no train samples: there are the public ones"),
    ],
)
def test_what_the_server_has_not_is_refused(use: Any, message: str) -> None:
    found = outcome(use(server()))
    assert isinstance(found, MethodError)
    assert message in str(found)


def test_the_server_publishes_nothing() -> None:
    with pytest.raises(MethodError, match="publishes no predictors"):
        server().publish(model=Predictor.of({}))


def test_a_pass_without_samples_is_one_epoch() -> None:
    seen: list[Tree] = []

    async def look(tree: Tree) -> None:
        seen.append(tree)

    def shrinking(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        return model["value"].square().sum()

    found = outcome(server().train({"value": torch.ones(2)}, shrinking, steps=4, each_epoch=look))
    assert_equal(found, *seen)


def test_the_server_alone_has_the_labels_of_public_samples() -> None:
    samples = shared_samples(5)
    context = server().context
    own = Server(TASK, context, CPU, lambda: samples.x, lambda: samples)
    assert own.labelled_public() is samples and own.public() is samples.x
    assert not hasattr(Client, "labelled_public")
    with pytest.raises(RuntimeError, match="no public samples here"):
        server().labelled_public()
