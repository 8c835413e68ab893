"""FedMRL: an oracle in plain PyTorch with unlike models, invariants MRL, rows, messages, newcomers, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fedavg import FedAvg
from algorithms.fedmrl import FedMRL
from algorithms.local import Local
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.params import Tree, copy
from rayfl.tasks.classification import Classification
from rayfl.tasks.further_tasks import Regression
from tests.support.both_modes import assert_modes_agree
from tests.support.partial_toys import held_out_accuracy, partly_fixed, planted_clients
from tests.support.toy_networks import DoubleNetwork, TwoLayers, normalized_layers, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 1, 10, 6)
TRAIN = TrainConfig(
    rounds=4, clients_per_round=3, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.8
)
COHORTS = ([0], [1, 2, 4], [0, 1, 2, 3, 4], [2, 3])


def unlike(*hidden: int, inputs: int = 5) -> Classification:
    """Two layers of the given widths, the small model's first."""
    candidates = [Classification(DoubleNetwork(lambda h=h: TwoLayers(inputs, h, 3))) for h in hidden]  # type: ignore[misc]
    return Classification(candidates[0].network, candidates)


def toy_of(algorithm: Any, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or unlike(4, 7, 9), **{"train": TRAIN, **options})


def module_of(tree: Tree) -> TwoLayers:
    """A module of PyTorch with these tensors."""
    hidden, inputs = tree["inner.weight"].shape
    module = TwoLayers(inputs, hidden, 3).double()
    module.load_state_dict(dict(tree))
    return module


def own_of(toy: Toy, client: int) -> tuple[TwoLayers, nn.Linear]:
    """A client's initial model and projection, by the widths of its architecture."""
    streams = toy.context.streams
    others = toy.task.candidates[1:] or toy.task.candidates
    number = streams.integer("init.architecture", client=client) % len(others)
    model = module_of(others[number].network.initialize(streams.integer("init.global")))
    narrow, wide = toy.task.network.head_shape[1], model.head.in_features
    projection = nn.Linear(narrow + wide, wide).double()
    generator, bound = streams.generator("init.projection"), (narrow + wide) ** -0.5
    with torch.no_grad():
        projection.weight.copy_(torch.from_numpy(generator.uniform(-bound, bound, (wide, narrow + wide))))
        projection.bias.copy_(torch.from_numpy(generator.uniform(-bound, bound, wide)))
    return model, projection


