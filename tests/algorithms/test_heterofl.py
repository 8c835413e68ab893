"""HeteroFL: an oracle of cut-out networks, federated averaging, narrow networks, elements that nobody has, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.heterofl import HeteroFL
from algorithms.parts.widths import cut, window
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.models.zoo import ResNet9, TwoCNN
from rayfl.params import Tree, copy, num_bytes
from rayfl.tasks.classification import Classification
from tests.support.both_modes import assert_modes_agree
from tests.support.cut_out import COHORTS, SIZES, TRAIN, cut_out, expected_round, logits_of, toy_of
from tests.support.toy_networks import normalized_layers, recurrent_layers, softmax_regression, two_layers
from tests.support.toys import ListDataset, Toy, assert_close, assert_equal, random_clients

WIDTHS = (0.5, 1.0, 0.25)
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])


def held(width: float) -> list[int]:
    """ceil(7 r) units."""
    return {1.0: [*range(7)], 0.5: [*range(4)], 0.25: [0, 1], 0.125: [0], 0.0625: [0]}[width]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_inv_heterofl_1_rounds_are_those_of_an_oracle_of_cut_out_networks(
    weights: Any, scaler: bool, masked: bool
) -> None:
    toy = toy_of(HeteroFL(widths=WIDTHS, aggregation=weights, scaler=scaler, masked_loss=masked))
    model = copy(toy.server["model"])

    def classes(client: int) -> list[int]:
        return sorted(set(toy.dataset.load(client)["train"].y.tolist())) if masked else [0, 1, 2]

    def loss(small: Tree, x: Tensor, y: Tensor, client: int, step: int) -> Tensor:
        logits = logits_of(small, x, WIDTHS[client % 3] if scaler else 1.0)
        kept = torch.tensor([c in classes(client) for c in range(3)])
        return F.cross_entropy(torch.where(kept, logits, 0), y)

    if masked:
        assert {len(classes(client)) for client in range(5)} != {3}
    for round, cohort in enumerate(COHORTS):
        model = expected_round(
            toy, model, cohort, round, lambda k: held(WIDTHS[k % 3]), loss, classes, weights == "uniform"
        )
        assert_close(toy.step(cohort)["model"], model, 1e-12)


@MODES
@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("double", [True, False])
def test_inv_heterofl_2_whole_widths_are_federated_averaging_to_the_bit(mode: str, weights: Any, double: bool) -> None:
    dtype = torch.float64 if double else torch.float32
    hetero, plain = (
        Toy(method, random_clients(SIZES, dtype=dtype), two_layers(double=double), TRAIN, mode=mode)
        for method in (HeteroFL(widths=(1.0,), aggregation=weights), FedAvg(aggregation=weights))
    )
    for cohort in COHORTS:
        assert_equal(hetero.step(cohort)["model"], plain.step(cohort)["model"])
    assert_equal(hetero.federation.traffic.by_client, plain.federation.traffic.by_client)


@pytest.mark.parametrize(
    "optimizer",
    [
        {},
        {"momentum": 0.9, "nesterov": True, "max_grad_norm": 0.3},
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1, "momentum": 0.0},
        {"optimizer": "adam", "lr": 0.01, "momentum": 0.0},
        {"persist_optimizer": True},
    ],
)
def test_inv_heterofl_3_one_width_for_all_is_federated_averaging_of_a_narrow_network(optimizer: dict[str, Any]) -> None:
    """Whatever the optimizer: what a client does not have stays as it was, to the bit."""
    train = TrainConfig(**{**TRAIN.model_dump(), **optimizer})
    wide = toy_of(HeteroFL(widths=(0.5,), scaler=False), train)
    narrow = Toy(FedAvg(), random_clients(SIZES), two_layers(hidden=4), train)
    begun = copy(wide.server["model"])
    narrow.server = {"model": cut_out(begun, held(0.5))}
    wide.algorithm.check(wide.task, wide.context)
    for cohort in COHORTS:
        found, expected = wide.step(cohort)["model"], narrow.step(cohort)["model"]
        assert_close(cut_out(found, held(0.5)), expected, 1e-12)
        assert_equal(cut_out(found, [4, 5, 6])["inner.weight"], begun["inner.weight"][4:])
        assert torch.equal(found["head.weight"][:, 4:], begun["head.weight"][:, 4:])


def test_inv_heterofl_4_one_client_of_each_width_by_hand() -> None:
    """Without steps of training, only the mean is left: everybody returns what it got, and nothing moves."""
    toy = toy_of(HeteroFL(), TRAIN.model_copy(update={"lr": 0.0, "weight_decay": 0.0}))
    before = copy(toy.server["model"])
    assert_close(toy.step([0, 1, 2, 3, 4])["model"], before, 1e-15)
    # after a round of each client by itself the wider part is that client's own
    alone = [toy_of(HeteroFL(widths=WIDTHS, scaler=False)) for _ in range(3)]
    single = [toy.step([client])["model"] for client, toy in enumerate(alone)]
    found = toy_of(HeteroFL(widths=WIDTHS, scaler=False)).step([0, 1, 2])["model"]
    w = "inner.weight"
    assert_close(found[w][4:], single[1][w][4:], 1e-14)
    assert_close(found[w][2:4], (9 * single[0][w] + 12 * single[1][w])[2:4] / 21, 1e-14)
    assert_close(found[w][:2], (9 * single[0][w] + 12 * single[1][w] + single[2][w])[:2] / 22, 1e-14)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scaler": False},
        {"masked_loss": True},
        {"masked_loss": True, "scaler": False},
        {"units": "random"},
        {"width_choice": "each_round"},
    ],
)
def test_vectorized_agrees_with_looped(options: dict[str, Any], double: bool) -> None:
    assert_modes_agree(HeteroFL(widths=WIDTHS, **options), SIZES, TRAIN, double, 1e-10 if double else 1e-5)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(TwoCNN(), id="two_cnn"),
        pytest.param(ResNet9(norm="group"), id="group", marks=pytest.mark.slow),
        pytest.param(ResNet9(), id="batch"),
    ],
)
@pytest.mark.first_case
def test_convolutions_train_and_what_nobody_has_stays(model: Any) -> None:
    """Also those whose channels are normalized in groups or by the statistics of mini-batches."""
    generator = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(n, 3, 28, 28, generator=generator), torch.randint(3, (n,), generator=generator)) for n in (4, 3)
    ]
    network = model.network(InputSpec("image", (3, 28, 28), 3))
    toy = Toy(
        HeteroFL(widths=(0.25, 0.125), scaler=False),
        ListDataset(clients),
        Classification(network),
        TrainConfig(rounds=1, clients_per_round="all", batch_size=2, lr=0.01, momentum=0.9, weight_decay=0.1),
    )
    toy.algorithm.check(toy.task, toy.context)
    before = copy(toy.server["model"])
    after = toy.step([0, 1])["model"]
    units, most = network.units, window(network.units, 0.25)
    moved = {name: (after[name] != before[name]) for name in before}
    for name, changed in cut(moved, most, units).items():
        assert changed.any(), name
        assert int(moved[name].sum()) == int(changed.sum()), name
    down = {client: bytes_ for client, (bytes_, _) in toy.federation.traffic.by_client.items()}
    assert down == {k: num_bytes(cut(before, window(units, r), units)) for k, r in enumerate((0.25, 0.125))}
    assert all(up == bytes_ for bytes_, up in toy.federation.traffic.by_client.values())


def test_only_what_a_client_has_travels() -> None:
    """h units of 5 inputs and a bias, 3 classes: 8 bytes of 9 h + 3 numbers; with masked_loss a byte for 3 classes."""
    for options, more in (({}, 0), ({"masked_loss": True}, 1)):
        toy = toy_of(HeteroFL(widths=WIDTHS, **options))
        toy.step([0, 1, 2])
        sizes = {0: 8 * 39, 1: 8 * 66, 2: 8 * 21}
        assert toy.federation.traffic.by_client == {k: (size, size + more) for k, size in sizes.items()}
        assert not any(toy.states().values())


def test_random_units_are_each_client_s_and_each_round_s_own() -> None:
    toy, method = toy_of(HeteroFL()), HeteroFL(widths=(0.5,), units="random")
    units = toy.task.network.units
    drawn = {(k, t): method.held(k, toy.context, t, units)[0].tolist() for k in range(4) for t in range(4)}
    assert all(len(set(one)) == 4 and one == sorted(one) for one in drawn.values())
    assert len({tuple(one) for one in drawn.values()}) > 8
    assert drawn[2, 3] == method.held(2, toy.context, 3, units)[0].tolist()
    method = HeteroFL(widths=(0.5,), units="random", scaler=False)
    toy = toy_of(method)
    before = copy(toy.server["model"])
    after = toy.step([3])["model"]
    own = method.held(3, toy.context, 0, units)[0].tolist()
    changed = (after["inner.weight"] != before["inner.weight"]).any(1)
    assert changed.nonzero()[:, 0].tolist() == own


def test_widths_are_in_turn_drawn_once_or_drawn_in_every_round() -> None:
    context = toy_of(HeteroFL()).context
    turn = HeteroFL(widths=(1.0, 0.5))
    assert [turn.width(k, context, 0) for k in range(4)] == [1.0, 0.5, 1.0, 0.5]
    once = HeteroFL(widths=(1.0, 0.5), width_choice="drawn", shares=(1, 3))
    found = [once.width(k, context, 0) for k in range(400)]
    assert found == [once.width(k, context, 7) for k in range(400)] and 60 < found.count(1.0) < 140
    again = HeteroFL(widths=(1.0, 0.5), width_choice="each_round")
    found = [again.width(3, context, t) for t in range(400)]
    assert 150 < found.count(1.0) < 250
    never = HeteroFL(widths=(1.0, 0.5), width_choice="drawn", shares=(0, 2))
    assert {never.width(k, context, 0) for k in range(50)} == {0.5}


def test_the_submodel_is_the_network_that_a_client_has() -> None:
    """The same scores as a cut-out network, scaled as in training; whole clients have the global model."""
    toy = toy_of(HeteroFL(widths=(1.0, 0.5)), unseen=1)
    toy.run(3)
    model, rows = toy.server["model"], {**toy.scores(), **toy.scores(newcomers=True)}
    assert set(rows) == set(range(5)) and all(set(one) == {"global", "submodel"} for one in rows.values())
    for client in range(5):
        part, width = toy.dataset.load(client)["test"], (1.0, 0.5)[client % 2]
        logits = logits_of(cut_out(model, held(width)), part.x, width)
        correct = (logits.argmax(1) == part.y).double().mean()
        assert rows[client]["submodel"].first == pytest.approx(float(correct))
        if width == 1:
            assert torch.equal(
                torch.as_tensor(rows[client]["submodel"].vector), torch.as_tensor(rows[client]["global"].vector)
            )


@pytest.mark.parametrize(
    ("task", "options", "train", "words"),
    [
        (
            normalized_layers,
            {},
            {},
            r"heterofl needs a model that can be cut by width.*'norm' keeps running statistics",
        ),
        (recurrent_layers, {}, {}, r"heterofl needs a model that can be cut by width: choose a model of linear layers"),
        (softmax_regression, {}, {}, r"has no hidden layer"),
        (
            two_layers,
            {"units": "random"},
            {"persist_optimizer": True},
            r"heterofl needs train\.persist_optimizer=false",
        ),
        (two_layers, {"width_choice": "each_round"}, {"persist_optimizer": True}, r"persist_optimizer=false"),
    ],
)
def test_what_cannot_work_is_refused(task: Any, options: Any, train: Any, words: str) -> None:
    method = HeteroFL(**options)
    toy = toy_of(HeteroFL(), TRAIN.model_copy(update=train))
    with pytest.raises(ConfigError, match=words):
        method.check(task(), toy.context)


def test_settings_that_do_not_fit_are_refused() -> None:
    for wrong in ({"widths": ()}, {"widths": (1.5,)}, {"widths": (0.0,)}, {"shares": (1, 2)}, {"shares": (0,) * 5}):
        with pytest.raises(ValueError, match=r"widths|shares"):
            HeteroFL(**wrong)  # type: ignore[arg-type]


def test_units_that_nobody_trains_are_said() -> None:
    context = toy_of(HeteroFL()).context
    assert not HeteroFL().remarks(context) and not HeteroFL(widths=(0.5,), units="random").remarks(context)
    (said,) = HeteroFL(widths=(0.5, 0.25)).remarks(context)
    assert "no client has more than 0.5 of the units" in said
