"""FedPCL: invariants PCL of its contrasts, whole rounds against an oracle, messages, rows, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from algorithms.fedpcl import FedPCL, contrasts, mean_prototypes
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.params import Tree
from rayfl.tasks.base import Batch
from rayfl.tasks.classification import Classification
from tests.support.partial_toys import TRAIN, initial, labelled, partly_fixed, planted_clients, three_layers
from tests.support.toy_networks import normalized_layers, two_layers
from tests.support.toys import CPU, Toy, assert_close, assert_equal

SEVERAL = ([0, 1, 0, 1, 1, 2], [1, 1], [2, 0, 2, 2], [0, 0, 1])
COHORTS = ([0, 2], [1, 2, 3], [0, 1, 2, 3], [1, 3])
HALF = 0.5
CONTRASTS: dict[str, tuple[str, ...]] = {"both": ("global", "local"), "global": ("global",), "local": ("local",)}


def several(algorithm: Any, **options: Any) -> Toy:
    return Toy(algorithm, labelled(*SEVERAL), **{"task": two_layers(), "train": TRAIN, **options})


def directions(toy: Toy, model: Tree, x: Tensor) -> Tensor:
    """z, by hand: features over their lengths."""
    features = toy.task.network.head_inputs_and_logits(model, x, training=False)[0]
    found: Tensor = features / features.square().sum(1, keepdim=True).sqrt()
    return found


def value_of(z: Tensor, y: int, table: dict[int, Tensor], tau: float, others: bool) -> Tensor:
    """One sample's contrast with one table of prototypes."""
    scores = {label: (z * prototype).sum() / tau for label, prototype in table.items()}
    against = [torch.exp(score) for label, score in scores.items() if label != y or not others]
    return torch.stack(against).sum().log() - scores[y]


class Oracle:
    """The whole method with dictionaries and loops, in plain PyTorch."""

    def __init__(self, toy: Toy, tau: float, others: bool, contrast: str) -> None:
        self.toy, self.tau, self.others, self.parts = toy, tau, others, CONTRASTS[contrast]
        self.models: dict[int, Tree] = {}
        self.sets: dict[int, dict[int, Tensor]] = {}

    def shared(self) -> dict[int, Tensor]:
        """P_y."""
        known = sorted({label for table in self.sets.values() for label in table})
        return {y: torch.stack([one[y] for one in self.sets.values() if y in one]).mean(0) for y in known}

    def round(self, number: int, cohort: list[int]) -> None:
        shared, sets = self.shared(), dict(self.sets)
        filled = [{y: table.get(y, shared[y]) for y in shared} for table in sets.values()]
        for client in cohort:
            self.models[client] = self.trained(number, client, shared, filled)
            part = self.toy.dataset.load(client)["train"]
            z = directions(self.toy, self.models[client], part.x)
            self.sets[client] = {y: z[part.y == y].mean(0) for y in sorted(set(part.y.tolist()))}

    def trained(self, number: int, client: int, shared: dict[int, Tensor], filled: list[dict[int, Tensor]]) -> Tree:
        model = self.models.get(client, initial(self.toy))
        if len(shared) < 2:
            return model
        part, network = self.toy.dataset.load(client)["train"], self.toy.task.network
        moved = [name for name in model if name not in network.head_names]
        model = {name: leaf.clone().requires_grad_(name in moved) for name, leaf in model.items()}
        optimizer = torch.optim.SGD([model[name] for name in moved], lr=0.1, momentum=0.5, weight_decay=0.01)
        steps = 2 * -(-len(part.y) // 4)
        streams = self.toy.context.streams.generator("batches", number, client)
        for index in plan_batches(len(part.y), 4, steps, streams).batches(CPU):
            z, total = directions(self.toy, model, part.x[index]), []
            for row, y in zip(z, part.y[index].tolist(), strict=True):
                if y not in shared:
                    total.append(0 * row.sum())
                    continue
                values = {
                    "global": value_of(row, y, shared, self.tau, self.others),
                    "local": torch.stack([value_of(row, y, t, self.tau, self.others) for t in filled]).mean(),
                }
                total.append(torch.stack([values[name] for name in self.parts]).sum())
            optimizer.zero_grad()
            torch.stack(total).mean().backward()
            optimizer.step()
        return {name: leaf.detach() for name, leaf in model.items()}


@pytest.mark.parametrize("contrast", list(CONTRASTS))
@pytest.mark.parametrize("negatives", ["others", "all"])
def test_inv_pcl_1_rounds_are_those_of_an_oracle_in_plain_pytorch(contrast: Any, negatives: Any) -> None:
    toy = several(FedPCL(temperature=HALF, negatives=negatives, contrast=contrast))
    oracle = Oracle(toy, HALF, negatives == "others", contrast)
    for number, cohort in enumerate(COHORTS):
        toy.step(cohort)
        oracle.round(number, cohort)
        sets, shared = toy.server["sets"], oracle.shared()
        for client in range(4):
            known = oracle.sets.get(client, {})
            assert sets["exist"][client].nonzero()[:, 0].tolist() == sorted(known)
            for y, prototype in known.items():
                assert_close(sets["means"][client, y], prototype, 1e-12)
        for y, prototype in shared.items():
            assert_close(toy.server["prototypes"]["means"][y], prototype, 1e-12)
    for client, model in oracle.models.items():
        assert_close(toy.states()[client]["local"], model, 1e-12)


def test_inv_pcl_2_with_all_classes_a_contrast_is_a_cross_entropy_and_without_its_own_less_its_probability() -> None:
    generator = torch.Generator().manual_seed(4)
    z = F.normalize(torch.randn(5, 6, generator=generator, dtype=torch.float64), dim=-1)
    tables = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)
    batch = Batch(z, torch.tensor([0, 1, 2, 3, 3]))
    entropies = torch.stack([F.cross_entropy(z @ table.T / 0.3, batch.y, reduction="none") for table in tables])
    assert_close(contrasts(z, batch, tables, torch.ones(4).double(), 0.3, False), entropies.mean(0), 1e-12)
    # the others' share of the denominator is 1 - p
    less = entropies + torch.log1p(-torch.exp(-entropies))
    assert_close(contrasts(z, batch, tables, torch.ones(4).double(), 0.3, True), less.mean(0), 1e-12)


