"""FedAS: invariants AS of alignment, Fisher traces and the mean; the three passes by hand; both rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedas import FedAS
from algorithms.fedavg import FedAvg
from algorithms.fedper import FedPer
from algorithms.parts.prototypes import class_means
from rayfl.engine.client import Client
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.models.networks.recurrent import CharLSTM
from rayfl.params import Tree, copy
from rayfl.tasks.classification import Classification
from tests.support.partial_toys import (
    COHORTS,
    TRAIN,
    held_out_accuracy,
    initial,
    labelled,
    loss_of,
    partly_fixed,
    planted_clients,
    take,
    three_layers,
    toy_of,
)
from tests.support.toy_networks import softmax_regression, two_layers
from tests.support.toys import CPU, ListDataset, RelabelledStreams, Toy, assert_close, assert_equal, random_clients

HEAD = ("head.weight", "head.bias")


class Asked(FedAS):
    """Answers what a pass finds, for models that are sent."""

    async def trace(self, client: Client, model: Tree) -> Tree:
        return {"trace": await self.fisher_trace(client, model)}

    async def align(self, client: Client, shared: Tree) -> Tree:
        before, state = copy(shared), copy(client.state)
        found = await self.aligned(client, shared)
        assert_equal(shared, before)
        assert_equal(client.state, state)
        return found


def traces(toy: Toy, model: Tree, clients: list[int]) -> list[float]:
    """F_k by client."""
    found = toy.federation.map(toy.algorithm.trace, clients, {"model": model})  # type: ignore[attr-defined]
    return [found[client]["trace"] for client in clients]


@pytest.mark.parametrize("make", [two_layers, three_layers])
@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
def test_inv_as_1_without_alignment_and_traces_it_is_fedper(policy: Any, make: Any) -> None:
    toys = [
        toy_of(method, task=make())
        for method in (FedAS(alignment_epochs=0, aggregation=policy), FedPer(aggregation=policy))
    ]
    for cohort in COHORTS:
        assert_equal(toys[0].step(cohort)["shared"], toys[1].step(cohort)["shared"])
    for client, state in toys[1].states().items():
        assert_equal(toys[0].states()[client]["personal"], state["personal"])
    scores, expected = (toy.scores() for toy in toys)
    for client in range(4):
        assert scores[client]["received"].vector.tolist() == expected[client]["personalized"].vector.tolist()


@pytest.mark.parametrize("form", ["samples", "means"])
def test_inv_as_2_features_that_are_those_wanted_stay(form: Any) -> None:
    train = TrainConfig(rounds=2, clients_per_round=1, local_epochs=1, batch_size=None, lr=0.1, weight_decay=0.3)
    toy = Toy(Asked(alignment_form=form, alignment_lr=5.0), labelled([0, 1, 2], [0, 0, 1]), two_layers(), train)
    body = toy.server["shared"]
    # one sample a class: the initial body, which is the client's, is drawn to its own features
    assert_close(toy.federation.map(toy.algorithm.align, [0], {"shared": body})[0], body, 1e-14)  # type: ignore[attr-defined]
    other = {name: leaf + 0.1 for name, leaf in body.items()}
    moved = toy.federation.map(toy.algorithm.align, [0], {"shared": other})[0]  # type: ignore[attr-defined]
    assert (moved["inner.weight"] - other["inner.weight"]).abs().max() > 1e-3
    # two samples of a class: each is drawn to their mean, which is where the mean of both is already
    spread = toy.federation.map(toy.algorithm.align, [1], {"shared": body})[1]  # type: ignore[attr-defined]
    assert ((spread["inner.weight"] - body["inner.weight"]).abs().max() > 1e-3) == (form == "samples")


def test_inv_as_3_traces_are_not_negative_and_equal_ones_give_the_plain_mean() -> None:
    part, equal = random_clients([8]).load(0)["train"], RelabelledStreams(0, (0,) * 3)
    toy = Toy(Asked(), ListDataset([(part.x, part.y)] * 3), two_layers(), TRAIN, streams=equal)
    found = traces(toy, initial(toy), [0, 1, 2])
    assert found[0] > 0 and found == [found[0]] * 3
    toy = Toy(Asked(), random_clients([8, 12, 6, 10]), two_layers(), TRAIN)
    assert min(traces(toy, initial(toy), [0, 1, 2, 3])) > 0

    class Even(FedAS):
        async def fisher_trace(self, client: Client, model: Tree) -> float:
            return 0.37

    toys = [toy_of(Even(), task=two_layers()), toy_of(FedAS(aggregation="uniform"), task=two_layers())]
    for cohort in COHORTS:
        assert_close(toys[0].step(cohort), toys[1].step(cohort), 1e-12)


def test_inv_as_4_of_one_client_the_mean_is_its_body() -> None:
    toy = Toy(FedAS(), random_clients([9]), two_layers(), TRAIN)
    for _ in range(2):
        assert_equal(toy.step([0])["shared"], toy.states()[0]["body"])


def test_inv_as_5_the_order_of_the_cohort_does_not_matter() -> None:
    toys = [toy_of(FedAS()) for _ in range(2)]
    for first, second in (([0, 1, 2], [2, 0, 1]), ([1, 3], [3, 1]), ([0, 1, 2, 3], [3, 2, 1, 0])):
        assert_equal(toys[0].step(first), toys[1].step(second))
        assert_equal(toys[0].states(), toys[1].states())


def test_inv_as_6_the_head_moves_in_the_joint_training_alone() -> None:
    toy = toy_of(FedAS(alignment_lr=1.0), TRAIN.model_copy(update={"lr": 0.0, "weight_decay": 0.0}))
    for cohort in COHORTS:
        toy.step(cohort)
    for state in toy.states().values():
        assert_equal(state["personal"], take(initial(toy), HEAD))
    # the alignment has a rate of its own
    assert (toy.server["shared"]["inner.weight"] - initial(toy)["inner.weight"]).abs().max() > 1e-5


def test_inv_as_7_only_ratios_of_traces_matter_and_zero_leaves_out() -> None:
    class Given(FedAS):
        scale: float = 1.0
        zeros: tuple[int, ...] = ()

        async def fisher_trace(self, client: Client, model: Tree) -> float:
            return 0.0 if client.id in self.zeros else self.scale * (1 + client.id)

    def body(**options: Any) -> Tree:
        shared: Tree = toy_of(Given(**options), task=two_layers()).step([0, 1, 2])["shared"]
        return shared

    plain = body()
    alone = toy_of(FedAS(), task=two_layers())
    alone.step([0, 1, 2])
    bodies = [alone.states()[client]["body"] for client in range(3)]
    assert_close(plain, {n: (bodies[0][n] + 2 * bodies[1][n] + 3 * bodies[2][n]) / 6 for n in plain}, 1e-12)
    for scale in (1e-6, 1e4):
        assert_close(body(scale=scale), plain, 1e-12)
    assert_close(body(zeros=(0,)), {n: (2 * bodies[1][n] + 3 * bodies[2][n]) / 5 for n in plain}, 1e-12)
    # nobody has one: weights are samples, 8, 12 and 6
    sums = {n: (8 * bodies[0][n] + 12 * bodies[1][n] + 6 * bodies[2][n]) / 26 for n in plain}
    assert_close(body(zeros=(0, 1, 2)), sums, 1e-12)


@pytest.mark.parametrize("form", ["batches", "samples"])
@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_as_8_traces_of_softmax_regression_are_the_closed_form(form: Any, mode: str) -> None:
    data = random_clients([10, 3, 7], seed=2)
    toy = Toy(Asked(fisher_form=form), data, softmax_regression(), TRAIN, mode=mode)
    model = {name: leaf + 0.5 for name, leaf in initial(toy).items()}
    for client, found in zip(range(3), traces(toy, model, [0, 1, 2]), strict=True):
        part = data.load(client)["train"]
        n = len(part)
        plan = plan_batches(n, 4, -(-n // 4), toy.context.streams.generator("batches.fisher", 0, client))
        expected = 0.0
        for index in plan.batches(CPU) if form == "batches" else torch.arange(n).split(1):
            x, y = part.x[index], part.y[index]
            errors = (x @ model["head.weight"].T + model["head.bias"]).softmax(1) - F.one_hot(y, 3)
            inputs = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
            expected += float((errors.T @ inputs / len(x)).square().sum())
        assert abs(found - expected / (n if form == "samples" else 1)) < 1e-12


@pytest.mark.parametrize("options", [{"min_local_steps": 9}, {"max_local_steps": 1}, {"drop_last": True}])
def test_traces_are_of_one_pass_however_many_steps_a_local_update_has(options: dict[str, Any]) -> None:
    found = {}
    for form in ("batches", "samples"):
        for train in (TRAIN, TRAIN.model_copy(update=options)):
            toy = Toy(Asked(fisher_form=form), random_clients([10, 3, 7], seed=2), softmax_regression(), train)
            found.setdefault(form, []).append(traces(toy, initial(toy), [0, 1, 2]))
    assert found["samples"][0] == pytest.approx(found["samples"][1], rel=1e-12)
    # mini-batches that are dropped have no gradient: of 10 and of 7 samples in mini-batches of 4
    whole = [f == pytest.approx(g, rel=1e-12) for f, g in zip(*found["batches"], strict=True)]
    assert whole == ([False, True, False] if "drop_last" in options else [True, True, True])


def sgd(toy: Toy, tree: Tree, loss: Any, stream: str, steps: int, client: int, **rules: Any) -> Tree:
    """Steps of PyTorch's optimizer on the mini-batches of a stream."""
    part = toy.dataset.load(client)["train"]
    moved = {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}
    optimizer = torch.optim.SGD(moved.values(), **rules)
    plan = plan_batches(len(part), 4, steps, toy.context.streams.generator(stream, toy.round, client))
    for index in plan.batches(CPU):
        optimizer.zero_grad()
        loss(moved, part.x[index], part.y[index]).backward()
        optimizer.step()
    return {name: leaf.detach() for name, leaf in moved.items()}