def outputs(small: TwoLayers, own: TwoLayers, projection: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the shared and of the own last layer."""
    fused = projection(torch.cat([small.features(x), own.features(x)], 1))
    return small.head(fused[:, : small.head.in_features]), own.head(fused)


@pytest.mark.parametrize("hidden", [(4, 7, 9), (4, 6), (5,)], ids=["three", "two", "one"])
def test_inv_mrl_1_rounds_are_those_of_an_oracle_in_plain_pytorch(hidden: tuple[int, ...]) -> None:
    toy = toy_of(FedMRL(coarse_weight=0.7, fine_weight=1.3), unlike(*hidden))
    streams = toy.context.streams
    w = toy.task.network.initialize(streams.integer("init.global"))
    kept = {client: own_of(toy, client) for client in range(len(SIZES))}
    assert len({own.head.in_features for own, _ in kept.values()}) == max(1, len(hidden) - 1)
    trained_once: set[int] = set()
    for round, cohort in enumerate(COHORTS):
        mean = {name: torch.zeros_like(leaf) for name, leaf in w.items()}
        for client in cohort:
            part, small, (own, projection) = toy.dataset.load(client)["train"], module_of(w), kept[client]
            parameters = [*small.parameters(), *own.parameters(), *projection.parameters()]
            optimizer = torch.optim.SGD(parameters, lr=0.1 * 0.8**round, momentum=0.5, weight_decay=0.01)
            steps = 2 * -(-SIZES[client] // 4)
            for index in plan_batches(SIZES[client], 4, steps, streams.generator("batches", round, client)).batches(
                CPU
            ):
                optimizer.zero_grad()
                coarse, fine = outputs(small, own, projection, part.x[index])
                y = part.y[index]
                (0.7 * F.cross_entropy(coarse, y) + 1.3 * F.cross_entropy(fine, y)).backward()
                optimizer.step()
            for name, leaf in small.state_dict().items():
                mean[name] += SIZES[client] / sum(SIZES[i] for i in cohort) * leaf
        w = mean
        trained_once.update(cohort)
        toy.step(cohort)
        assert_close(toy.server, {"model": w}, 1e-12)
        for client in trained_once:
            own, projection = kept[client]
            state = toy.states()[client]
            assert_close(state["own"], dict(own.state_dict()), 1e-12)
            names = {"matrix": projection.weight.detach(), "offset": projection.bias.detach()}
            assert_close(state["projection"], names, 1e-12)
    for client, rows in toy.scores().items():
        part = toy.dataset.load(client)["test"]
        coarse, fine = outputs(module_of(w), *kept[client], part.x)
        assert set(rows) == {"personalized", "coarse"}
        assert abs(rows["personalized"].loss - float(F.cross_entropy(fine, part.y).detach())) < 1e-12
        assert abs(rows["coarse"].loss - float(F.cross_entropy(coarse, part.y).detach())) < 1e-12


def test_inv_mrl_2_right_after_training_the_row_has_the_clients_own_small_model() -> None:
    toy = toy_of(FedMRL())
    toy.step([3])
    # the mean of one is that one
    assert toy.federation.trained_scores[3]["test"]["local"].loss == toy.scores()[3]["personalized"].loss


def test_inv_mrl_3_the_weights_are_relative_at_a_scaled_rate() -> None:
    """Twice the weights at half the rate take the same steps, where nothing else has the rate."""
    plain = TRAIN.model_copy(update={"weight_decay": 0.0})
    once = toy_of(FedMRL(coarse_weight=0.3, fine_weight=0.8), train=plain)
    twice = toy_of(FedMRL(coarse_weight=0.6, fine_weight=1.6), train=plain.model_copy(update={"lr": 0.05}))
    for cohort in COHORTS:
        assert_close(once.step(cohort), twice.step(cohort), 1e-12)
    assert_close(once.states(), twice.states(), 1e-12)


def test_inv_mrl_4_without_the_coarse_loss_the_shared_last_layer_stays() -> None:
    toy = toy_of(FedMRL(coarse_weight=0), train=TRAIN.model_copy(update={"weight_decay": 0.0}))
    before = copy(toy.server["model"])
    toy.step([0, 1, 3])
    after = toy.server["model"]
    for name in ("head.weight", "head.bias"):
        assert_close(after[name], before[name], 1e-15)
    assert not torch.equal(after["inner.weight"], before["inner.weight"])


def test_inv_mrl_5_a_round_without_steps_changes_nothing() -> None:
    toy = toy_of(FedMRL(), train=TRAIN.model_copy(update={"local_epochs": 0}))
    before = copy(toy.server)
    for cohort in COHORTS:
        assert_close(toy.step(cohort), before, 1e-15)
    for client, state in toy.states().items():
        own, _ = own_of(toy, client)
        assert_equal(state["own"], dict(own.state_dict()))


def test_inv_mrl_6_the_small_model_alone_travels() -> None:
    toy = toy_of(FedMRL())
    size = 8 * toy.task.network.num_parameters
    for cohort in COHORTS[:3]:
        toy.step(cohort)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (size, size))
    assert all(set(state) == {"own", "projection"} for state in toy.states().values() if state)


def test_a_newcomer_does_what_a_client_of_a_cohort_does() -> None:
    toy, other = toy_of(FedMRL(), unseen=1), toy_of(FedMRL())
    for one in (toy, other):
        one.step([0, 2])
    found = toy.scores(newcomers=True)[4]
    other.server = copy(toy.server)
    other.round = 0  # the streams of the round after which it joins
    assert not other.states().get(4)
    other.step([4])
    other.server = copy(toy.server)
    assert found["personalized"].loss == pytest.approx(other.scores()[4]["personalized"].loss, abs=1e-12)


@pytest.mark.parametrize("double", [True, False])
def test_vectorized_agrees_with_looped(double: bool) -> None:
    assert_modes_agree(FedMRL(), (9, 12, 4, 10), TRAIN, double, 1e-10 if double else 1e-5)


def test_vectorized_agrees_with_looped_for_unlike_models_with_buffers(caplog: pytest.LogCaptureFixture) -> None:
    candidates = [two_layers(hidden=6), normalized_layers(0.3), two_layers(hidden=8)]
    task = Classification(candidates[0].network, candidates)
    looped, stacked = (toy_of(FedMRL(), task, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in ([0, 1, 3], [0, 1, 3, 4]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-10)
    assert_close(looped.states(), stacked.states(), 1e-10)
    assert "failed together" not in caplog.text


def test_it_learns_what_is_no_class() -> None:
    spec = InputSpec("image", (5,), 1, target="values")
    networks = [DoubleNetwork(lambda h=h: TwoLayers(5, h, 1)) for h in (4, 7)]  # type: ignore[misc]
    task = Regression(networks[0], [Regression(network, (), spec) for network in networks], spec)
    inputs = [random_clients(SIZES).load(client)["train"].x for client in range(len(SIZES))]
    clients = ListDataset([(x, x[:, :1] - 2 * x[:, 1:2]) for x in inputs])
    clients.spec = spec
    FedMRL().check_task(task)
    toy = Toy(FedMRL(), clients, task, TRAIN.model_copy(update={"rounds": 20}))
    before = {client: rows["personalized"].loss for client, rows in toy.scores().items()}
    toy.run()
    after = {client: rows["personalized"].loss for client, rows in toy.scores().items()}
    assert all(after[client] < 0.5 * before[client] for client in (0, 1, 3, 4)), (before, after)


def test_what_is_undefined_is_refused() -> None:
    context = toy_of(FedMRL()).context
    FedMRL().check(unlike(4, 4, 9), context)
    with pytest.raises(ConfigError, match=r"FedMRL's small model, .* has 7 features, but the others have \[9, 5\]"):
        FedMRL().check(unlike(7, 9, 5), context)
    with pytest.raises(ConfigError, match=r"FedMRL needs the last layer's weight"):
        FedMRL().check(partly_fixed("head.weight"), context)
    for options in ({"fine_weight": 0}, {"coarse_weight": -1}):
        with pytest.raises(ValueError, match="weight"):
            FedMRL(**options)  # type: ignore[arg-type]


def test_remarks() -> None:
    assert not FedMRL().remarks(toy_of(FedMRL()).context)
    (said,) = FedMRL().remarks(toy_of(FedMRL(), train=TRAIN.model_copy(update={"max_grad_norm": 5.0})).context)
    assert "train.max_grad_norm" in said


@pytest.mark.slow
def test_learning() -> None:
    """The rule of the labels is the client's own; what the inputs are projected to is common."""
    train = TRAIN.model_copy(
        update={"rounds": 30, "clients_per_round": 6, "local_epochs": 3, "batch_size": 10, "lr_decay": 1.0}
    )
    accuracy = {}
    for algorithm, row in ((FedMRL(), "personalized"), (FedAvg(), "global"), (Local(), "personalized")):
        task = unlike(6, 8, 10, inputs=12) if algorithm.name == "fedmrl" else two_layers(12, 8)
        toy = Toy(algorithm, planted_clients("head"), task, train, mode="vectorized")
        toy.run()
        accuracy[algorithm.name] = held_out_accuracy(toy, row)
    assert accuracy["fedmrl"] > accuracy["local"], accuracy
    assert accuracy["local"] > accuracy["fedavg"] + 0.1, accuracy
