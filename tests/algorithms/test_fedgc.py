"""FedGC: invariants GC of the correction, whole rounds against an oracle, messages, rows, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedgc import FedGC, corrected
from algorithms.fedper import FedPer
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree
from tests.support.partial_toys import TRAIN, initial, labelled, partly_fixed, planted_clients, take, three_layers
from tests.support.toy_networks import two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

SEVERAL = ([0, 1, 0, 1, 1, 0], [1, 1], [2, 0, 2, 2], [0, 2, 1])
COHORTS = ([0, 2], [1, 2], [0, 1, 2], [1, 0])
"""Client 3, which has all classes, is never sampled."""


def several(algorithm: Any, **options: Any) -> Toy:
    return Toy(algorithm, labelled(*SEVERAL), **{"task": two_layers(), "train": TRAIN, **options})


def regularizer(rows: dict[int, dict[int, Tensor]]) -> Tensor:
    """Reg of the embeddings by client and class, as it is written."""
    owners = {y: [k for k, own in rows.items() if y in own] for own in rows.values() for y in own}
    means = {y: torch.stack([rows[k][y].detach() for k in ks]).mean(0) for y, ks in owners.items()}
    total = torch.zeros((), dtype=torch.float64)
    for own in rows.values():
        for y in own:
            near = (means[y] @ means[y]).exp()
            rest = [(w @ means[y]).exp() for j, theirs in rows.items() if y not in rows[j] for w in theirs.values()]
            total = total - (near / (near + sum(rest))).log()
    return total


class Oracle:
    """The whole method with dictionaries and loops, in plain PyTorch."""

    def __init__(self, toy: Toy, factor: float) -> None:
        self.toy, self.factor, network = toy, factor, toy.task.network
        model = initial(toy)
        self.body = {name: leaf for name, leaf in model.items() if name not in network.head_names}
        self.head = take(model, network.head_names)
        self.heads: dict[int, Tree] = {}

    def round(self, number: int, cohort: list[int]) -> None:
        bodies, sizes = [], []
        for client in cohort:
            trained = self.trained(number, client)
            self.heads[client] = take(trained, self.head)
            bodies.append(take(trained, self.body))
            sizes.append(len(SEVERAL[client]))
        total = sum(sizes)
        self.body = {
            name: torch.stack([n / total * one[name] for n, one in zip(sizes, bodies, strict=True)]).sum(0)
            for name in self.body
        }
        weights = {k: head["head.weight"].clone() for k, head in self.heads.items()}
        rows = {k: {y: weights[k][y].clone().requires_grad_() for y in sorted(set(SEVERAL[k]))} for k in weights}
        leaves = [w for own in rows.values() for w in own.values()]
        for client, own in rows.items():
            for y, slope in zip(own, torch.autograd.grad(regularizer(rows), leaves[: len(own)], allow_unused=True,
                                                         materialize_grads=True), strict=True):  # fmt: skip
                weights[client][y] -= self.factor * 0.1 * slope
            leaves = leaves[len(own) :]
        self.heads = {k: {**head, "head.weight": weights[k]} for k, head in self.heads.items()}

    def trained(self, number: int, client: int) -> Tree:
        part, network = self.toy.dataset.load(client)["train"], self.toy.task.network
        head = self.heads.get(client, self.head)
        model = {name: leaf.clone().requires_grad_() for name, leaf in {**self.body, **head}.items()}
        optimizer = torch.optim.SGD(model.values(), lr=0.1, momentum=0.5, weight_decay=0.01)
        classes = sorted(set(part.y.tolist()))
        places = torch.tensor([classes.index(y) for y in part.y.tolist()])
        streams = self.toy.context.streams.generator("batches", number, client)
        for index in plan_batches(len(part.y), 4, 2 * -(-len(part.y) // 4), streams).batches(CPU):
            optimizer.zero_grad()
            logits = network.logits(model, part.x[index])[:, classes]
            F.cross_entropy(logits, places[index]).backward()
            optimizer.step()
        return {name: leaf.detach() for name, leaf in model.items()}


@pytest.mark.parametrize("factor", [0.0, 1.0, 7.0])
def test_inv_gc_1_rounds_are_those_of_an_oracle_in_plain_pytorch(factor: float) -> None:
    toy = several(FedGC(correction_weight=factor))
    oracle = Oracle(toy, factor)
    for number, cohort in enumerate(COHORTS):
        toy.step(cohort)
        oracle.round(number, sorted(cohort))
        assert_close(toy.server["shared"], oracle.body, 1e-12)
        for client, head in oracle.heads.items():
            assert_close(toy.server["embeddings"][str(client)], head["head.weight"], 1e-12)
            assert_close(toy.states()[client]["personal"]["head.bias"], head["head.bias"], 1e-12)
    assert_equal(toy.server["embeddings"]["3"], initial(toy)["head.weight"])
    assert toy.server["exist"].tolist() == [[1, 1, 0], [0, 1, 0], [1, 0, 1], [0, 0, 0]]


def problem(seed: int = 2) -> tuple[Tensor, Tensor]:
    """Embeddings (4, 5, 3), and whose classes there are: class 4 is nobody's, client 3 has none."""
    rows = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    exist = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]], dtype=torch.bool)
    return rows, exist


def test_inv_gc_2_the_step_is_the_slope_of_reg() -> None:
    rows, exist = problem()
    leaves = {k: {y: rows[k, y].clone().requires_grad_() for y in range(5) if exist[k, y]} for k in range(4)}
    regularizer(leaves).backward()  # type: ignore[no-untyped-call]
    found = corrected(rows, exist, 0.3)
    for k in range(4):
        for y in range(5):
            leaf = leaves[k].get(y)
            slope = torch.zeros(3) if leaf is None or leaf.grad is None else leaf.grad
            assert_close(found[k, y], rows[k, y] - 0.3 * slope, 1e-12)