def test_inv_pcl_3_classes_without_prototype_are_in_no_contrast() -> None:
    generator = torch.Generator().manual_seed(4)
    z = F.normalize(torch.randn(3, 6, generator=generator, dtype=torch.float64), dim=-1)
    table = torch.randn(1, 4, 6, generator=generator, dtype=torch.float64)
    batch, fewer = Batch(z, torch.tensor([0, 1, 3])), Batch(z, torch.tensor([0, 1, 2]))
    exist = torch.tensor([1.0, 1, 0, 1], dtype=torch.float64)
    for others in (False, True):
        found = contrasts(z, batch, table, exist, 0.3, others)
        assert_equal(found, contrasts(z, fewer, table[:, [0, 1, 3]], exist[[0, 1, 3]], 0.3, others))


def test_inv_pcl_4_the_first_round_makes_prototypes_and_trains_nothing() -> None:
    toy = several(FedPCL())
    toy.step([0, 2])
    assert_equal(toy.states()[0]["local"], initial(toy))
    part = toy.dataset.load(0)["train"]
    z = directions(toy, initial(toy), part.x)
    assert_close(toy.server["sets"]["means"][0, 1], z[part.y == 1].mean(0), 1e-12)
    assert not toy.server["sets"]["exist"][[1, 3]].any()


def test_inv_pcl_5_with_one_class_there_is_nothing_to_contrast() -> None:
    toy = Toy(FedPCL(), labelled([1, 1, 1], [1]), two_layers(), TRAIN)
    for _ in range(3):
        toy.step([0, 1])
    for client in range(2):
        assert_equal(toy.states()[client]["local"], initial(toy))


def test_inv_pcl_6_the_last_layer_never_moves_and_neither_do_the_models_of_the_others() -> None:
    toy = several(FedPCL())
    for cohort in COHORTS[:2]:
        toy.step(cohort)
    first = initial(toy)
    for client in (1, 2, 3):
        model = toy.states()[client]["local"]
        assert_equal({name: model[name] for name in toy.task.network.head_names},
                     {name: first[name] for name in toy.task.network.head_names})  # fmt: skip
        assert any(not torch.equal(leaf, first[name]) for name, leaf in model.items())
    assert_equal(toy.states()[0]["local"], first)


def test_inv_pcl_7_with_one_client_local_and_global_contrasts_are_equal() -> None:
    found = []
    for contrast in ("global", "local"):
        toy = Toy(FedPCL(contrast=contrast), labelled([0, 1, 0, 1, 2]), two_layers(), TRAIN)  # type: ignore[arg-type]
        for _ in range(3):
            toy.step([0])
        found.append(toy.server)
    assert_close(*found, 1e-12)


def test_mean_prototypes_are_those_of_the_clients_that_have_a_class() -> None:
    means = torch.tensor([[[1.0, 2], [9, 9]], [[3, 6], [9, 9]], [[9, 9], [9, 9]]], dtype=torch.float64)
    exist = torch.tensor([[1.0, 0], [1, 0], [0, 0]], dtype=torch.float64)
    found = mean_prototypes(means, exist)
    assert found["means"].tolist() == [[2, 4], [0, 0]] and found["exist"].tolist() == [1, 0]


def test_messages_have_the_prototypes_of_the_clients_that_have_sent_any() -> None:
    toy, width, known = several(FedPCL()), 7, set()
    for cohort in COHORTS:
        toy.step(cohort)
        down = 8 * 3 * (width + 1) + 8 * 3 * width * len(known)
        assert toy.federation.traffic.by_client == dict.fromkeys(cohort, (down, 8 * 3 * (width + 1)))
        known |= set(cohort)
    sent = toy.algorithm.sent(toy.server)["sets"]
    assert sent.shape == (4, 3, width)
    assert_equal(sent[1, 0], toy.server["prototypes"]["means"][0])
    assert_equal(sent[1, 1], toy.server["sets"]["means"][1, 1])
    assert set(toy.algorithm.served(toy.server, toy.context)[0]) == {"prototypes"}


