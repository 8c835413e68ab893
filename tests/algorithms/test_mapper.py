"""MAPPER: invariants MAP, its rows of the equivalence matrix, selection, both spaces and learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from algorithms.fedavg import FedAvg
from algorithms.local import Local
from algorithms.mapper import Mapper
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, interpolate, map_leaves
from rayfl.randomness import RandomStreams
from rayfl.tasks.base import Batch
from tests.support.planted import accuracies, related_clients
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
COHORTS = ([0, 2], [1, 2, 3], [0, 1])
GRID = (0.0, 0.3, 0.6, 0.9)
TRAIN = TrainConfig(
    rounds=3, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
SPACES = pytest.mark.parametrize("space", ["weights", "outputs"])


@dataclass(frozen=True)
class LocalFits(RandomStreams):
    """The streams of the fits of h_l for lambda = 1 in place of those of a round's first pass."""

    def _digest(self, name: str, round: int, client: int) -> bytes:
        return super()._digest(f"{name}.lambda=1.0" if name in ("batches", "dropout") else name, round, client)


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def loss_of(toy: Toy, central: Tree, local: Tree, coefficient: float, client: int, split: str = "train") -> float:
    """Loss of the interpolation of weights on a client's samples."""
    part = toy.dataset.load(client)[split]
    logits = toy.task.network.logits(interpolate(central, local, coefficient), part.x)
    return float(toy.task.cross_entropy(logits, Batch(part.x, part.y)))


def fits(client: int, dataset: ListDataset | None = None, grid: tuple[float, ...] = GRID) -> dict[float, Tree]:
    """h_l of every lambda in round 0, each from a run with that lambda alone."""
    found = {}
    for coefficient in grid:
        toy = Toy(Mapper(grid=(coefficient,)), dataset or random_clients(SIZES), two_layers(), TRAIN)
        toy.step([client])
        found[coefficient] = toy.states()[client]["local"]
    return found


def test_fits_of_local_models_begin_without_momentum() -> None:
    kept, empty = (
        toy_of(Mapper(grid=(0.5,)), TRAIN.model_copy(update={"persist_optimizer": persists}))
        for persists in (True, False)
    )
    for toy in (kept, empty):
        first = copy(toy.server)
        toy.step([0])
        toy.server = first
        toy.step([0])
    assert_equal(kept.states()[0]["local"], empty.states()[0]["local"])
    assert not torch.equal(kept.server["model"]["head.weight"], empty.server["model"]["head.weight"])


def test_after_training_the_interpolation_is_with_the_trained_central_model() -> None:
    toy = toy_of(Mapper(grid=(0.3,)))
    toy.step([2])
    trained = toy.federation.trained_scores[2]["test"]["personalized"].vector
    # the central model of the only client of the round is the server's from now on
    assert trained.tolist() == toy.scores()[2]["personalized"].vector.tolist()


@MODES
def test_inv_map_1_lambda_0_is_fedavg(mode: str) -> None:
    mapper, averaging = (toy_of(algorithm, mode=mode) for algorithm in (Mapper(grid=(0,)), FedAvg()))
    for cohort in COHORTS:
        assert_equal(mapper.step(cohort), averaging.step(cohort))
    expected = averaging.scores()
    for client, rows in mapper.scores().items():
        for row in ("global", "personalized"):
            assert rows[row].vector.tolist() == expected[client]["global"].vector.tolist()


def test_inv_map_1_holds_with_running_statistics_and_dropout() -> None:
    mapper, averaging = (toy_of(a, task=normalized_layers(0.3)) for a in (Mapper(grid=(0,)), FedAvg()))
    for cohort in COHORTS:
        assert_equal(mapper.step(cohort), averaging.step(cohort))


@MODES
def test_inv_map_2_lambda_1_is_local_training(mode: str) -> None:
    mapper = toy_of(Mapper(grid=(1,), unseen="global"), mode=mode)
    alone = toy_of(Local(), mode=mode, streams=LocalFits(0))
    start = copy(mapper.server["model"])
    for cohort in COHORTS:
        assert_equal(mapper.step(cohort)["model"], start)
        alone.step(cohort)
        for client, state in alone.states().items():
            assert_equal(mapper.states()[client]["local"], state["local"])
    expected = alone.scores()
    for client, rows in mapper.scores().items():
        assert rows["personalized"].vector.tolist() == expected[client]["personalized"].vector.tolist()


