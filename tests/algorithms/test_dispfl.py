"""Dis-PFL: rounds by hand, invariants DIS of masks, limits that are other methods, messages, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.dispfl import DisPFL
from algorithms.fedavg import FedAvg
from algorithms.local import Local
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10, 9)
COHORTS = ([0, 1, 2, 4], [1, 3], [0, 1, 3, 4], [2], [0, 1, 2, 3, 4])
TRAIN = TrainConfig(
    rounds=5, clients_per_round=4, local_epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01, lr_decay=0.9
)
KEPT = {"inner.weight": 12, "inner.bias": 7, "head.weight": 10, "head.bias": 3}
"""Of 35, 7, 21 and 3 elements at density 1/2: biases are dense, 23 of 56 are left in proportion to 12 and 10."""


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), task or two_layers(), train, **options)


def loss_of(model: Tree, x: Tensor, y: Tensor) -> Tensor:
    hidden = torch.relu(x @ model["inner.weight"].T + model["inner.bias"])
    return F.cross_entropy(hidden @ model["head.weight"].T + model["head.bias"], y)


def slopes(model: Tree, x: Tensor, y: Tensor) -> Tree:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    parts = torch.autograd.grad(loss_of(leaves, x, y), list(leaves.values()))
    return dict(zip(leaves, parts, strict=True))


def projected_steps(toy: Toy, model: Tree, mask: Tree, client: int, round: int) -> Tree:
    """SGD on all elements, of which those outside of the mask are set to zero after every step."""
    part, train = toy.dataset.load(client)["train"], toy.train
    size = len(part.y)
    plan = plan_batches(size, 4, 2 * -(-size // 4), toy.context.streams.generator("batches", round, client))
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    optimizer = torch.optim.SGD(
        leaves.values(), lr=0.1 * 0.9**round, momentum=train.momentum, weight_decay=train.weight_decay
    )
    for index in plan.batches(CPU):
        optimizer.zero_grad()
        loss_of(leaves, part.x[index], part.y[index]).backward()
        optimizer.step()
        for name, leaf in leaves.items():
            leaf.data *= mask[name]
    return {name: leaf.detach() for name, leaf in leaves.items()}


def moved(mask: Tensor, leaf: Tensor, merit: Tensor, share: float) -> Tensor:
    """One element after the other leaves and enters."""
    found, kept = mask.flatten().tolist(), leaf.abs().flatten().tolist()
    count = math.ceil(share * sum(found))
    for place in sorted((i for i, there in enumerate(found) if there), key=kept.__getitem__)[:count]:
        found[place] = False
    gain = merit.abs().flatten().tolist()
    for place in sorted((i for i, there in enumerate(found) if not there), key=lambda i: -gain[i])[:count]:
        found[place] = True
    return torch.tensor(found).view(mask.shape)


def first_masks(toy: Toy, client: int) -> Tree:
    generator = toy.context.streams.generator("mask", client=client)
    found: Tree = {}
    for name, leaf in toy.task.network.initialize(0).items():
        places = generator.permutation(leaf.numel())[: KEPT[name]]
        found[name] = torch.zeros(leaf.numel(), dtype=torch.bool)
        found[name][places] = True
        found[name] = found[name].view(leaf.shape)
    return found


@pytest.mark.parametrize("samples", ["batch", "all"])
@pytest.mark.parametrize("kind", ["random", "ring"])
def test_inv_dis_1_rounds_are_those_of_an_oracle_in_plain_pytorch(kind: Any, samples: Any) -> None:
    toy = toy_of(DisPFL(topology=kind, neighbours=2, growth_samples=samples))
    streams, initial = toy.context.streams, toy.task.network.initialize(toy.context.streams.integer("init.global"))
    masks = {i: first_masks(toy, i) for i in range(5)}
    seen = dict(masks)
    own: dict[int, Tree] = {i: {n: leaf * masks[i][n] for n, leaf in initial.items()} for i in range(5)}
    for round, cohort in enumerate(COHORTS):
        before, shown = dict(own), dict(seen)
        for row, i in enumerate(cohort):
            others = np.delete(np.arange(len(cohort)), row)
            chosen = streams.generator("topology", round, i).permutation(others)[:2]
            heard = [cohort[j] for j in chosen] if kind == "random" else [j for j in cohort if (i - j) % 5 in (1, 4)]
            start: Tree = {}
            for name in initial:
                total = sum(before[j][name] for j in (i, *heard))
                count = sum(shown[j][name].double() for j in (i, *heard))
                mean = torch.where(count > 0, total / count, 0)
                start[name] = torch.where(masks[i][name], mean, 0)
            own[i], seen[i] = projected_steps(toy, start, masks[i], i, round), masks[i]
            part = toy.dataset.load(i)["train"]
            rows = streams.generator("mask", round, i).permutation(len(part.y))[: 4 if samples == "batch" else None]
            merit = slopes(own[i], part.x[rows], part.y[rows])
            share = 0.25 * (1 + math.cos(math.pi * round / TRAIN.rounds))
            masks[i] = {n: moved(mask, own[i][n], merit[n], share) for n, mask in masks[i].items()}
        toy.step(cohort)
        for i, state in toy.states().items():
            assert_close(state["model"], own[i], 1e-12)
            assert_equal(state["trained"], seen[i])
            assert_equal(state["mask"], masks[i])
    for i, rows_of in toy.scores().items():
        test = toy.dataset.load(i)["test"]
        assert rows_of["personalized"].loss == pytest.approx(float(loss_of(own[i], test.x, test.y)))


@pytest.mark.parametrize("growth", ["gradient", "random"])
def test_inv_dis_2_each_tensor_keeps_its_number_of_elements_and_zeros_elsewhere(growth: Any) -> None:
    toy = toy_of(DisPFL(growth=growth))
    for cohort in COHORTS:
        toy.step(cohort)
        for state in toy.states().values():
            for name, count in KEPT.items():
                assert int(state["mask"][name].sum()) == int(state["trained"][name].sum()) == count
                assert not state["model"][name][~state["trained"][name]].any()
    changed = [
        torch.equal(s["mask"]["inner.weight"], first_masks(toy, i)["inner.weight"]) for i, s in toy.states().items()
    ]
    assert not any(changed)


@pytest.mark.parametrize("task", [two_layers, normalized_layers])
def test_inv_dis_3_dense_and_with_all_neighbours_the_mean_is_fedavgs_with_uniform_weights(task: Any) -> None:
    """Here models are averaged before training, there after it."""
    everyone = TRAIN.model_copy(update={"clients_per_round": "all"})
    peers = toy_of(DisPFL(topology="complete", density=1.0), everyone, task())
    served = toy_of(FedAvg(aggregation="uniform"), everyone, task())
    for _ in range(4):
        peers.step()
        expected = served.step()["model"]
        states = peers.states().values()
        mean = {name: sum(state["model"][name] for state in states) / len(SIZES) for name in expected}
        assert_close(mean, expected, 1e-12)


def test_inv_dis_4_dense_and_without_neighbours_it_is_local_training() -> None:
    peers, local = (toy_of(a, task=normalized_layers()) for a in (DisPFL(topology="ring", density=1.0), Local()))
    for cohort in ([0, 2], [1, 3], [4], [0, 3], [2]):
        peers.step(cohort)
        local.step(cohort)
        assert peers.federation.traffic.by_client == dict.fromkeys(cohort, (0, 0))
    for client, state in local.states().items():
        assert_close(peers.states()[client]["model"], state["local"], 1e-15)


def test_inv_dis_5_without_an_exchange_masks_stay() -> None:
    toy = toy_of(DisPFL(prune_share=0.0))
    for cohort in COHORTS:
        toy.step(cohort)
    for client, state in toy.states().items():
        assert_equal(state["mask"], first_masks(toy, client))
        assert_equal(state["trained"], state["mask"])


def test_inv_dis_6_kept_elements_and_their_places_travel_and_nothing_else() -> None:
    toy = toy_of(DisPFL(topology="ring"), task=normalized_layers())
    network, initial = toy.task.network, toy.task.network.initialize(0)
    dense = DisPFL().shares({name: initial[name] for name in network.parameter_names})
    size = 8 * sum(initial[name].numel() for name in network.buffer_names)
    for name, share in dense.items():
        elements = initial[name].numel()
        size += 8 * int(share * elements + 1e-9) + (0 if share == 1 else -(-elements // 8))
    for cohort in ([0, 1, 2], [0, 1, 2], [1, 2, 3]):
        toy.step(cohort)
        ends, middle = (cohort[0], cohort[2]), cohort[1]
        expected = {**dict.fromkeys(ends, (size, size)), middle: (2 * size, 2 * size)}
        assert toy.federation.traffic.by_client == expected
    assert size < 8 * sum(leaf.numel() for leaf in initial.values()) * 0.75


def test_who_is_drawn_sends_without_getting() -> None:
    toy = toy_of(DisPFL(neighbours=1))
    sent = []
    for _ in range(3):
        toy.step([0, 1, 2, 3, 4])
        traffic = toy.federation.traffic
        assert traffic.down == traffic.up and len({down for down, _ in traffic.by_client.values()}) == 1
        sent.append({up for _, up in traffic.by_client.values()})
    assert any(len(sizes) > 1 for sizes in sent)


def test_masks_of_all_may_begin_the_same() -> None:
    toy = toy_of(DisPFL(first_masks="shared", prune_share=0.0))
    toy.step([0, 1, 2])
    assert_equal(toy.states()[0]["mask"], toy.states()[2]["mask"])
    uniform = toy_of(DisPFL(layers="uniform"))
    uniform.step([0])
    assert [int(mask.sum()) for mask in uniform.states()[0]["mask"].values()] == [17, 3, 10, 1]


def test_what_an_optimizer_that_goes_on_remembers_moves_nothing_outside_of_the_mask() -> None:
    toy = toy_of(DisPFL(), TRAIN.model_copy(update={"persist_optimizer": True, "momentum": 0.9}))
    for _ in range(3):
        toy.step([0, 1, 2])
    for state in toy.states().values():
        for name, mask in state["trained"].items():
            assert not state["model"][name][~mask].any()


@pytest.mark.parametrize("policy", ["statistics", "all"])
def test_private_normalization_is_in_no_message(policy: Any) -> None:
    train = TRAIN.model_copy(update={"private_norm": policy})
    toy = toy_of(DisPFL(topology="complete", density=1.0), train, normalized_layers())
    local = toy_of(Local(), train, normalized_layers())
    for _ in range(2):
        toy.step([0, 1, 2])
        local.step([0, 1, 2])
    whole = {name: leaf.nbytes for name, leaf in toy.task.network.initialize(0).items()}
    private = [name for name in whole if name.startswith("norm.") and (policy == "all" or "running" in name)]
    sent = sum(size for name, size in whole.items() if name not in private)
    assert toy.federation.traffic.by_client[0] == (2 * sent, 2 * sent)
    assert all(rows["personalized"].loss > 0 for rows in toy.scores().values())
    for name in private:
        assert not torch.equal(toy.states()[0]["model"][name], toy.states()[1]["model"][name])


@pytest.mark.parametrize(("double", "tolerance"), [(True, 1e-10), (False, 1e-5)])
def test_vectorized_agrees_with_looped(double: bool, tolerance: float) -> None:
    assert_modes_agree(DisPFL(neighbours=1), (8, 12, 6, 10), TRAIN, double, tolerance)


def test_a_newcomer_trains_a_sparse_model_alone() -> None:
    toy = toy_of(DisPFL(), unseen=1)
    toy.step([0, 1])
    mask, test = first_masks(toy, 4), toy.dataset.load(4)["test"]
    initial = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    alone = projected_steps(toy, {n: leaf * mask[n] for n, leaf in initial.items()}, mask, 4, 0)
    (rows,) = toy.scores(final=True, newcomers=True).values()
    assert rows["personalized"].loss == pytest.approx(float(loss_of(alone, test.x, test.y)))


def test_the_exchanged_share_falls_along_a_cosine_over_all_rounds() -> None:
    method = DisPFL(prune_share=0.4)
    assert [method.course(round, 4) for round in (0, 2)] == pytest.approx([0.4, 0.2])
    assert method.course(1, 4) != method.course(1, 8)
    assert DisPFL(prune_share=0.0).course(1, 4) == DisPFL(prune_share=0.0).course(1, 8) == 0


def test_a_density_that_leaves_a_layer_nothing_is_refused() -> None:
    toy = toy_of(DisPFL(density=0.02))
    with pytest.raises(ConfigError, match=r"algorithm\.density is 0\.02, which leaves 'inner\.weight' none of its 35"):
        toy.algorithm.check(toy.task, toy.context)
