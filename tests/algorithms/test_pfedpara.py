"""pFedPara: rounds by an oracle in plain PyTorch, invariants PAR, messages, newcomers, what is refused, learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from algorithms.fedavg import FedAvg
from algorithms.fedper import FedPer
from algorithms.heterofl import HeteroFL
from algorithms.lg_fedavg import LGFedAvg
from algorithms.local import Local
from algorithms.pfedpara import PFedPara
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree, num_bytes, tensors
from tests.support.cases import ALGORITHMS
from tests.support.factorized_toys import factorized_layers, logits_of
from tests.support.partial_toys import (
    COHORTS,
    TRAIN,
    held_out_accuracy,
    initial,
    labelled,
    planted_clients,
    take,
    vectors,
)
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal, random_clients

HEAD_NEEDED = {"fedper", "fedrep", "lg_fedavg", "fedbabu", "floco", "fedpac", "feddbe", "fedsr", "fedetf", "fednh"}
TAKE_FACTORS = {"fedper", "fedrep", "lg_fedavg", "fedbabu"}
"""What is not the head's weight alone, but all tensors of the head."""
RAGGED = (17, 1, 6, 10)
GROUPS = ("own_factors", "own_factors_and_head")


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, task: Any = None, **options: Any) -> Toy:
    """The method on four random clients of several sizes and a network with factors."""
    toy = Toy(algorithm, random_clients(RAGGED, classes=9), task or factorized_layers(gamma=1), train, **options)
    toy.algorithm.check(toy.task, toy.context)
    return toy


def own_names(toy: Toy, group: str = "own_factors") -> tuple[str, ...]:
    """What stays with a client, by the ends of names."""
    ends = ("weight_x2", "weight_y2")
    head = group == "own_factors_and_head"
    return tuple(name for name in initial(toy) if name.endswith(ends) or (head and name.startswith("head.")))


