"""pFedHN and pFedHN-PC: invariants HN, the server's step written out in PyTorch, and what each side keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from algorithms.fedavg import FedAvg
from algorithms.parts.hypernetworks import produced
from algorithms.pfedhn import PFedHN
from rayfl.engine.updates.settings import TrainConfig
from rayfl.params import Tree, copy, leaves, num_bytes, subtract
from tests.support.partial_toys import held_out_accuracy, planted_clients
from tests.support.pfedhn_toys import TRAIN, toy_of
from tests.support.toy_networks import Quadratic, two_layers
from tests.support.toys import Toy, assert_close, assert_equal, quadratic_clients, random_clients

PLAIN: dict[str, Any] = {"server_momentum": 0.0, "server_weight_decay": 0.0, "server_max_grad_norm": None}


def flat(tree: Tree) -> torch.Tensor:
    """Generator and embeddings as one vector."""
    return torch.cat([leaf.flatten() for _, leaf in leaves({key: tree[key] for key in ("generator", "embeddings")})])


def linear(points: Any, weight: Any, bias: Any, embeddings: Any, steps: int | None = 2, **options: Any) -> Toy:
    """QUAD under a network that is linear in the embeddings."""
    algorithm = PFedHN(inner_steps=steps, trunk_layers=0, embedding_dim=len(embeddings[0]), **{**PLAIN, **options})
    train = TrainConfig(rounds=3, clients_per_round="all", batch_size=None, lr=0.1, local_epochs=2)
    dimension = len(bias)
    toy = Toy(algorithm, quadratic_clients(points, [1] * len(points)), Quadratic(dimension), train)
    given = (torch.tensor(value, dtype=torch.float64) for value in (weight, bias, embeddings))
    first, second, third = given
    toy.server = {
        "generator": {"heads": {"theta": {"weight": first, "bias": second}}},
        "embeddings": third,
        "memory": {},
    }
    return toy


def test_inv_hn_1_golden_values_of_a_linear_network() -> None:
    toy = linear([[0.0, 1.0]], [[1.0, 2.0], [0.0, -1.0]], [0.1, 0.2], [[0.5, 1.0]], server_lr=1.0)
    before = copy(toy.server)
    made = produced(before["generator"], before["embeddings"][0])["theta"]
    assert_close({"x": made}, {"x": torch.tensor([2.6, -0.8], dtype=torch.float64)}, 1e-12)
    after = toy.step([0])
    change = subtract({key: before[key] for key in ("generator", "embeddings")}, after)
    head = change["generator"]["heads"]["theta"]
    assert_close(head["bias"], torch.tensor([0.494, -0.342], dtype=torch.float64), 1e-12)
    assert_close(head["weight"], torch.tensor([[0.247, 0.494], [-0.171, -0.342]], dtype=torch.float64), 1e-12)
    assert_close(change["embeddings"], torch.tensor([[0.494, 1.33]], dtype=torch.float64), 1e-12)


def test_inv_hn_1_the_rate_of_the_embeddings_is_its_own() -> None:
    start = ([[0.0, 1.0]], [[1.0, 2.0], [0.0, -1.0]], [0.1, 0.2], [[0.5, 1.0]])
    toy = linear(*start, server_lr=1.0, embedding_lr=0.5)
    moved = torch.tensor([[0.5, 1.0]], dtype=torch.float64) - toy.step([0])["embeddings"]
    assert_close(moved, torch.tensor([[0.247, 0.665]], dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("steps", ["per_round", "per_client"])
def test_inv_hn_2_without_local_steps_nothing_moves(steps: Any) -> None:
    toy = toy_of(inner_steps=0, server_weight_decay=0, server_steps=steps)
    before = copy(toy.server)
    for _ in range(2):
        after = toy.step([0, 3])
        for key in ("generator", "embeddings"):
            assert_equal(after[key], before[key])


def test_inv_hn_2_local_epochs_count_where_no_steps_are_given() -> None:
    train = TRAIN.model_copy(update={"local_epochs": 0})
    idle = toy_of(train=train, inner_steps=None, server_weight_decay=0)
    before = idle.server["embeddings"].clone()
    assert torch.equal(idle.step([0, 3])["embeddings"], before)
    busy = toy_of(inner_steps=None, server_weight_decay=0)
    assert not torch.equal(busy.step([0, 3])["embeddings"], before)


def test_inv_hn_3_a_clients_model_depends_on_its_own_row_alone() -> None:
    toy, other = toy_of(), toy_of()
    other.server["embeddings"] = other.server["embeddings"].clone()
    other.server["embeddings"][[0, 1, 3, 4]] += 1
    given = [
        one.federation.on_server(
            one.algorithm.generate,  # type: ignore[attr-defined]
            {
                "generator": one.server["generator"],
                "embeddings": one.server["embeddings"],
                "clients": torch.tensor(ids),
            },
        )
        for one, ids in ((toy, [2, 4]), (other, [0, 2, 3]))
    ]
    assert_equal(given[0]["2"], given[1]["2"])


def test_inv_hn_3_rows_that_change_places_change_models() -> None:
    toy, other = toy_of(), toy_of()
    order = [3, 0, 4, 1, 2]
    other.server["embeddings"] = other.server["embeddings"][order]
    task = toy.task
    for k, original in enumerate(order):
        made = [
            produced(one.server["generator"], one.server["embeddings"][i]) for one, i in ((other, k), (toy, original))
        ]
        assert_equal(made[0], made[1])
        assert {name: leaf.numel() for name, leaf in made[0].items()} == {
            name: leaf.numel() for name, leaf in task.network.initialize(0).items()
        }


def test_inv_hn_4_a_bias_alone_is_federated_averaging() -> None:
    points = [[0.0, 1.0], [3.0, -2.0], [1.0, 5.0]]
    toy = linear(points, [[0.0], [0.0]], [1.0, 1.0], [[0.0]] * 3, steps=None, server_lr=1.0)
    plain = Toy(FedAvg(aggregation="uniform"), toy.dataset, Quadratic(2), toy.train)
    for cohort in ([0, 1, 2], [1, 2], [0]):
        found = toy.step(cohort)["generator"]["heads"]["theta"]
        assert_close(found["bias"], plain.step(cohort)["model"]["theta"], 1e-12)
        assert not found["weight"].any() and not toy.server["embeddings"].any()


def test_inv_hn_5_the_joint_gradient_is_clipped() -> None:
    for limit in (0.02, 1e6):
        toy = toy_of(server_lr=1.0, **{**PLAIN, "server_max_grad_norm": limit})
        before = flat(toy.server)
        length = float((flat(toy.step([0, 1])) - before).norm())
        assert (length == pytest.approx(0.02, rel=1e-3)) == (limit == 0.02)


def test_inv_hn_6_one_client_is_one_step_either_way() -> None:
    one, other = toy_of(), toy_of(server_steps="per_client")
    for cohort in ([1], [4]):
        assert_equal(one.step(cohort), other.step(cohort))
    assert not torch.equal(flat(one.step([0, 1])), flat(other.step([0, 1])))


@pytest.mark.parametrize("steps", ["per_round", "per_client"])
def test_the_servers_steps_are_those_of_pytorch(steps: Any) -> None:
    toy = toy_of(server_steps=steps, server_max_grad_norm=0.5, embedding_lr=0.02)
    start = copy(toy.server)
    parameters = {path: leaf.requires_grad_() for path, leaf in leaves(start)}
    others = [leaf for path, leaf in parameters.items() if path != "embeddings"]
    groups = [{"params": others}, {"params": [start["embeddings"]], "lr": 0.02}]
    rule = torch.optim.SGD(groups, 0.05, momentum=0.9, weight_decay=1e-3)
    for cohort in ([0, 3], [1, 3]):
        sent = toy.federation.on_server(
            toy.algorithm.generate,  # type: ignore[attr-defined]
            {
                "generator": toy.server["generator"],
                "embeddings": toy.server["embeddings"],
                "clients": torch.tensor(cohort),
            },
        )
        toy.federation.begin_round(toy.round)
        replies = toy.federation.map(
            toy.algorithm.local_update,  # type: ignore[attr-defined]
            cohort,
            {},
            {k: {"model": sent[str(k)]} for k in cohort},
        )
        changes = {k: subtract(sent[str(k)], replies[k]["model"]) for k in cohort}
        after = toy.step(cohort)
        for chosen in [[k] for k in cohort] if steps == "per_client" else [cohort]:
            value = sum(
                (changes[k][name].flatten() * made).sum()
                for k in chosen
                for name, made in produced(start["generator"], start["embeddings"][k]).items()
            )
            rule.zero_grad()
            (value / len(chosen)).backward()  # type: ignore[union-attr]
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), 0.5)
            rule.step()
        for path, leaf in leaves({key: after[key] for key in ("generator", "embeddings")}):
            assert_close(leaf, parameters[path].detach(), 1e-11)


def test_embeddings_of_clients_not_sampled_move_by_decay_and_momentum_unless_told_otherwise() -> None:
    for which in ("all", "selected"):
        toy = toy_of(embedding_update=which)
        rows = [toy.server["embeddings"].clone()]
        for cohort in ([0, 1], [2, 3]):
            rows.append(toy.step(cohort)["embeddings"].clone())
        moved = [(rows[i + 1] != rows[i]).any(1).tolist() for i in range(2)]
        assert moved[0] == [True, True] + [which == "all"] * 3
        assert moved[1] == [which == "all"] * 2 + [True, True] + [which == "all"]
        memory = toy.server["memory"]["main"]["embeddings"]
        assert bool(memory[4].any()) == (which == "all")


def test_without_a_memory_the_server_keeps_none() -> None:
    toy = toy_of(server_momentum=0)
    assert toy.step([0, 1])["memory"] == {}


def test_sizes_of_the_network() -> None:
    server = Toy(PFedHN(), random_clients([4] * 9), two_layers(), TRAIN).server
    assert server["embeddings"].shape == (9, 3)
    shapes = [tuple(layer["weight"].shape) for layer in server["generator"]["trunk"].values()]
    assert shapes == [(100, 3), (100, 100), (100, 100), (100, 100)]
    heads = {name: tuple(head["weight"].shape) for name, head in server["generator"]["heads"].items()}
    assert heads == {"inner.weight": (35, 100), "inner.bias": (7, 100), "head.weight": (21, 100), "head.bias": (3, 100)}
    bound = server["generator"]["heads"]["inner.weight"]["weight"].abs().max()
    assert 0.09 < bound <= 0.1
    assert toy_of(embedding_dim=4).server["embeddings"].shape == (5, 4)


def test_the_trunk_has_relu_between_its_layers_and_none_at_its_ends() -> None:
    server = toy_of().server
    first, second = server["generator"]["trunk"].values()
    v = server["embeddings"][1]
    hidden = second["weight"] @ torch.relu(first["weight"] @ v + first["bias"]) + second["bias"]
    head = server["generator"]["heads"]["head.bias"]
    assert_close(produced(server["generator"], v)["head.bias"], head["weight"] @ hidden + head["bias"], 1e-12)


def test_only_models_travel() -> None:
    toy = toy_of()
    toy.step([0, 3])
    size = num_bytes(toy.task.network.initialize(0))
    assert (toy.federation.traffic.down, toy.federation.traffic.up) == (2 * size, 2 * size)
    assert toy.states() == {}


def test_vectorized_agrees_with_looped() -> None:
    looped, stacked = (toy_of(mode=mode, private_head=True) for mode in ("looped", "vectorized"))
    assert_close(looped.run(), stacked.run())
    assert_close(looped.states(), stacked.states())


@pytest.mark.slow
def test_clients_whose_labels_differ_get_models_of_their_own() -> None:
    train = TrainConfig(rounds=40, clients_per_round="all", local_epochs=2, batch_size=10, lr=0.3)
    found = {}
    for algorithm in (PFedHN(inner_steps=None, hidden=20, trunk_layers=2, server_lr=0.05), FedAvg()):
        toy = Toy(algorithm, planted_clients("head"), two_layers(12, 8), train)
        toy.run()
        found[algorithm.name] = held_out_accuracy(toy, algorithm.personalized)
    assert found["pfedhn"] > found["fedavg"] + 0.1
