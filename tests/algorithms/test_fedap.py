"""FedAP: an oracle in plain PyTorch, FedBN, the distances and weights, messages, newcomers, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from algorithms.fedap import FedAP, mixing_weights, wasserstein_distances
from algorithms.fedbn import FedBN
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.models.base import ClassificationModel
from rayfl.models.private_norm import STATE
from rayfl.params import Tree
from rayfl.tasks.classification import Classification
from tests.support.partial_toys import labelled, vectors
from tests.support.toy_networks import DoubleNetwork, NormalizedLayers, normalized_layers, two_layers
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal, random_clients

SIZES = (8, 12, 6, 10)
TRAIN = TrainConfig(
    rounds=6,
    clients_per_round=2,
    local_epochs=2,
    batch_size=4,
    lr=0.1,
    momentum=0.5,
    weight_decay=0.01,
    private_norm="all",
)
COHORTS = ([0, 2], [0, 1], [1, 2], [0, 3], [0, 1], [2, 3])
OWN_MODEL = "model={name: 'tests.support.own_norm:normalized', head: '4'}"


class TwoNorms(ClassificationModel):
    """Maps with batch normalization, and a vector with another."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.Conv1d(1, 3, 2)
        self.first = nn.BatchNorm1d(3)
        self.inner = nn.Linear(12, 6)
        self.second = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def features(self, x: Tensor) -> Tensor:
        maps = torch.relu(self.first(self.maps(x[:, None])))
        return torch.relu(self.second(self.inner(maps.flatten(1))))

    def classify(self, features: Tensor) -> Tensor:
        return self.head(features)  # type: ignore[no-any-return]


def two_norms() -> Classification:
    return Classification(DoubleNetwork(TwoNorms))


def toy_of(algorithm: Any, train: TrainConfig = TRAIN, **options: Any) -> Toy:
    return Toy(algorithm, **{"dataset": random_clients(SIZES), "task": normalized_layers(), "train": train} | options)