@pytest.mark.parametrize("client", range(len(SIZES)))
def test_inv_map_3_the_chosen_lambda_has_the_smallest_loss(client: int) -> None:
    whole = toy_of(Mapper(grid=GRID))
    central = copy(whole.server["model"])
    whole.step([client])
    state, single = whole.states()[client], fits(client)
    losses = {c: loss_of(whole, central, local, c, client) for c, local in single.items()}
    chosen = min(losses, key=lambda c: losses[c])
    assert state["coefficient"] == chosen
    assert_equal(state["local"], single[chosen])
    # a part of the grid has the same fits, and never a smaller loss
    for grid in ((0.3,), (0.0, 0.3), (0.9, 0.3)):
        part = toy_of(Mapper(grid=grid))
        part.step([client])
        found = part.states()[client]
        assert_equal(found["local"], single[found["coefficient"]])
        assert losses[found["coefficient"]] == min(losses[c] for c in grid) >= losses[chosen]


@pytest.mark.parametrize("coefficient", [0.0, 0.3, 1.0])
def test_inv_map_4_chain_factors(coefficient: float) -> None:
    task, algorithm = two_layers(), Mapper()
    part = random_clients((7,), seed=4).load(0)["train"]
    batch = Batch(part.x, part.y)
    ends = {"central": task.network.initialize(1), "local": task.network.initialize(2)}

    def gradient(end: str) -> Tree:
        moving = {name: leaf.clone().requires_grad_() for name, leaf in ends[end].items()}
        other = {name: model for name, model in ends.items() if name != end}
        frozen = {**other, "coefficient": torch.tensor(coefficient, dtype=torch.float64)}
        loss = algorithm.objective_of(end)({end: moving}, batch, task, frozen, None)
        return dict(zip(moving, torch.autograd.grad(loss, list(moving.values())), strict=True))

    mixed = {n: leaf.requires_grad_() for n, leaf in interpolate(ends["central"], ends["local"], coefficient).items()}
    g = dict(zip(mixed, torch.autograd.grad(task.loss(mixed, batch), list(mixed.values())), strict=True))
    central, local = gradient("central"), gradient("local")
    assert_close(local, map_leaves(lambda leaf: coefficient * leaf, g), 1e-14)
    assert_close(central, map_leaves(lambda leaf: (1 - coefficient) * leaf, g), 1e-14)
    assert_close(map_leaves(torch.add, central, local), g, 1e-14)


def test_mapper_trains_the_central_model_inside_the_interpolation() -> None:
    train = TrainConfig(rounds=1, clients_per_round=1, local_epochs=1, batch_size=None, lr=0.1)
    toy = toy_of(Mapper(grid=(0.6,)), train)
    start = copy(toy.server["model"])
    part = toy.dataset.load(1)["train"]

    def step(end: Tree, other: Tree, share: float) -> Tree:
        point = {name: leaf.clone().requires_grad_() for name, leaf in end.items()}
        loss = toy.task.loss(interpolate(other, point, share), Batch(part.x, part.y))
        parts = torch.autograd.grad(loss, list(point.values()))
        return {name: end[name] - 0.1 * g for name, g in zip(end, parts, strict=True)}

    local = step(start, start, 0.6)
    central = step(start, local, 0.4)
    assert_close(toy.step([1])["model"], central, 1e-12)
    assert_close(toy.states()[1]["local"], local, 1e-12)


def test_selection_on_validation_samples() -> None:
    part = random_clients((8,)).load(0)["train"]
    dataset = ListDataset([(part.x, part.y)], validation=[(part.x, (part.y + 1) % 3)])
    toy = Toy(Mapper(grid=GRID, select_on="validation"), dataset, two_layers(), TRAIN)
    central = copy(toy.server["model"])
    toy.step([0])
    single = fits(0, dataset)
    losses = {c: loss_of(toy, central, local, c, 0, "validation") for c, local in single.items()}
    assert toy.states()[0]["coefficient"] == min(losses, key=lambda c: losses[c])
    training = {c: loss_of(toy, central, local, c, 0) for c, local in single.items()}
    assert toy.states()[0]["coefficient"] != min(training, key=lambda c: training[c])
    # without any, training samples decide
    plain, fallback = (toy_of(Mapper(grid=GRID, select_on=split)) for split in ("train", "validation"))  # type: ignore[arg-type]
    assert_equal(fallback.step([0, 1]), plain.step([0, 1]))
    assert_equal(fallback.states(), plain.states())


