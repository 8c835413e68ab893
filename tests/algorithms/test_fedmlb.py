"""FedMLB: an oracle in plain PyTorch, its special cases, where networks are cut, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedmlb import FedMLB
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.models.zoo import ResNet9, ResNet18
from rayfl.params import Tree, copy, num_bytes
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.cut_out import COHORTS, SIZES, TRAIN
from tests.support.toy_networks import DoubleNetwork, four_layers, normalized_layers, recurrent_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def deep(method: FedMLB | FedAvg, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    """Three hidden layers, so that there are three places to cut."""
    return Toy(method, random_clients(SIZES), four_layers(), train, **options)


def layer(tree: Any, number: int, x: Tensor) -> Tensor:
    """Layer 0, 1, 2 (with ReLU) or 3 (the classifier), with functions of PyTorch alone."""
    name = "head" if number == 3 else f"hidden.{number}"
    found = F.linear(x, tree[f"{name}.weight"], tree[f"{name}.bias"])
    return found if number == 3 else F.relu(found)


def branch(local: Any, received: Any, cut: int, x: Tensor) -> Tensor:
    """The logits of a network whose first layers are local, and the others received."""
    for number in range(4):
        x = layer(local if number < cut else received, number, x)
    return x


def expected(toy: Toy, server: Tree, cohort: list[int], round: int, method: FedMLB, cuts: tuple[int, ...]) -> Tree:
    """One round with loops and ``torch.optim``."""
    own: dict[int, Tree] = {}
    for k in cohort:
        data = toy.dataset.load(k)["train"]
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in server.items()}
        optimizer = torch.optim.SGD(leaves.values(), 0.1 * 0.9**round, momentum=0.5, weight_decay=0.01)
        plan = plan_batches(SIZES[k], 4, 2 * -(-SIZES[k] // 4), toy.context.streams.generator("batches", round, k))
        for index in plan.batches(CPU):
            x, y, heat = data.x[index], data.y[index], method.temperature
            logits = branch(leaves, server, 4, x)
            value = F.cross_entropy(logits, y)
            for cut in cuts:
                hybrid = branch(leaves, server, cut, x)
                value = value + method.branch_weight / len(cuts) * F.cross_entropy(hybrid, y)
                p, q = (hybrid / heat).softmax(1), (logits / heat).softmax(1)
                value = value + method.distillation_weight / len(cuts) * (p * (p / q).log()).sum(1).mean()
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        own[k] = {name: leaf.detach() for name, leaf in leaves.items()}
    total = sum(SIZES[k] for k in cohort)
    return {name: sum((SIZES[k] / total * own[k][name] for k in cohort), torch.tensor(0.0)) for name in server}


@pytest.mark.parametrize(
    ("options", "cuts"),
    [
        ({}, (1, 2, 3)),
        ({"cuts": (2,), "branch_weight": 0, "temperature": 3.0, "distillation_weight": 0.7}, (2,)),
        ({"cuts": (1, 3), "distillation_weight": 0, "branch_weight": 0.4}, (1, 3)),
        ({"temperature": 0.5, "branch_weight": 0.3}, (1, 2, 3)),
    ],
    ids=["paper", "divergence", "labels", "temperature"],
)
@MODES
def test_inv_fedmlb_1_rounds_are_those_of_an_oracle_in_plain_pytorch(
    options: dict[str, Any], cuts: tuple[int, ...], mode: str
) -> None:
    method = FedMLB(**options)
    toy = deep(method, mode=mode)
    model = copy(toy.server["model"])
    for round, cohort in enumerate(COHORTS):
        model = expected(toy, model, cohort, round, method, cuts)
        assert_close(toy.step(cohort)["model"], model, 1e-12)


@MODES
def test_inv_fedmlb_2_without_branches_it_is_federated_averaging(mode: str) -> None:
    ours, plain = (deep(one, mode=mode) for one in (FedMLB(branch_weight=0, distillation_weight=0), FedAvg()))
    for cohort in COHORTS:
        assert_close(ours.step(cohort), plain.step(cohort), 1e-14)


@MODES
def test_inv_fedmlb_3_a_single_step_of_the_divergence_alone_is_federated_averaging(mode: str) -> None:
    """Where the local network is the received one all branches agree with it."""
    train = TRAIN.model_copy(update={"local_epochs": 1, "batch_size": None})
    ours, plain = (deep(one, train, mode=mode) for one in (FedMLB(branch_weight=0, distillation_weight=50), FedAvg()))
    for cohort in COHORTS:
        assert_close(ours.step(cohort)["model"], plain.step(cohort)["model"], 1e-12)


def test_inv_fedmlb_4_a_branch_moves_no_later_layer_and_nothing_of_the_received_network() -> None:
    task, part = four_layers(), random_clients((6,)).load(0)["train"]
    batch, gradients = Batch(part.x, part.y), []
    for weight in (0.0, 1.0):
        local = {name: leaf.requires_grad_() for name, leaf in task.network.initialize(0).items()}
        received = {name: leaf.requires_grad_() for name, leaf in task.network.initialize(1).items()}
        method = FedMLB(branch_weight=weight, distillation_weight=0, cuts=(2,))
        value = method.objective(local, batch, task, {"received": received}, None)
        every = torch.autograd.grad(value, [*local.values(), *received.values()], allow_unused=True)
        gradients.append(dict(zip(local, every[: len(local)], strict=True)))
        moved = {name: g for name, g in zip(received, every[len(local) :], strict=True) if g is not None}
        if weight:
            # nothing trains them, and what is left of the graph reaches only what follows the cut
            assert set(moved) == {f"{one}.{kind}" for one in ("hidden.2", "head") for kind in ("weight", "bias")}
    for name, plain in gradients[0].items():
        assert plain is not None
        assert torch.equal(plain, gradients[1][name]) == name.startswith(("hidden.2", "head")), name


def test_inv_fedmlb_5_nothing_more_travels_than_the_model() -> None:
    toy = deep(FedMLB())
    size = num_bytes(toy.server["model"])
    toy.step([0, 2])
    assert toy.federation.traffic.by_client == {0: (size, size), 2: (size, size)}
    assert set(toy.server) == {"model"} and not any(toy.states().values())


def test_branches_end_in_the_received_network_in_evaluation_mode() -> None:
    """Batch normalization: the local part by its batch, which it records, the rest by what was received."""
    task, part = normalized_layers(), random_clients((6,)).load(0)["train"]
    local, received = task.network.initialize(0), task.network.initialize(1)
    before, own, batch = copy(received), copy(local), Batch(part.x, part.y)
    method = FedMLB(distillation_weight=0)
    assert method.places(task) == tuple(range(len(task.network.depths.stages)))
    value = method.objective(own, batch, task, {"received": received}, None)
    assert_equal(received, before)
    plain = copy(local)
    logits = task.logits(plain, batch)
    assert_equal(own, plain)  # running statistics are recorded once
    assert float(value) > float(task.loss_of(logits, batch))


@MODES
def test_padding_contributes_nothing(mode: str) -> None:
    task, part = four_layers(), random_clients((6,)).load(0)["train"]
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0], dtype=torch.float64)
    model, received = task.network.initialize(0), {"received": task.network.initialize(1)}
    padded = FedMLB().objective(model, Batch(part.x, part.y, mask), task, received, None)
    short = FedMLB().objective(model, Batch(part.x[:4], part.y[:4]), task, received, None)
    assert_close(padded, short, 1e-12)


def test_a_residual_network_is_cut_where_the_authors_cut_theirs() -> None:
    """ResNet-18: after the first convolution, and after each of its four groups of two blocks."""
    network = ResNet18(norm="group").network(InputSpec("image", (3, 32, 32), 10))
    method, task = FedMLB(), Classification(network)
    stages = [network.depths.stages[place] for place in method.places(task)]
    assert [stage.width for stage in stages] == [64, 64, 128, 256, 512]
    assert [any(f"layer{i}.1." in name for name in stage.names) for i, stage in enumerate(stages)] == [False] + [
        True
    ] * 4


def test_the_rest_of_a_network_is_the_network() -> None:
    """With the local network in place of the received one each branch gives its logits."""
    spec = InputSpec("image", (3, 16, 16), 3)
    network = DoubleNetwork(lambda: ResNet9(norm="group").build(spec))
    task, x = Classification(network, spec=spec), torch.randn(3, 3, 16, 16, dtype=torch.float64)
    tree = network.initialize(0)
    batch, method = Batch(x, torch.arange(3)), FedMLB()
    value = method.objective(tree, batch, task, {"received": tree}, None)
    assert_close(value, 2 * task.loss(tree, batch), 1e-12)
    assert len(method.places(task)) == 5


@pytest.mark.parametrize(
    ("method", "task", "message"),
    [
        (FedMLB(cuts=(2, 4)), None, "this model has 3 stages"),
        (FedMLB(), recurrent_layers(), "can be cut by depth"),
    ],
)
def test_what_cannot_be_is_refused(method: FedMLB, task: Any, message: str) -> None:
    toy = deep(FedMLB())
    with pytest.raises(ConfigError, match=message):
        method.check(task or toy.task, toy.context)


def test_cuts_ascend() -> None:
    for cuts in ((2, 1), (1, 1), (0,), ()):
        with pytest.raises(ValueError, match="cuts"):
            FedMLB(cuts=cuts)


def test_two_layers_have_one_branch() -> None:
    task = two_layers()
    assert FedMLB().places(task) == (0,)
    FedMLB().check(task, deep(FedMLB()).context)
