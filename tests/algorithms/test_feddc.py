"""FedDC: an oracle in plain PyTorch, FedDyn and SCAFFOLD as special cases, fixed points, buffers and what is kept."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.feddc import FedDC
from algorithms.feddyn import FedDyn
from algorithms.scaffold import Scaffold
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, add_scaled, copy, map_leaves, num_bytes, subtract, tensors, zeros_like
from rayfl.tasks.base import Batch
from tests.support.both_modes import assert_modes_agree
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

SIZES = (9, 12, 6, 10)
TRAIN = TrainConfig(rounds=5, clients_per_round=2, local_epochs=2, batch_size=4, lr=0.1, weight_decay=0.01)
ONE_STEP = TRAIN.model_copy(update={"local_epochs": 1, "batch_size": None})
COHORTS = ([0], [1, 3], [0, 1, 2, 3], [2], [0, 3])
EVERYONE = ([0, 1, 2, 3],) * 4
OPTIONS = [
    {"correction": correction, "drift_mean": drifts, "aggregation": weights}
    for correction, drifts, weights in product(
        ("update", "gradient", "none"), ("cohort", "all"), ("samples", "uniform")
    )
]


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, random_clients(SIZES), two_layers(), train, **options)


def weighted_mean(trees: list[Tree], weights: list[float]) -> Tree:
    total = sum(weights)
    return map_leaves(lambda *leaves: sum(p * leaf for p, leaf in zip(weights, leaves, strict=True)) / total, *trees)


def kept(toy: Toy, what: str) -> list[Tree]:
    """h_i or u_i of all clients; zero for those that never took part."""
    zero = zeros_like({name: toy.server["model"][name] for name in toy.task.network.parameter_names})
    states = toy.states()
    return [states[i][what] if i in states else zero for i in range(toy.dataset.num_clients)]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
def test_inv_dc_1_rounds_are_those_of_an_oracle_in_plain_pytorch(options: Any) -> None:
    """The paper's equations as they stand: a loss with three terms for autograd, h_i, and g_i as a distance."""
    alpha, train = 0.3, TRAIN.model_copy(update={"lr_decay": 0.8})
    toy = toy_of(FedDC(alpha=alpha, **options), train)
    network, streams = toy.task.network, toy.context.streams
    w = network.initialize(streams.integer("init.global"))
    h, g = [zeros_like(w) for _ in SIZES], [zeros_like(w) for _ in SIZES]
    of_g = [1.0] * len(SIZES)  # eta K of the round that g_i is from
    p = [float(n) if options["aggregation"] == "samples" else 1.0 for n in SIZES]
    for round, cohort in enumerate(COHORTS):
        eta, trained = 0.1 * 0.8**round, {}
        mean = weighted_mean([map_leaves(lambda x, s=s: x / s, one) for one, s in zip(g, of_g, strict=True)], p)
        for i in cohort:
            part = toy.dataset.load(i)["train"]
            n, k = len(part.y), 2 * -(-len(part.y) // 4)
            theta = {name: leaf.clone().requires_grad_() for name, leaf in w.items()}
            correction = {name: g[i][name] / of_g[i] - mean[name] for name in w}
            optimizer = torch.optim.SGD(theta.values(), lr=eta, weight_decay=0.01)
            for index in plan_batches(n, 4, k, streams.generator("batches", round, i)).batches(CPU):
                loss: Any = F.cross_entropy(network.logits(theta, part.x[index]), part.y[index])
                for name, leaf in theta.items():
                    loss = loss + alpha / 2 * (h[i][name] + leaf - w[name]).pow(2).sum()
                    if options["correction"] != "none":
                        loss = loss + (leaf * correction[name]).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            trained[i] = {name: leaf.detach() for name, leaf in theta.items()}
            moved = {name: trained[i][name] - w[name] for name in w}
            h[i] = {name: h[i][name] + moved[name] for name in w}
            g[i], of_g[i] = moved, eta * k
            if options["correction"] == "gradient":  # what the correction moved does not count
                g[i] = {name: moved[name] + eta * k * correction[name] for name in w}
        shares = [p[i] for i in cohort]
        counted = range(len(SIZES)) if options["drift_mean"] == "all" else cohort
        added = weighted_mean([h[i] for i in counted], [p[i] for i in counted])
        average = weighted_mean([trained[i] for i in cohort], shares)
        w = {name: average[name] + added[name] for name in w}
        toy.step(cohort)
        assert_close(toy.server["model"], w, 1e-12)
        assert_close(dict(enumerate(kept(toy, "drift"))), dict(enumerate(h)), 1e-12)
    assert max(float(leaf.abs().max()) for leaf in tensors(h[0])) > 1e-2


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
@pytest.mark.parametrize("hosts", [1, 3])
def test_inv_dc_3_the_server_holds_the_means_of_what_clients_hold(options: Any, hosts: int) -> None:
    toy = toy_of(FedDC(alpha=0.1, **options), hosts=hosts)
    p = [float(n) if options["aggregation"] == "samples" else 1.0 for n in SIZES]
    expected = {"mean_update": "update"} if options["correction"] != "none" else {}
    expected |= {"mean_drift": "drift"} if options["drift_mean"] == "all" else {}
    for cohort in COHORTS:
        before = toy.states()
        toy.step(cohort)
        assert set(toy.server) == {"model", *expected}
        for name, own in expected.items():
            assert_close(toy.server[name], weighted_mean(kept(toy, own), p), 1e-12)
        for client in set(before) - set(cohort):
            assert_equal(toy.states()[client], before[client])


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("alpha", [0.01, 0.5])
def test_inv_dc_4_without_correction_and_with_all_drifts_it_is_feddyn(mode: str, alpha: float) -> None:
    train = TRAIN.model_copy(update={"momentum": 0.5})
    dc = toy_of(FedDC(alpha=alpha, correction="none", drift_mean="all", aggregation="uniform"), train, mode=mode)
    dyn = toy_of(FedDyn(alpha=alpha), train, mode=mode)
    for cohort in COHORTS:
        assert_close(dc.step(cohort)["model"], dyn.step(cohort)["model"], 1e-12)
        assert_close(dc.server["mean_drift"], dyn.server["displacement"], 1e-12)


@pytest.mark.parametrize("correction", ["update", "gradient", "none"])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_inv_dc_5_where_everyone_takes_part_both_means_of_drifts_agree(correction: Any, weights: Any) -> None:
    one, other = (
        toy_of(FedDC(alpha=0.2, correction=correction, drift_mean=drifts, aggregation=weights))
        for drifts in ("cohort", "all")
    )
    for cohort in EVERYONE:
        assert_close(one.step(cohort)["model"], other.step(cohort)["model"], 1e-12)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_dc_6_a_first_round_of_vanishing_alpha_trains_as_federated_averaging_and_adds_the_drift(mode: str) -> None:
    for weights in ("samples", "uniform"):
        for cohort in ([0], [1, 3], [0, 1, 2, 3]):
            dc, plain = (
                toy_of(a, mode=mode)
                for a in (FedDC(alpha=1e-14, aggregation=weights, drift_mean="cohort"), FedAvg(aggregation=weights))
            )
            start = copy(dc.server["model"])
            end = plain.step(cohort)["model"]
            assert_close(dc.step(cohort)["model"], add_scaled(end, subtract(end, start), 1), 1e-12)


def test_inv_dc_7_the_correction_without_what_it_moved_is_scaffolds() -> None:
    """With a vanishing alpha, and from the same models, it trains as SCAFFOLD does, and u_i is minus its c_i."""
    settings = {"alpha": 1e-14, "correction": "gradient", "drift_mean": "all", "aggregation": "uniform"}
    dc, scaffold = toy_of(FedDC(**settings)), toy_of(Scaffold())
    for cohort in COHORTS:
        # FedDC's own w has the drifts added
        dc.server = {**dc.server, "model": copy(scaffold.server["model"])}
        dc.step(cohort)
        scaffold.step(cohort)
        assert_close(map_leaves(torch.neg, dc.server["mean_update"]), scaffold.server["control"], 1e-11)
        trained = subtract(dc.server["model"], dc.server["mean_drift"])
        assert_close(trained, scaffold.server["model"], 1e-11)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
@pytest.mark.parametrize("double", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_vectorized_agrees_with_looped(options: Any, double: bool) -> None:
    assert_modes_agree(FedDC(alpha=0.3, **options), SIZES, TRAIN, double, 1e-10 if double else 1e-5)


@pytest.mark.parametrize("correction", ["update", "gradient", "none"])
@pytest.mark.parametrize("idle", [{"local_epochs": 0}, {"lr": 0.0}])
def test_without_a_step_clients_keep_what_they_have(correction: Any, idle: dict[str, Any]) -> None:
    toy = toy_of(FedDC(correction=correction, drift_mean="all"), TRAIN.model_copy(update=idle))
    shapes = kept(toy, "drift")[0]
    state = {"drift": zeros_like(shapes)}
    if correction != "none":
        state["update"] = map_leaves(torch.ones_like, shapes)
    toy.client_hosts[0].states.replace(1, state, 0)
    before = copy(toy.server)
    for cohort in ([0, 1, 2, 3], [1, 2]):
        assert_equal(toy.step(cohort), before)
    assert_equal(toy.states()[1], state)


def test_buffers_are_averaged_and_have_no_drift() -> None:
    dataset, task = random_clients((8, 12, 6)), normalized_layers()
    for options in OPTIONS:
        toy = Toy(FedDC(alpha=1e-13, **options), dataset, task, TRAIN)
        plain = Toy(FedAvg(aggregation=options["aggregation"]), dataset, task, TRAIN)
        toy.step([0, 1])
        plain.step([0, 1])
        network = toy.task.network
        trees = [tree for name, tree in toy.server.items() if name != "model"] + list(toy.states()[0].values())
        assert trees and all(set(tree) == set(network.parameter_names) for tree in trees)
        assert network.buffer_names
        for name in network.buffer_names:
            assert_close(toy.server["model"][name], plain.server["model"][name], 1e-10)


@pytest.mark.parametrize("drifts", ["cohort", "all"])
def test_messages_are_two_models_and_one_without_correction(drifts: Any) -> None:
    for correction, models in (("update", 2), ("gradient", 2), ("none", 1)):
        toy = toy_of(FedDC(correction=correction, drift_mean=drifts))
        size = models * num_bytes(toy.server["model"])
        toy.step([0, 2])
        assert toy.federation.traffic.by_client == dict.fromkeys((0, 2), (size, size))


def test_what_is_undefined_is_refused() -> None:
    toy = toy_of(FedDC())
    with pytest.raises(ConfigError, match=r"algorithm\.alpha is 0.*algorithm=fedavg"):
        FedDC(alpha=0).check(toy.task, toy.context)
    FedDC(alpha=1e-9).check(toy.task, toy.context)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"momentum": 0.9}, r"train\.momentum is 0\.9.*correction=none.*train\.momentum=0"),
        ({"momentum": 0.9, "nesterov": True}, r"without train\.nesterov.*correction=none"),
        ({"momentum": 0.9, "dampening": 0.5}, r"without train\.dampening"),
        ({"optimizer": "adam"}, r"train\.optimizer=sgd.*correction=none"),
    ]
    for changes, words in refused:
        context = toy_of(FedDC(), TRAIN.model_copy(update=changes)).context
        for correction in ("update", "gradient"):
            with pytest.raises(ConfigError, match=words):
                FedDC(correction=correction).check(toy.task, context)
        FedDC(correction="none").check(toy.task, context)


