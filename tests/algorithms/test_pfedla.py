"""pFedLA: invariants LA, a round written out in PyTorch, and what is retained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.local import Local
from algorithms.pfedla import PFedLA, by_layer, layer_weights
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import copy, leaves
from tests.support.partial_toys import held_out_accuracy, planted_clients
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 6, 10, 7)
TRAIN = TrainConfig(rounds=3, clients_per_round=3, local_epochs=1, batch_size=4, lr=0.1, momentum=0.5)
LAYERS = {"inner": ["inner.weight", "inner.bias"], "head": ["head.weight", "head.bias"]}


def toy_of(data: Any = None, train: TrainConfig = TRAIN, task: Any = None, mode: str = "looped", **options: Any) -> Toy:
    settings = {"hidden": 6, "trunk_layers": 2, "embedding_dim": 3, "server_lr": 0.1, **options}
    return Toy(PFedLA(**settings), data or random_clients(SIZES), task or two_layers(), train, mode=mode)


def shares(network: Any, layer: str, client: int) -> Tensor:
    """h's numbers of a layer over their sum, written out."""
    hidden = network["embedding"]
    for number in ("0", "1"):
        hidden = torch.relu(network["trunk"][number]["weight"] @ hidden + network["trunk"][number]["bias"])
    numbers = torch.relu(network["heads"][layer]["weight"] @ hidden + network["heads"][layer]["bias"])
    if numbers.sum() == 0:
        return torch.eye(len(numbers), dtype=numbers.dtype)[client]
    return numbers / numbers.sum()


def test_layers_are_what_stands_before_the_last_point() -> None:
    assert by_layer(["a.0.weight", "a.0.bias", "a.1.weight", "scale"]) == {
        "a.0": ["a.0.weight", "a.0.bias"],
        "a.1": ["a.1.weight"],
        "scale": ["scale"],
    }


@pytest.mark.parametrize("retained", [0, 1])
def test_inv_la_1_a_round_written_out(retained: int) -> None:
    """Models as mixtures of all clients', and one step of SGD by autograd through the mixtures themselves."""
    toy = toy_of(retained_layers=retained)
    initial = toy.server["model"]
    models = {j: copy(initial) for j in range(5)}
    networks = {j: {"embedding": toy.server["embeddings"][j].clone(), **copy(toy.server["phi"])} for j in range(5)}
    for cohort in ([0, 3, 4], [1, 3, 4], [0, 1, 3]):
        expected, moved = {}, {}
        for i in cohort:
            wanted = {path: leaf.clone().requires_grad_() for path, leaf in leaves(networks[i])}
            network = tree_of(wanted)
            found = {layer: shares(network, layer, i) for layer in LAYERS}
            own = sorted(LAYERS, key=lambda layer: -found[layer][i].item())[:retained]
            mixture = {
                name: models[i][name]
                if layer in own
                else sum(share * models[j][name] for j, share in enumerate(found[layer]))
                for layer, names in LAYERS.items()
                for name in names
            }
            start = {name: leaf.detach() for name, leaf in mixture.items()}
            alone = Toy(FedAvg(), random_clients(SIZES), two_layers(), TRAIN)
            alone.round, alone.server = toy.round, {"model": {name: start[name] for name in initial}}
            trained = alone.step([i])["model"]
            products = [
                ((start[name] - trained[name]) * mixture[name]).sum()
                for layer, names in LAYERS.items()
                if layer not in own
                for name in names
            ]
            gradients = torch.autograd.grad(torch.stack(products).sum(), list(wanted.values()), allow_unused=True)
            moved[i] = tree_of(
                {
                    path: (leaf if g is None else leaf - 0.1 * g).detach()
                    for (path, leaf), g in zip(wanted.items(), gradients, strict=True)
                }
            )
            expected[i] = trained
        models |= expected
        networks |= moved
        toy.step(cohort)
        for i in cohort:
            assert_close(toy.server["own"][str(i)], expected[i], 1e-10)
            assert_close(toy.server["networks"][str(i)], moved[i], 1e-10)


def tree_of(flat: dict[str, Tensor]) -> Any:
    """The nested tree of leaves by path."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, name = path.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = leaf
    return tree


def test_inv_la_2_weights_are_not_negative_and_sum_to_one() -> None:
    toy = toy_of()
    toy.run()
    for i in range(5):
        weights, retained = toy.algorithm.weights(toy.algorithm.network_of(toy.server, i), i)  # type: ignore[attr-defined]
        assert set(weights) == set(LAYERS) and not retained
        for of_layer in weights.values():
            assert bool((of_layer >= 0).all())
            assert float(of_layer.sum()) == pytest.approx(1, abs=1e-12)


def test_inv_la_3_with_equal_weights_it_is_the_uniform_mean() -> None:
    """All numbers of a layer alike, and no step of the server: all receive the mean of all clients' models."""
    train = TRAIN.model_copy(update={"clients_per_round": "all"})
    toy, fedavg = (
        toy_of(train=train, server_lr=0.0),
        Toy(FedAvg(aggregation="uniform"), random_clients(SIZES), two_layers(), train),
    )
    for head in toy.server["phi"]["heads"].values():
        head["weight"].fill_(0.0)
        head["bias"].fill_(1.0)
    for _ in range(3):
        toy.step()
        fedavg.step()
    found = [toy.server["own"][str(i)] for i in range(5)]
    for name, leaf in fedavg.server["model"].items():
        assert_close(torch.stack([one[name] for one in found]).mean(0), leaf, 1e-12)