def test_inv_ap_1_rounds_are_those_of_an_oracle_in_plain_pytorch() -> None:
    # long steps would make much of rounding, where a mini-batch of two samples is normalized
    toy = toy_of(FedAP(warmup=0.5, own_share=0.3), TRAIN.model_copy(update={"lr": 0.02}))
    streams, parts = toy.context.streams, [toy.dataset.load(client)["train"] for client in range(4)]
    norm = {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
    start = toy.task.network.initialize(streams.integer("init.global"))
    shared = {name: leaf for name, leaf in start.items() if name not in norm}
    own: dict[int, Tree] = {client: {name: start[name] for name in norm} for client in range(4)}
    latest: dict[int, Tree] = {}
    weights = np.zeros((4, 4))

    def module_of(tree: Tree) -> nn.Module:
        module = NormalizedLayers().double()
        module.load_state_dict({**tree, "norm.num_batches_tracked": torch.tensor(0)})
        return module

    for round, cohort in enumerate(COHORTS):
        if round == 3:
            read = []
            for client in range(4):
                z = module_of({**shared, **own[client]}).inner(parts[client].x).detach()  # type: ignore[operator]
                read.append((z.mean(0).numpy(), z.numpy().std(0)))
            apart = [[np.sqrt(((a - b) ** 2).sum() + ((s - t) ** 2).sum()) for b, t in read] for a, s in read]
            for i in range(4):
                total = sum(1 / apart[i][j] for j in range(4) if j != i)
                for j in range(4):
                    weights[i, j] = 0.3 if i == j else 0.7 / apart[i][j] / total
            latest = dict.fromkeys(range(4), shared)
        trained = {}
        for client in cohort:
            begins = shared
            if round >= 3:
                begins = {name: sum(weights[client, j] * latest[j][name] for j in range(4)) for name in shared}
            module, part = module_of({**begins, **own[client]}), parts[client]
            optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.5, weight_decay=0.01)
            n = len(part.y)
            for index in plan_batches(n, 4, 2 * -(-n // 4), streams.generator("batches", round, client)).batches(CPU):
                optimizer.zero_grad()
                F.cross_entropy(module(part.x[index]), part.y[index]).backward()
                optimizer.step()
            found = {name: leaf.detach() for name, leaf in module.state_dict().items()}
            own[client] = {name: found[name] for name in norm}
            trained[client] = {name: found[name] for name in shared}
        if round >= 3:
            latest |= trained
        else:
            n = sum(SIZES[client] for client in cohort)
            shared = {name: sum(SIZES[k] / n * trained[k][name] for k in cohort) for name in shared}
        toy.step(cohort)
        assert_close({name: toy.server["model"][name] for name in shared}, shared, 1e-12)
        assert_close({str(k): toy.states()[k][STATE] for k in cohort}, {str(k): own[k] for k in cohort}, 1e-12)
    assert_close(mixing_weights(toy.server["distances"], 0.3), torch.from_numpy(weights), 1e-12)
    for client, rows in toy.scores().items():
        mixture = {name: sum(weights[client, j] * latest[j][name] for j in range(4)) for name in shared}
        module = module_of({**mixture, **own[client]}).eval()
        loss = F.cross_entropy(module(parts[client].x), parts[client].y)
        assert abs(rows["personalized"].loss - float(loss.detach())) < 1e-12


def test_inv_ap_2_before_the_second_phase_it_is_fedbn_to_the_bit() -> None:
    ours, theirs = toy_of(FedAP(warmup=1)), toy_of(FedBN())
    for cohort in COHORTS:
        assert_equal(ours.step(cohort), theirs.step(cohort))
    assert_equal(ours.states(), theirs.states())
    assert vectors(ours.scores(), "personalized") == vectors(theirs.scores(), "personalized")
    assert "algorithm.warmup is 1.0" in " ".join(ours.algorithm.remarks(ours.context))
    assert not FedAP().remarks(ours.context)


def test_where_the_first_phase_comes_back_the_second_one_begins_again() -> None:
    toy, fork = toy_of(FedAP(warmup=0.5)), toy_of(FedAP(warmup=1))
    for cohort in COHORTS[:5]:
        toy.step(cohort)
    fork.server, fork.round = toy.server, 5
    assert toy.server["own"] and FedAP().served(toy.server, toy.context)[1]
    server = fork.step(COHORTS[5])
    assert not server["own"] and FedAP().served(server, toy.context)[1] == {}
    again = toy_of(FedAP(warmup=0))
    again.server, again.round = server, 5
    assert isinstance(again.step(COHORTS[5])["distances"], torch.Tensor)
    assert set(again.server["own"]) == set(map(str, COHORTS[5]))


def test_inv_ap_3_with_the_whole_share_a_client_goes_on_alone() -> None:
    toy = toy_of(FedAP(warmup=0.5, own_share=1))
    for cohort in COHORTS:
        toy.step(cohort)
    for client, mixed in FedAP(own_share=1).mixed(toy.server, range(4)).items():
        assert_equal(mixed["model"], toy.server["own"][str(client)])


def test_inv_ap_4_weights_are_inverse_distances_and_do_not_see_their_scale() -> None:
    apart = torch.tensor([[0.0, 1, 2], [1, 0, 4], [2, 4, 0]], dtype=torch.float64)
    found = mixing_weights(apart, 0.4)
    expected = torch.tensor([[0.4, 0.4, 0.2], [0.48, 0.4, 0.12], [0.4, 0.2, 0.4]], dtype=torch.float64)
    assert_close(found, expected, 1e-15)
    assert_close(mixing_weights(apart * 1e-200, 0.4), expected, 1e-12)
    assert_close(mixing_weights(torch.zeros(3, 3).double(), 0.4), torch.full((3, 3), 0.3).fill_diagonal_(0.4), 1e-7)
    twins = torch.tensor([[0.0, 0, 2], [0, 0, 2], [2, 2, 0]], dtype=torch.float64)
    assert mixing_weights(twins, 0.4)[0].tolist() == [0.4, 0.6, 0]
    assert mixing_weights(torch.zeros(1, 1), 0.4).tolist() == [[1.0]]


def test_inv_ap_5_statistics_and_distances_of_several_layers_are_those_of_numpy() -> None:
    toy = toy_of(FedAP(warmup=0), task=two_norms())
    toy.federation.begin_round(0)
    model = toy.server["model"]
    whole = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    replies = toy.federation.map(toy.algorithm.moments, range(4), {"model": model})
    module = TwoNorms().double().eval()
    module.load_state_dict({k: v.clone() for k, v in whole.items()}, strict=False)
    found: list[list[np.ndarray]] = []
    for client in range(4):
        x = toy.dataset.load(client)["train"].x
        maps = module.maps(x[:, None])
        vector = module.inner(torch.relu(module.first(maps)).flatten(1))
        read = [maps.detach().transpose(0, 1).flatten(1).numpy(), vector.detach().T.numpy()]
        for place, one in enumerate(read):
            for key, value in (("mean", one.mean(1)), ("deviation", one.std(1))):
                assert_close(replies[client][key][str(place)], torch.from_numpy(value), 1e-12)
        found.append([np.concatenate([one.mean(1), one.std(1)]) for one in read])
    apart = [
        [sum(np.linalg.norm(a - b) for a, b in zip(left, right, strict=True)) for right in found] for left in found
    ]
    assert_close(wasserstein_distances(list(replies.values())), torch.tensor(apart), 1e-12)


def test_inv_ap_6_clients_with_alike_inputs_count_more_for_each_other() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 30, 5, generator=generator, dtype=torch.float64)
    x[3:] = 2 * x[3:] + 1
    parts = [(one, torch.randint(3, (30,), generator=generator)) for one in x]
    toy = toy_of(
        FedAP(warmup=0.34), dataset=ListDataset(parts), train=TRAIN.model_copy(update={"clients_per_round": 6})
    )
    for _ in range(3):
        toy.step(range(6))
    weights = mixing_weights(toy.server["distances"], 0.5)
    within = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).bool().fill_diagonal_(False)
    across = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)) == 0
    assert weights[within].min() > 1.5 * weights[across].max()