def test_inv_gc_3_the_step_goes_down_reg_and_away_from_the_classes_of_the_others() -> None:
    rows, exist = problem()
    before, after = rows, corrected(rows, exist, 1e-3)

    def reg(now: Tensor) -> float:
        """Reg with the means of before in place of those of now."""
        total = 0.0
        for y in range(4):
            mean = before[exist[:, y], y].mean(0)
            rest = [
                float((now[k, c] @ mean).exp()) for k in range(4) for c in range(5) if exist[k, c] and not exist[k, y]
            ]
            near = float((mean @ mean).exp())
            total -= int(exist[:, y].sum()) * math.log(near / (near + sum(rest)))
        return total

    assert reg(after) < reg(before)


def test_inv_gc_4_clients_that_have_all_classes_or_alone_are_not_corrected() -> None:
    rows, _ = problem()
    everything = torch.ones(4, 5, dtype=torch.bool)
    alone = torch.zeros(4, 5, dtype=torch.bool)
    alone[2] = True
    for exist in (everything, alone, torch.zeros_like(alone)):
        assert_equal(corrected(rows, exist, 10.0), rows)


def test_inv_gc_5_embeddings_of_great_length_are_corrected_without_overflow() -> None:
    rows, exist = problem()
    assert corrected(1e3 * rows.float(), exist, 1.0).isfinite().all()


def test_inv_gc_6_without_correction_and_with_all_classes_everywhere_it_is_fedper() -> None:
    full = ([0, 1, 2, 1, 1, 2], [1, 2, 0], [2, 0, 1, 2], [0, 2, 1])
    ours, theirs = (Toy(one, labelled(*full), two_layers(), TRAIN) for one in (FedGC(correction_weight=0), FedPer()))
    for cohort in COHORTS:
        ours.step(cohort)
        theirs.step(cohort)
    assert_close(ours.server["shared"], theirs.server["shared"], 1e-12)
    assert_close(ours.states(), theirs.states(), 1e-12)


def test_messages() -> None:
    toy = several(FedGC())
    network = toy.task.network
    body = sum(leaf.numel() for name, leaf in initial(toy).items() if name not in network.head_names)
    for cohort in COHORTS:
        toy.step(cohort)
        weight = 3 * 7
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (8 * (body + weight), 8 * (body + weight + 3)))


def test_rows_are_of_the_clients_own_classes() -> None:
    toy = several(FedGC())
    for step in range(3):
        if step:
            toy.step([0, 2])
        for client, rows in toy.scores().items():
            part, state = toy.dataset.load(client)["test"], toy.states().get(client, {})
            head = {**take(initial(toy), toy.task.network.head_names), **state.get("personal", {})}
            model = {**toy.server["shared"], **head, "head.weight": toy.server["embeddings"][str(client)]}
            classes = sorted(set(part.y.tolist()))
            logits = toy.task.network.logits(model, part.x, training=False)[:, classes]
            places = torch.tensor([classes.index(y) for y in part.y.tolist()])
            assert set(rows) == {"personalized"}
            assert abs(rows["personalized"].loss - float(F.cross_entropy(logits, places))) < 1e-12


def test_newcomers_fit_a_head_of_their_own_classes() -> None:
    toy = several(FedGC(), unseen=1)
    for cohort in COHORTS:
        toy.step(cohort)
    before = toy.server
    rows = toy.scores(newcomers=True)[3]
    assert math.isfinite(rows["personalized"].loss) and 3 not in toy.states()
    assert_equal(toy.server, before)
    toy = several(FedGC(), unseen=1, unseen_epochs=0)
    assert rows["personalized"].loss < toy.scores(newcomers=True)[3]["personalized"].loss


def test_clients_learn() -> None:
    toy = Toy(FedGC(), planted_clients("classes"), two_layers(inputs=12), TRAIN.model_copy(update={"local_epochs": 3}))
    losses = []
    for round in range(6):
        toy.step(range(8))
        if round in (0, 5):
            scores = toy.scores(split="validation").values()
            losses.append(sum(rows["personalized"].loss for rows in scores) / 8)
    assert losses[1] < 0.9 * losses[0], losses


def test_models_without_a_head_or_a_body_that_is_trained_are_refused() -> None:
    toy = several(FedGC())
    with pytest.raises(ConfigError, match=r"FedGC needs the last layer's weight to be trained"):
        FedGC().check(partly_fixed("head.weight"), toy.context)
    names = [name for name in two_layers().network.parameter_names if name not in two_layers().network.head_names]
    with pytest.raises(ConfigError, match=r"FedGC shares a body, but the model trains no layer before the last"):
        FedGC().check(partly_fixed(*names), toy.context)


EDGES = {
    "ragged": SEVERAL,
    "single samples": ([0], [1], [2], [1]),
    "one class a client": ([0, 0, 0], [1, 1], [2] * 6, [0]),
}


@pytest.mark.parametrize("make", [two_layers, three_layers])
@pytest.mark.parametrize("edge", list(EDGES))
@pytest.mark.parametrize("batch_size", [1, 4])
def test_vectorized_agrees_with_looped_and_all_is_finite(
    make: Any, edge: str, batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), "batch_size": batch_size})
    data = labelled(*EDGES[edge])
    looped, stacked = (Toy(FedGC(), data, make(), train, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-9)
        leaves: Tree = {**looped.server["shared"], **looped.server["embeddings"]}
        assert all(leaf.isfinite().all() for leaf in leaves.values())
    assert_close(looped.states(), stacked.states(), 1e-9)
    assert all(math.isfinite(rows["personalized"].loss) for rows in looped.scores().values())
    assert "failed together" not in caplog.text