@pytest.mark.parametrize("make", [two_layers, normalized_layers])
def test_inv_la_4_with_all_layers_retained_it_is_local_training(make: Any) -> None:
    layers = len(by_layer(make().network.parameter_names))
    toy = toy_of(task=make(), retained_layers=layers)
    local = Toy(Local(), random_clients(SIZES), make(), TRAIN)
    for _ in range(3):
        toy.step()
        local.step()
    for client, state in local.states().items():
        assert_equal(toy.states()[client]["own"], state["local"])
    for client in range(5):
        found, expected = toy.scores()[client]["personalized"], local.scores()[client]["personalized"]
        assert found.vector.tolist() == expected.vector.tolist()
    assert not toy.server.get("networks")


def test_inv_la_5_where_all_numbers_are_zero_a_client_keeps_its_own() -> None:
    toy = toy_of(server_lr=0.1)
    for head in toy.server["phi"]["heads"].values():
        head["weight"].fill_(-1.0)
        head["bias"].fill_(-1.0)
    before = copy(toy.server["phi"])
    local = Toy(Local(), random_clients(SIZES), two_layers(), TRAIN)
    for _ in range(3):
        toy.step()
        local.step()
    for client, state in local.states().items():
        assert_close(toy.server["own"][str(client)], state["local"], 1e-12)
    for network in toy.server["networks"].values():  # the step's gradient is 0, not undefined
        assert_equal({name: network[name] for name in before}, before)


def test_inv_la_6_the_weights_of_two_clients_by_hand() -> None:
    network = {
        "embedding": torch.tensor([2.0, -1.0]),
        "trunk": {"0": {"weight": torch.eye(2), "bias": torch.tensor([0.0, 3.0])}},
        "heads": {
            "a": {"weight": torch.tensor([[1.0, 0.5], [1.0, -0.5]]), "bias": torch.zeros(2)},
            "b": {"weight": -torch.ones(2, 2), "bias": torch.zeros(2)},
        },
    }
    found = layer_weights(network, torch.tensor(1), ("a", "b"))
    assert found["a"].tolist() == [0.75, 0.25]
    assert found["b"].tolist() == [0.0, 1.0]


def test_what_a_client_retains_is_not_sent_to_it() -> None:
    toy = toy_of(retained_layers=1)
    weights, (kept,) = toy.algorithm.weights(toy.algorithm.network_of(toy.server, 2), 2)  # type: ignore[attr-defined]
    assert weights[kept].tolist() == [0, 0, 1, 0, 0]
    toy.federation.begin_round(0)
    toy.step([2])
    other = next(layer for layer in LAYERS if layer != kept)
    names = [*LAYERS[other]]
    model = toy.server["model"]
    down, up = toy.federation.traffic.by_client[2]
    assert (down, up) == (sum(model[name].nbytes for name in names), sum(leaf.nbytes for leaf in model.values()))
    assert set(toy.states()[2]["own"]) == set(toy.server["model"])


def test_more_layers_than_there_are_cannot_be_retained() -> None:
    toy = toy_of()
    with pytest.raises(ConfigError, match=r"algorithm.retained_layers is 3, but the model has 2 layers"):
        PFedLA(retained_layers=3).check(toy.task, toy.context)


def test_a_newcomer_begins_with_the_mean_of_all() -> None:
    toy = toy_of()
    late = Toy(toy.algorithm, random_clients((*SIZES, 8)), toy.task, TRAIN, unseen=1)
    toy.run()
    late.server = toy.server
    trees = [toy.server["own"].get(str(i), toy.server["model"]) for i in range(5)]
    common, _ = toy.algorithm.served(toy.server, toy.context)
    for name in toy.server["model"]:
        assert_close(common["model"][name], torch.stack([tree[name] for tree in trees]).mean(0), 1e-12)
    assert list(late.scores(newcomers=True)) == [5]


@pytest.mark.parametrize("retained", [0, 1])
def test_vectorized_agrees_with_looped(retained: int) -> None:
    looped, stacked = (toy_of(mode=mode, retained_layers=retained) for mode in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run())


@pytest.mark.slow
def test_clients_whose_labels_differ_get_models_of_their_own() -> None:
    train = TrainConfig(rounds=60, clients_per_round="all", local_epochs=2, batch_size=10, lr=0.3)
    found = {}
    for algorithm in (PFedLA(server_lr=0.05), FedAvg()):
        toy = Toy(algorithm, planted_clients("head"), two_layers(12, 8), train)
        toy.run()
        found[algorithm.name] = held_out_accuracy(toy, algorithm.personalized)
    assert found["pfedla"] > found["fedavg"] + 0.1