def test_warm_start() -> None:
    own, received = (toy_of(Mapper(grid=(1,), warm_start=start)) for start in ("own", "received"))  # type: ignore[arg-type]
    for toy in (own, received):
        toy.step([0])
    assert_equal(own.states(), received.states())
    for toy in (own, received):
        toy.step([0])
    # h_c rests: each fit from it is one of local training from the initial model
    alone = toy_of(FedAvg(), streams=LocalFits(0))
    alone.round = 1
    assert_equal(received.states()[0]["local"], alone.step([0])["model"])
    assert not torch.equal(own.states()[0]["local"]["head.weight"], received.states()[0]["local"]["head.weight"])


def test_clients_never_sampled_fit_for_the_evaluation_or_have_the_central_model() -> None:
    fitting, plain = (toy_of(Mapper(grid=GRID, unseen=unseen)) for unseen in ("local", "global"))  # type: ignore[arg-type]
    for toy in (fitting, plain):
        toy.step([0])
        assert set(toy.states()) == {0}
    central = fitting.server["model"]
    rows, others = fitting.scores(), plain.scores()
    assert set(fitting.states()) == {0}
    # what the client would have fitted to the same h_c, had it been sampled in this round
    trial = toy_of(Mapper(grid=GRID))
    trial.server = {"model": copy(central)}
    trial.step([1])
    state = trial.states()[1]
    loss = loss_of(trial, central, state["local"], state["coefficient"], 1)
    assert abs(rows[1]["personalized"].loss - loss) < 1e-10
    assert rows[1]["personalized"].loss < rows[1]["global"].loss
    assert others[1]["personalized"].vector.tolist() == others[1]["global"].vector.tolist()
    assert rows[0]["personalized"].vector.tolist() == others[0]["personalized"].vector.tolist()


@MODES
def test_outputs_of_lambda_0_are_fedavg_and_of_lambda_1_local_training(mode: str) -> None:
    mapper, averaging = (toy_of(a, mode=mode) for a in (Mapper(grid=(0,), space="outputs"), FedAvg()))
    outputs, weights = (toy_of(Mapper(grid=(1,), space=space), mode=mode) for space in ("outputs", "weights"))  # type: ignore[arg-type]
    for cohort in COHORTS:
        assert_close(mapper.step(cohort), averaging.step(cohort))
        assert_equal(outputs.step(cohort), weights.step(cohort))
        assert_close(outputs.states(), weights.states())


def test_outputs_mix_probabilities() -> None:
    toy = toy_of(Mapper(grid=(0.3,), space="outputs"))
    toy.step([0, 1])
    part, network = toy.dataset.load(0)["test"], toy.task.network
    central, local = (network.logits(m, part.x).softmax(-1) for m in (toy.server["model"], toy.states()[0]["local"]))
    mixed = (0.7 * central + 0.3 * local)[torch.arange(len(part.y)), part.y]
    assert abs(toy.scores()[0]["personalized"].loss + float(mixed.log().mean())) < 1e-10


@SPACES
def test_vectorized_agrees_with_looped_and_others_keep_their_states(space: Any) -> None:
    looped, stacked = (toy_of(Mapper(grid=GRID, space=space), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        before = looped.states()
        assert_close(looped.step(cohort), stacked.step(cohort))
        assert_close(looped.states(), stacked.states())
        for client in set(before) - set(cohort):
            assert_equal(looped.states()[client], before[client])


@SPACES
def test_frozen_models_keep_their_running_statistics(space: Any) -> None:
    toy = toy_of(Mapper(grid=(0.5,), space=space), task=normalized_layers())
    start = copy(toy.server["model"])
    toy.step([0])
    first = copy(toy.states()[0]["local"])
    for name in toy.task.network.buffer_names:
        assert not torch.equal(first[name], start[name])
        assert not torch.equal(toy.server["model"][name], start[name])
    received = copy(toy.server)
    toy.step([1])
    assert_equal(toy.states()[0]["local"], first)
    assert not torch.equal(toy.server["model"]["norm.running_mean"], received["model"]["norm.running_mean"])


@pytest.mark.parametrize("grid", [(), (-0.1,), (0.5, 1.1)])
def test_a_grid_outside_the_unit_interval_or_without_points_is_refused(grid: Any) -> None:
    with pytest.raises(ValidationError):
        Mapper(grid=grid)


@pytest.mark.slow
def test_interpolations_beat_the_global_and_the_local_models() -> None:
    clients = related_clients(own=0.8)
    found = accuracies(Mapper(select_on="validation"), clients)
    assert found["personalized"] > found["global"] + 0.02
    assert found["personalized"] > accuracies(Local(), clients)["personalized"] + 0.02