def test_remarks() -> None:
    part = toy_of(FedDC()).context
    everyone = toy_of(FedDC(), TRAIN.model_copy(update={"clients_per_round": "all"})).context
    clipped = toy_of(FedDC(), TRAIN.model_copy(update={"max_grad_norm": 10.0})).context
    (said,) = FedDC(drift_mean="cohort").remarks(part)
    assert "algorithm.drift_mean=all" in said
    assert not FedDC(drift_mean="cohort").remarks(everyone) and not FedDC().remarks(part)
    (said,) = FedDC(drift_mean="all").remarks(clipped)
    assert "train.max_grad_norm" in said
    assert not FedDC(drift_mean="all", correction="none").remarks(clipped)


def test_the_objective_has_the_gradient_of_three_terms() -> None:
    task = two_layers()
    model, received, drift, correction = (task.network.initialize(seed) for seed in range(4))
    part = random_clients((6,)).load(0)["train"]

    def gradients(value: Tensor, at: Tree) -> Tree:
        return dict(zip(at, torch.autograd.grad(value, list(at.values())), strict=True))

    theta = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
    known = {"anchor": subtract(received, drift), "correction": correction}
    found = gradients(FedDC(alpha=0.3).objective(theta, Batch(part.x, part.y), task, known, None), theta)
    plain = gradients(F.cross_entropy(task.network.logits(theta, part.x), part.y), theta)
    for name, leaf in model.items():
        assert_close(found[name], plain[name] + 0.3 * (drift[name] + leaf - received[name]) + correction[name], 1e-12)
