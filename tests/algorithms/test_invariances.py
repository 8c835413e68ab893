"""What holds for every method: names of clients, what travels, and what a method reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rayfl.data.federated import FederatedDataset
from rayfl.data.partitions.stage import NoStages
from rayfl.examples import Examples
from rayfl.models.base import ClassificationModel, Network
from rayfl.params import copy, leaves, tensors
from rayfl.tasks.classification import Classification
from tests.support.cases import CASES_OF_KINDS, toy_of
from tests.support.cases.base import SIZES, Case
from tests.support.toys import RelabelledStreams, assert_close, assert_equal, random_clients


@CASES_OF_KINDS
def test_inv_f8_shared_keys_are_never_read_from_client_state(case: Case) -> None:
    poisoned, clean = toy_of(case), toy_of(case)
    names = set(clean.task.network.parameter_names)
    shared = set(clean.server) | names | {"model", "federated", "global", "received", "trained"}
    poison_model = clean.task.network.initialize(0)
    for cohort in case.cohorts():
        assert_equal(poisoned.step(cohort), clean.step(cohort))
        states = poisoned.client_hosts[0].states
        for client, state in states.all().items():
            poison = {key: copy(poison_model) for key in shared - case.private}
            for leaf in tensors(poison):
                leaf.fill_(1e6)
            states.replace(client, {**poison, **state}, poisoned.round)
        for client, state in clean.states().items():
            for key in case.private & set(state):
                assert_equal(poisoned.states()[client][key], state[key])


class Relabelled(FederatedDataset):
    """The clients of a data set under other ids: client k is the original's client ``original[k]``."""

    def __init__(self, dataset: FederatedDataset, original: Sequence[int]) -> None:
        self._dataset, self._original = dataset, original
        self.spec = dataset.spec
        self.names = tuple(dataset.names[k] for k in original)

    def load_public(self) -> Tensor:
        return self._dataset.load_public()

    def public_labels(self) -> np.ndarray:
        return self._dataset.public_labels()

    def sizes(self) -> np.ndarray:
        return self._dataset.sizes()[list(self._original)]

    def load(self, client: int) -> Mapping[str, Examples]:
        return self._dataset.load(self._original[client])


@CASES_OF_KINDS
def test_inv_f9_relabelling_clients_permutes_their_results(case: Case) -> None:
    if not case.relabels:
        pytest.skip("the server draws by client id, or the samples are pooled in its order")
    original = (3, 0, 4, 1, 2)
    label = {k: original.index(k) for k in range(5)}
    plain = toy_of(case)
    streams = RelabelledStreams(0, original)
    relabelled = toy_of(case, dataset=Relabelled(plain.dataset, original), streams=streams)
    for cohort in case.cohorts():
        assert_close(plain.step(cohort), relabelled.step(sorted(label[k] for k in cohort)), 1e-12)
    for client, state in plain.states().items():
        assert_close(relabelled.states()[label[client]], state, 1e-12)
    found, expected = relabelled.scores(final=True), plain.scores(final=True)
    for client, rows in expected.items():
        assert set(found[label[client]]) == set(rows)
        for row, statistics in rows.items():
            assert np.allclose(found[label[client]][row].vector, statistics.vector, rtol=0, atol=1e-10)


@CASES_OF_KINDS
def test_inv_f10_traffic_is_that_of_the_messages(case: Case) -> None:
    if not case.steady:
        pytest.skip("not the same in every round")
    toy = toy_of(case, double=False, hosts=2)
    network = toy.task.network
    for round, cohort in enumerate(case.cohorts()):
        toy.step(cohort)
        contacted = 0 if round in case.quiet else len(case.contacted(cohort))
        down, up = (0 if round else 4 * len(SIZES) * scalars(network) for scalars in case.opening)
        assert toy.federation.traffic.down - down == contacted * (4 * case.down(network) + 8 * case.numbers[0])
        assert toy.federation.traffic.up - up == contacted * (4 * case.up(network) + 8 * case.numbers[1])
    # an evaluation is the simulator's, not a message
    toy.scores()
    assert (toy.federation.traffic.down, toy.federation.traffic.up) == (0, 0)


@CASES_OF_KINDS
def test_inv_f14_mean_accuracy_of_one_model_is_its_pooled_accuracy(case: Case) -> None:
    if not case.averages:
        pytest.skip("no model is everybody's")
    dataset = random_clients((8,) * 5, public=8 if case.public else 0)
    toy = toy_of(case, dataset=dataset, stages=NoStages())
    for cohort in case.cohorts():
        toy.step(cohort)
    parts = [dataset.load(client)["test"] for client in range(5)]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    correct = int((toy.task.network.logits(toy.server["model"], x).argmax(1) == y).sum())
    rows = [scores["global"] for scores in toy.scores().values()]
    assert sum(round(row.top1 * row.n) for row in rows) == correct
    assert abs(float(np.mean([row.top1 for row in rows])) - correct / len(y)) < 1e-12
    assert 0 < correct < len(y)


class Scaled(ClassificationModel):
    """A network with a constant among its buffers, which the vectorised engine can train."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((5,), 2.0))
        self.head = nn.Linear(5, 3)

    def features(self, x: Tensor) -> Tensor:
        return x * self.scale

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


@CASES_OF_KINDS
@pytest.mark.parametrize("mode", [pytest.param("looped", marks=pytest.mark.slow), "vectorized"])
def test_buffers_are_neither_stepped_nor_decayed(case: Case, mode: str) -> None:
    if not case.one_layer:
        pytest.skip("the method refuses a model of one layer")
    task = Classification(Network(Scaled))
    toy = toy_of(case, double=False, task=task, mode=mode)
    for cohort in case.cohorts():
        for path, leaf in leaves(toy.step(cohort)):
            if path.endswith("scale"):
                assert torch.equal(leaf, torch.full((5,), 2.0))