def test_inv_ap_7_each_message_has_the_size_of_the_model_without_norms_and_statistics_are_sent_once() -> None:
    toy = toy_of(FedAP(warmup=0.34))
    model, read = 8 * (5 * 7 + 7 + 7 * 3 + 3), 8 * 2 * 7
    expected = [
        {0: (model, model), 2: (model, model)},
        {0: (model, model), 1: (model, model)},
        {**dict.fromkeys((0, 3), (model, read)), **dict.fromkeys((1, 2), (2 * model, model + read))},
        {0: (model, model), 3: (model, model)},
    ]
    for cohort, traffic in zip(COHORTS, expected, strict=False):
        toy.step(cohort)
        assert toy.federation.traffic.by_client == traffic
    assert all(set(state) == {STATE} for state in toy.states().values())
    assert not toy.algorithm.global_predictors(toy.server, toy.task)


def test_newcomers_train_the_shared_model_in_both_phases() -> None:
    toy = toy_of(FedAP(warmup=0.34), unseen=1)
    for cohort in ([0, 2], [0, 1], [1, 2]):
        toy.step(cohort)
        trained = toy.scores(final=True, newcomers=True)[3]["personalized"].loss
        plain = toy_of(FedAP(warmup=0.34), unseen=1, unseen_epochs=0)
        plain.server = toy.server
        assert trained < plain.scores(final=True, newcomers=True)[3]["personalized"].loss
    assert toy.server["distances"].shape == (3, 3)


def test_a_model_without_batch_normalization_is_refused() -> None:
    toy = toy_of(FedAP(), task=two_layers())
    with pytest.raises(ConfigError, match=r"layers of batch normalization read.*model\.norm=batch"):
        FedAP().check(toy.task, toy.context)
    with pytest.raises(ConfigError, match=r"normalization"):
        Parts(load_config(Experiment, "quickstart", ["algorithm=fedap"])).check()
    Parts(load_config(Experiment, "quickstart", ["algorithm=fedap", OWN_MODEL])).check()
    for given in ("none", "statistics"):
        with pytest.raises(ConfigError, match="private_norm"):
            load_config(Experiment, "quickstart", ["algorithm=fedap", OWN_MODEL, f"train.private_norm={given}"])


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_one_sample_and_one_class_give_finite_values(mode: str) -> None:
    train = TRAIN.model_copy(update={"batch_size": 1, "rounds": 4})
    toy = toy_of(FedAP(warmup=0.25), train, dataset=labelled([0], [1, 1, 1], [2, 0]), mode=mode)
    for cohort in ([0, 1, 2], [0, 1], [0], [1, 2]):
        toy.step(cohort)
    assert toy.server["distances"].isfinite().all()
    assert all(leaf.isfinite().all() for own in toy.server["own"].values() for leaf in own.values())
    assert all(np.isfinite(rows["personalized"].loss) for rows in toy.scores().values())


# two normalizations by mini-batches of two samples make much of rounding
@pytest.mark.parametrize(("make", "bound"), [(normalized_layers, 1e-9), (two_norms, 1e-7)])
def test_vectorized_agrees_with_looped(make: Any, bound: float, caplog: pytest.LogCaptureFixture) -> None:
    looped, stacked = (toy_of(FedAP(), task=make(), mode=mode) for mode in ("looped", "vectorized"))
    for cohort in COHORTS:
        assert_close(looped.step(cohort), stacked.step(cohort), bound)
    assert_close(looped.states(), stacked.states(), bound)
    assert "failed together" not in caplog.text