@pytest.mark.parametrize("inference", ["own", "shared"])
def test_rows(inference: Any) -> None:
    toy = several(FedPCL(inference=inference, temperature=HALF))
    mine, ours = ("personalized", "shared") if inference == "own" else ("own", "personalized")
    for client, scores in toy.scores().items():
        part = toy.dataset.load(client)["test"]
        logits = toy.task.network.logits(initial(toy), part.x)
        for row in (mine, ours):
            assert abs(scores[row].loss - float(F.cross_entropy(logits, part.y))) < 1e-12
    for cohort in ([0, 2], [0, 1]):
        toy.step(cohort)
    scores, shared = toy.scores(), toy.server["prototypes"]
    for client in range(4):
        state = toy.states().get(client, {})
        part = toy.dataset.load(client)["test"]
        z = directions(toy, state.get("local", initial(toy)), part.x)
        for row, table in ((mine, state.get("prototypes", shared)), (ours, shared)):
            apart = (z[:, None] - table["means"]).square().sum(-1) / (2 * HALF)
            apart = torch.where(table["exist"] > 0, apart, math.inf)
            assert abs(scores[client][row].loss - float(F.cross_entropy(-apart, part.y))) < 1e-10
            assert scores[client][row].top1 == float((apart.argmin(1) == part.y).double().mean())


def test_newcomers_train_with_the_prototypes_of_all() -> None:
    toy = several(FedPCL(), unseen=1)
    for cohort in ([0, 1, 2], [0, 1, 2]):
        toy.step(cohort)
    rows = toy.scores(newcomers=True)[3]
    assert set(rows) == {"personalized", "shared"} and math.isfinite(rows["personalized"].loss)
    assert 3 not in toy.states()


@pytest.mark.slow
def test_clients_learn_more_than_what_their_initial_features_tell() -> None:
    toy = Toy(FedPCL(), planted_clients("classes"), two_layers(inputs=12), TRAIN.model_copy(update={"local_epochs": 3}))
    found = []
    for round in range(8):
        toy.step(range(8))
        if round in (0, 7):
            scores = toy.scores(split="validation").values()
            found.append(float(np.mean([rows["personalized"].top1 for rows in scores])))
    assert found[1] > found[0] + 0.02, found


def test_clients_of_several_architectures_share_prototypes_of_one_width() -> None:
    single = two_layers()
    pair = Classification(single.network, [single, normalized_layers()])
    toy = Toy(FedPCL(), labelled(*SEVERAL, *SEVERAL), pair, TRAIN)
    FedPCL().check(pair, toy.context)
    for _ in range(3):
        toy.step(range(8))
    assert len({tuple(state["local"]) for state in toy.states().values()}) == 2
    wide = Classification(single.network, [single, two_layers(hidden=9)])
    with pytest.raises(ConfigError, match=r"FedPCL's clients share features, .* read \[7, 9\]"):
        FedPCL().check(wide, toy.context)
    with pytest.raises(ConfigError, match=r"algorithm\.initial is own"):
        FedPCL(initial="own").check(pair, toy.context)


def test_a_fixed_layer_stays_and_a_model_that_trains_nothing_before_its_last_layer_is_refused() -> None:
    names = [name for name in two_layers().network.parameter_names if name not in two_layers().network.head_names]
    task = partly_fixed(*names)
    toy = several(FedPCL())
    with pytest.raises(ConfigError, match=r"FedPCL trains what is before the last layer"):
        FedPCL().check(task, toy.context)
    FedPCL().check(partly_fixed(names[0]), toy.context)


EDGES = {
    "ragged": SEVERAL,
    "single samples": ([0], [1], [2], [1]),
    "one class a client": ([0, 0, 0], [1, 1], [2] * 6, [0]),
}


@pytest.mark.parametrize("edge", list(EDGES))
@pytest.mark.parametrize("batch_size", [1, 4])
def test_vectorized_agrees_with_looped_and_all_is_finite(
    edge: str, batch_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    train = TrainConfig.model_validate({**TRAIN.model_dump(), "batch_size": batch_size})
    data = labelled(*EDGES[edge])
    looped, stacked = (Toy(FedPCL(), data, two_layers(), train, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort), 1e-9)
        assert all(leaf.isfinite().all() for leaf in looped.server["sets"].values())
    assert_close(looped.states(), stacked.states(), 1e-9)
    assert "failed together" not in caplog.text


def test_running_statistics_are_the_clients_own() -> None:
    toy = Toy(FedPCL(), labelled(*SEVERAL), three_layers(), TRAIN)
    for _ in range(2):
        toy.step([0, 2])
    states = toy.states()
    assert not torch.equal(states[0]["local"]["norm.running_mean"], states[2]["local"]["norm.running_mean"])
    assert_equal(initial(toy)["norm.running_mean"], torch.zeros(7, dtype=torch.float64))