@pytest.mark.parametrize("layers", ["all", "hidden"])
@pytest.mark.parametrize("group", GROUPS)
def test_inv_par_1_rounds_are_those_of_an_oracle_in_plain_pytorch(group: Any, layers: str) -> None:
    toy = toy_of(PFedPara(head_group=group), task=factorized_layers(gamma=1, layers=layers))
    kept = own_names(toy, group)
    assert ("head.weight_x1" in initial(toy)) == (layers == "all")
    shared = {name: leaf for name, leaf in initial(toy).items() if name not in kept}
    owned: dict[int, Tree] = {}
    for round, cohort in enumerate(([0, 1, 2, 3], [0, 2], [1, 3], [2])):
        sent, sizes = [], []
        for client in cohort:
            data = toy.dataset.load(client)["train"]
            model = {**shared, **owned.get(client, take(initial(toy), kept))}
            model = {name: leaf.clone().requires_grad_() for name, leaf in model.items()}
            optimizer = torch.optim.SGD(list(model.values()), lr=0.1, momentum=0.5, weight_decay=0.01)
            n, generator = len(data.y), toy.context.streams.generator("batches", round, client)
            for index in plan_batches(n, 4, 2 * -(-n // 4), generator).batches(CPU):
                optimizer.zero_grad()
                F.cross_entropy(logits_of(model, data.x[index], "pfedpara"), data.y[index]).backward()
                optimizer.step()
            trained = {name: leaf.detach() for name, leaf in model.items()}
            sent.append(take(trained, shared))
            sizes.append(n)
            owned[client] = take(trained, kept)
        shared = {
            name: sum(n * one[name] for n, one in zip(sizes, sent, strict=True)) / sum(sizes)  # type: ignore[misc]
            for name in shared
        }
        toy.step(cohort)
        assert_close(toy.server, {"shared": shared}, 1e-12)
        assert_close({client: state["personal"] for client, state in toy.states().items()}, owned, 1e-12)
    for client, rows in toy.scores(final=True).items():
        data = toy.dataset.load(client)["test"]
        loss = F.cross_entropy(logits_of({**shared, **owned[client]}, data.x, "pfedpara"), data.y)
        assert abs(rows["personalized"].loss - float(loss)) < 1e-12


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("group", GROUPS)
def test_inv_par_2_it_is_fedper_with_the_second_factors_as_the_head(group: Any, mode: str) -> None:
    ours, theirs = (toy_of(method(head_group=group), mode=mode) for method in (PFedPara, FedPer))
    for cohort in COHORTS:
        assert_equal(ours.step(cohort), theirs.step(cohort))
        assert ours.federation.traffic.by_client == theirs.federation.traffic.by_client
    assert_equal(ours.states(), theirs.states())
    assert vectors(ours.scores(), "personalized") == vectors(theirs.scores(), "personalized")


def test_inv_par_3_with_one_client_it_is_federated_averaging_of_the_same_model() -> None:
    ours, theirs = (toy_of(method) for method in (PFedPara(), FedAvg()))
    for _ in range(3):
        found, whole = ours.step([2]), theirs.step([2])["model"]
        assert_equal({**found["shared"], **ours.states()[2]["personal"]}, dict(whole))


def test_inv_par_4_its_mirror_shares_the_second_factors() -> None:
    mirror, ours = toy_of(LGFedAvg(head_group="own_factors")), toy_of(PFedPara())
    names = own_names(ours)
    assert set(mirror.step([0, 1])["shared"]) == set(names)
    assert set(ours.step([0, 1])["shared"]) == set(initial(ours)) - set(names)


@pytest.mark.parametrize("group", GROUPS)
def test_the_second_factors_never_travel_and_change_only_in_their_clients_rounds(group: Any) -> None:
    toy = toy_of(PFedPara(head_group=group))
    kept, known = own_names(toy, group), dict[int, Any]()
    assert kept
    for cohort in COHORTS:
        toy.step(cohort)
        states = {client: state["personal"] for client, state in toy.states().items()}
        for client, own in states.items():
            before = known.get(client, take(initial(toy), kept))
            assert set(own) == set(kept)
            assert all(torch.equal(own[name], before[name]) for name in kept) == (client not in cohort)
        known = states
        size = num_bytes(toy.server["shared"])
        assert size == num_bytes(initial(toy)) - num_bytes(take(initial(toy), kept))
        assert {tuple(one) for one in toy.federation.traffic.by_client.values()} == {(size, size)}


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("method", [PFedPara(), PFedPara(head_group="own_factors_and_head"), FedAvg()])
def test_vectorized_agrees_with_looped_and_all_is_finite(method: Any, batch: int, double: bool) -> None:
    """Also with clients of one sample, mini-batches of one, and a client whose samples are all of one class."""
    data = labelled([0, 1, 0, 1, 1, 2, 0, 0, 2], [1, 1, 1], [2], [0, 0, 1, 0, 1, 1])
    if not double:
        data._clients = [(x.float(), y) for x, y in data._clients]
        data._validation = [(x.float(), y) for x, y in data._validation]
    train = TRAIN.model_copy(update={"batch_size": batch})
    looped, stacked = (
        Toy(method, data, factorized_layers(gamma=0, double=double), train, mode=mode)
        for mode in ("looped", "vectorized")
    )
    for cohort in ([0, 1, 2, 3], [1, 2], [0, 3]):
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-12 if double else 1e-5)
        assert all(bool(leaf.isfinite().all()) for leaf in tensors(stacked.server))
    assert_close(looped.states(), stacked.states(), 1e-12 if double else 1e-5)


def test_a_newcomer_fits_factors_of_its_own_to_the_shared_ones() -> None:
    toy = toy_of(PFedPara(), unseen=1)
    for cohort in ([0, 1], [1, 2]):
        toy.step(cohort)
    before = {name: leaf.clone() for name, leaf in toy.server["shared"].items()}
    found = toy.scores(final=True, newcomers=True)
    assert list(found) == [3]
    assert_equal(toy.server["shared"], before)
    toy.scores(final=True)
    assert 3 not in toy.states()


@pytest.mark.parametrize("method", [PFedPara(), FedPer(head_group="own_factors")])
@pytest.mark.parametrize("task", [two_layers(), factorized_layers("fedpara"), factorized_layers("low_rank")])
def test_models_without_such_factors_are_refused(task: Any, method: Any) -> None:
    toy = Toy(method, random_clients(RAGGED), task, TRAIN)
    with pytest.raises(ConfigError, match=r"head_group=own_factors needs .* set model\.factorize=pfedpara"):
        method.check(task, toy.context)


@pytest.mark.parametrize("case", [case for case in ALGORITHMS.values() if case.algorithm.name in HEAD_NEEDED])
def test_methods_on_the_last_layers_weight_refuse_one_with_factors_or_take_its_factors(case: Any) -> None:
    toy = toy_of(PFedPara())
    if case.algorithm.name in TAKE_FACTORS:
        case.algorithm.check(toy.task, toy.context)
        return
    with pytest.raises(ConfigError, match=r"needs the last layer's weight, .* set model\.factorize\.layers=hidden"):
        case.algorithm.check(toy.task, toy.context)


def test_groups_of_adapters_and_cuts_by_width_are_refused() -> None:
    task = factorized_layers()
    context = toy_of(PFedPara()).context
    with pytest.raises(ConfigError, match="head_group is lora_b, but this model has no adapters"):
        FedPer(head_group="lora_b").check(task, context)
    for composition in ("fedpara", "pfedpara"):
        with pytest.raises(ConfigError, match=r"'hidden\.1' has factors \(model\.factorize\)"):
            HeteroFL(widths=(0.5,)).check(factorized_layers(composition), context)


@pytest.mark.slow
def test_learns_where_clients_label_differently() -> None:
    """One model cannot serve clients whose classes are permuted, and one client cannot learn the body alone."""
    train = TRAIN.model_copy(update={"rounds": 40, "clients_per_round": 6, "local_epochs": 3, "batch_size": 10})
    accuracy = {}
    for method, row in ((PFedPara(), "personalized"), (FedAvg(), "global"), (Local(), "personalized")):
        toy = Toy(method, planted_clients("head", inputs=5), factorized_layers(gamma=1), train, mode="vectorized")
        toy.run()
        accuracy[method.name] = held_out_accuracy(toy, row)
    assert accuracy["pfedpara"] > accuracy["fedavg"] + 0.1, accuracy