@pytest.mark.parametrize("first", [True, False])
def test_the_three_passes_by_hand(first: bool) -> None:
    toy = toy_of(FedAS(alignment_lr=0.5, alignment_epochs=2, align_first=first), task=two_layers())
    network, part = toy.task.network, toy.dataset.load(1)["train"]
    kept = initial(toy)

    def plain(moved: Tree, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(network.logits(moved, x), y)

    for round, cohort in enumerate(([1], [0], [1])):
        received = copy(toy.server["shared"])
        if 1 in cohort:
            means = class_means(network.head_inputs_and_logits(kept, part.x)[0], part.y, 3)[1]
            head = take(kept, HEAD)

            def alignment(moved: Tree, x: Tensor, y: Tensor, means: Tensor = means, head: Tree = head) -> Tensor:
                features = network.head_inputs_and_logits({**moved, **head}, x)[0]
                present = sorted(set(y.tolist()))
                terms = [F.mse_loss(features[y == c], means[c].expand_as(features[y == c])) for c in present]
                return torch.stack(terms).sum()

            aligned = sgd(toy, received, alignment, "batches.align", 6, 1, lr=0.5) if first or round else received
            rules = {"lr": 0.1, "momentum": TRAIN.momentum, "weight_decay": TRAIN.weight_decay}
            kept = sgd(toy, {**aligned, **head}, plain, "batches", 6, 1, **rules)
        toy.step(cohort)
        state = toy.states().get(1)
        assert state is not None
        assert_close({**state["body"], **state["personal"]}, kept, 1e-12)


def test_rows_of_clients_sampled_and_never_sampled() -> None:
    toy = toy_of(FedAS())
    for cohort in COHORTS:
        toy.step(cohort)
    scores, states = toy.scores(), toy.states()
    for client in range(3):
        kept = {**states[client]["body"], **states[client]["personal"]}
        assert abs(scores[client]["personalized"].loss - loss_of(toy, kept, client)) < 1e-12
        received = {**toy.server["shared"], **states[client]["personal"]}
        assert abs(scores[client]["received"].loss - loss_of(toy, received, client)) < 1e-12
    assert abs(scores[3]["personalized"].loss - loss_of(toy, initial(toy), 3)) < 1e-12
    # between its participations a client's model stays what it is
    toy.step([1])
    assert toy.scores()[0]["personalized"].vector.tolist() == scores[0]["personalized"].vector.tolist()


def test_traces_of_recurrent_networks() -> None:
    network = CharLSTM(hidden=6).network(InputSpec("tokens", (5,), 12, vocabulary=12))
    x, y = torch.randint(12, (6, 5), generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    train = TRAIN.model_copy(update={"batch_size": None})
    toy = Toy(Asked(), ListDataset([(x, y)], 12), Classification(network), train)
    model = {name: leaf.requires_grad_() for name, leaf in network.initialize(3).items()}
    slopes = torch.autograd.grad(F.cross_entropy(network.logits(model, x), y), list(model.values()))
    expected = sum(float(slope.square().sum()) for slope in slopes)
    assert abs(traces(toy, network.initialize(3), [0])[0] - expected) < 1e-5 * expected
    toy.run(2)


def test_what_it_cannot_run_with_is_refused() -> None:
    toy = toy_of(FedAS(), TRAIN.model_copy(update={"max_grad_norm": 1.0}), two_layers())
    with pytest.raises(ConfigError, match=r"algorithm\.aggregation=fisher .*train\.max_grad_norm=null"):
        FedAS().check(toy.task, toy.context)
    FedAS(aggregation="samples").check(toy.task, toy.context)
    with pytest.raises(ConfigError, match="FedAS needs the last layer's weight"):
        FedAS().check(partly_fixed("head.weight"), toy.context)
    with pytest.raises(ConfigError, match="no body is left"):
        FedAS().check(partly_fixed("inner.weight", "inner.bias"), toy.context)


def test_vectorized_agrees_with_looped(caplog: pytest.LogCaptureFixture) -> None:
    for options in ({}, {"alignment_form": "means", "fisher_form": "samples"}):
        looped, stacked = (toy_of(FedAS(**options), task=two_layers(), mode=m) for m in ("looped", "vectorized"))
        for cohort in ([0, 1, 2, 3], [1, 3], [0, 1, 2]):
            assert_close(looped.step(cohort), stacked.step(cohort))
        assert_close(looped.states(), stacked.states())
    assert "failed together" not in caplog.text


@pytest.mark.slow
def test_personal_heads_serve_clients_that_label_differently() -> None:
    train = TRAIN.model_copy(update={"rounds": 15, "clients_per_round": 6, "local_epochs": 3, "batch_size": 10})
    accuracy = {}
    for algorithm, row in ((FedAS(), "personalized"), (FedAvg(), "global")):
        toy = Toy(algorithm, planted_clients("head"), two_layers(12, 8), train, mode="vectorized")
        toy.run()
        accuracy[algorithm.name] = held_out_accuracy(toy, row)
    assert accuracy["fedas"] > accuracy["fedavg"] + 0.1, accuracy
