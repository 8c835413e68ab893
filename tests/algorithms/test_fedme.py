"""FedMe: invariants ME, fixtures G6 and G18, and its three switches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algorithms.fedavg import FedAvg
from algorithms.fedme import FedMe, PairLoss
from algorithms.local import Local
from algorithms.parts.exchange import aggregated, clustered, draw_sources
from rayfl.params import Tree, copy
from rayfl.tasks.base import Batch
from tests.support.fedme_toys import TRAIN, Call, Forced, calls, clients, mean, own_weights, two_architectures
from tests.support.toy_networks import two_layers
from tests.support.toys import Toy, assert_close, assert_equal

__all__ = ["calls"]

SELF = (tuple(range(5)),)
MIXED = (0, 1, 1, 0, 1)
OFF = {"model_tuning": False, "mutual_learning": False, "model_clustering": False}


def toy_of(algorithm: FedMe, mixed: bool = True, **options: Any) -> Toy:
    """Five clients with weights of their own; of two architectures unless told otherwise."""
    toy = Toy(algorithm, clients(), two_architectures() if mixed else two_layers(), TRAIN, **options)
    return own_weights(toy, MIXED if mixed else (0,) * 5)


def sources_of(toy: Toy, call: Call, before: Tree) -> list[int]:
    """Whose model each client received, drawn again, and checked by its values."""
    assert isinstance(toy.algorithm, FedMe)
    sources = toy.algorithm.sources([0] * 5, toy.federation.context)
    for payload, source in zip(call.payloads.values(), sources, strict=True):
        assert_equal(payload["exchanged"], before["models"][str(source)])
    return sources


def test_inv_me_1_every_copy_enters_one_average_whose_weights_sum_to_one() -> None:
    for seed in range(20):
        clusters = np.random.default_rng(seed).integers(0, 3, size=6).tolist()
        sources = draw_sources(clusters, "random", np.random.default_rng(seed))
        received = np.bincount(sources, minlength=6)
        assert received.sum() == 6
        copies = torch.eye(12, dtype=torch.float64)
        replies = {i: {"personal": {"w": copies[i]}, "exchanged": {"w": copies[6 + i]}} for i in range(6)}
        weights = torch.stack([tree["w"] for tree in aggregated(replies, sources)])
        for slot in range(6):
            members = [slot, *(6 + i for i in range(6) if sources[i] == slot)]
            assert weights[slot].nonzero().flatten().tolist() == sorted(members)
            assert abs(weights[slot][members] - 1 / (received[slot] + 1)).max() < 1e-12
        assert_close(weights.sum(1), torch.ones(6, dtype=torch.float64), 1e-12)
        assert ((weights > 0).sum(0) == 1).all()


def test_inv_me_2_without_its_parts_it_is_plain_training_of_both_copies(calls: list[Call]) -> None:
    toy = toy_of(FedMe(**OFF))
    plain = [Toy(FedAvg(), toy.dataset, candidate, TRAIN) for candidate in toy.task.candidates]

    def trained(model: Tree, architecture: int, client: int) -> Tree:
        plain[architecture].server, plain[architecture].round = {"model": model}, toy.round - 1
        return plain[architecture].step([client])["model"]

    for _ in range(3):
        before = copy(toy.server)
        toy.step()
        sources = sources_of(toy, calls[-1], before)
        for slot in range(5):
            users = [slot, *(i for i in range(5) if sources[i] == slot)]
            copies = [trained(before["models"][str(slot)], MIXED[slot], user) for user in users]
            assert_close(toy.server["models"][str(slot)], mean(*copies), 1e-12)
        assert toy.server["architectures"] == before["architectures"]


@pytest.mark.parametrize("mixed", [False, True])
def test_inv_me_2_exchange_with_oneself_is_local_training(mixed: bool) -> None:
    task = two_architectures() if mixed else two_layers()
    for architecture, candidate in enumerate(task.candidates):
        algorithm = Forced(given=SELF, initial_architecture=architecture, **OFF)
        alone, local = Toy(algorithm, clients(), task, TRAIN), Toy(Local(), clients(), candidate, TRAIN)
        for _ in range(TRAIN.rounds):
            alone.step()
            local.step()
            for client, state in local.states().items():
                assert_equal(alone.server["models"][str(client)], state["local"])


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_inv_me_3_a_model_learns_nothing_from_its_equal(mode: str, calls: list[Call]) -> None:
    mutual, plain = (toy_of(Forced(given=SELF, **{**OFF, "mutual_learning": on}), mode=mode) for on in (True, False))
    for slot, architecture in enumerate(MIXED):
        model = {name: leaf.requires_grad_() for name, leaf in copy(mutual.server["models"][str(slot)]).items()}
        part = mutual.dataset.load(slot)["train"]
        pair = {"personal": model, "exchanged": copy(model)}
        batch = Batch(part.x, part.y)
        losses = [PairLoss(architecture, architecture, on).losses(pair, batch, plain.task) for on in (True, False)]
        assert torch.equal(losses[0][0], losses[1][0])
        difference = torch.autograd.grad(losses[0][0] - losses[1][0], list(model.values()), materialize_grads=True)
        assert max(float(leaf.abs().max()) for leaf in difference) < 1e-15
    for _ in range(3):
        assert_close(mutual.step(), plain.step(), 1e-12)
    for call in calls:
        for reply in call.replies.values():
            assert_equal(reply["personal"], reply["exchanged"])


class Given:
    """A task whose models are logits."""

    def __init__(self) -> None:
        self.candidates = (self,)

    def logits(self, model: dict[str, Tensor], batch: Batch) -> Tensor:
        return model["z"]

    def loss_of(self, logits: Tensor, batch: Batch) -> Tensor:
        return batch.mean(-logits.log_softmax(-1).gather(1, batch.y[:, None])[:, 0])


@pytest.mark.parametrize("mutual", [True, False])
def test_inv_me_4_gradients_of_the_logits(mutual: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    own, other = (torch.randn(6, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    y = torch.tensor([0, 1, 2, 3, 0, 1])
    mask = torch.tensor([1.0, 1, 1, 1, 1, 0], dtype=torch.float64)
    pair = {"personal": {"z": own}, "exchanged": {"z": other}}
    first, second = PairLoss(0, 0, mutual).losses(pair, Batch(own, y, mask), Given())  # type: ignore[arg-type]
    p, q, target = own.softmax(-1), other.softmax(-1), torch.nn.functional.one_hot(y, 4)
    for loss, student, mine, theirs in ((first, own, p, q), (second, other, q, p)):
        moving = torch.autograd.grad(loss, [own, other], retain_graph=True, materialize_grads=True)
        expected = (mine - target + (mine - theirs if mutual else 0)) * mask[:, None] / 5
        assert_close(moving[0 if student is own else 1], expected.detach(), 1e-12)
        assert not moving[1 if student is own else 0].any()


def test_g6_fedme_loss() -> None:
    own, other = (torch.tensor([z], dtype=torch.float64, requires_grad=True) for z in ([1.0, 0, -1], [0.0, 2, 0]))
    pair = {"personal": {"z": own}, "exchanged": {"z": other}}
    loss, _ = PairLoss(0, 0, True).losses(pair, Batch(own, torch.tensor([0])), Given())  # type: ignore[arg-type]
    assert abs(loss.item() - 1.149639246990) < 1e-9
    (gradient,) = torch.autograd.grad(loss, own)
    half = torch.tensor([[0.111987466315, -0.148764550026, 0.036777083711]], dtype=torch.float64)
    assert_close(gradient, 2 * half, 1e-9)


@pytest.mark.parametrize("split", ["validation", "train"])
def test_inv_me_5_model_tuning(split: Any, calls: list[Call]) -> None:
    toy = toy_of(FedMe(tuning_data=split))
    ancestors, moved = list(range(5)), 0
    for _ in range(TRAIN.rounds):
        before = copy(toy.server)
        toy.step()
        call, sources = calls[-1], sources_of(toy, calls[-1], before)
        averages = aggregated(call.replies, sources)
        chosen = []
        for i in range(5):
            part = toy.dataset.load(i)[split]
            slots = {"personal": i, "exchanged": sources[i]}
            batch = Batch(part.x, part.y)
            tasks = {which: toy.task.candidates[before["architectures"][str(slot)]] for which, slot in slots.items()}
            loss = {which: float(task.loss(call.replies[i][which], batch)) for which, task in tasks.items()}
            assert call.replies[i]["replaces"] == (loss["exchanged"] < loss["personal"])
            chosen.append(slots[min(loss, key=lambda which: loss[which])])
            assert_equal(toy.server["models"][str(i)], averages[chosen[i]])
            assert toy.server["architectures"][str(i)] == before["architectures"][str(chosen[i])]
        assert len({ancestors[a] for a in chosen}) <= len(set(ancestors))
        ancestors = [ancestors[a] for a in chosen]
        assert set(toy.server["architectures"].values()) <= set(before["architectures"].values())
        moved += sum(a != i for i, a in enumerate(chosen))
    assert 0 < moved < 5 * TRAIN.rounds


def test_inv_me_6_g18_running_example(calls: list[Call]) -> None:
    sources = ((2, 3, 0, 4, 1), (2, 3, 0, 1, 3))
    chosen = ((2, 1, 2, 3, 1), (0, 3, 2, 3, 3))
    groups = [[{0: 2}, {1: 4}, {2: 0}, {3: 1}, {4: 3}], [{0: 2}, {1: 3}, {2: 0}, {3: (1, 4)}, {4: ()}]]
    replacing = tuple(tuple(a != i for i, a in enumerate(picked)) for picked in chosen)
    toy = toy_of(Forced(given=sources, replacing=replacing))
    for round in range(2):
        before = copy(toy.server)
        toy.step()
        replies = calls[-1].replies
        assert [int(np.sum(np.array(sources[round]) == slot)) for slot in range(5)] == [[1] * 5, [1, 1, 1, 2, 0]][round]
        averages = []
        for group in groups[round]:
            ((slot, others),) = group.items()
            receivers = (others,) if isinstance(others, int) else others
            averages.append(mean(replies[slot]["personal"], *(replies[i]["exchanged"] for i in receivers)))
        for i, a in enumerate(chosen[round]):
            assert a in (i, sources[round][i])
            assert_close(toy.server["models"][str(i)], averages[a], 1e-12)
            assert toy.server["architectures"][str(i)] == before["architectures"][str(a)]
    for i, source in enumerate(sources[1]):  # the clusters {1, 3} and {2, 4, 5}, counted from 1
        assert source != i
        assert (i in (0, 2)) == (source in (0, 2))


def test_inv_me_7_an_exchange_is_with_another_of_the_cluster() -> None:
    counts = np.zeros((3, 3))
    for seed in range(300):
        clusters = np.random.default_rng(seed).integers(0, 4, size=7).tolist()
        for rule in ("random", "derangement"):
            drawn = draw_sources(clusters, rule, np.random.default_rng(seed))  # type: ignore[arg-type]
            for i, source in enumerate(drawn):
                assert source != i
                assert clusters[source] == clusters[i] or clusters.count(clusters[i]) == 1
            if rule == "derangement":
                together = [source for i, source in enumerate(drawn) if clusters.count(clusters[i]) > 1]
                assert len(set(together)) == len(together)
        assert sorted(draw_sources([0] * 5, "derangement", np.random.default_rng(seed))) == [0, 1, 2, 3, 4]
        counts[np.arange(3), draw_sources([0] * 3, "random", np.random.default_rng(seed))] += 1
    assert abs(counts[~np.eye(3, dtype=bool)] / 300 - 0.5).max() < 0.1


def test_inv_me_7_one_cluster_is_no_clustering(calls: list[Call]) -> None:
    one, none = toy_of(FedMe(cluster_rounds=(99,))), toy_of(FedMe(model_clustering=False))
    for _ in range(3):
        assert_equal(one.step(), none.step())
    assert {call.procedure for call in calls} == {"local_update"}


def test_inv_me_8_clusters_do_not_depend_on_the_order_of_the_public_samples() -> None:
    generator = np.random.default_rng(0)
    centres = generator.normal(size=(3, 24))
    outputs = np.concatenate([centre + 0.05 * generator.normal(size=(4, 24)) for centre in centres])
    outputs[5] = outputs[4]
    outputs = outputs[generator.permutation(12)]
    labels = clustered(outputs, 3, np.random.default_rng(1))
    assert len(set(labels)) == 3
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(24)
        assert clustered(outputs[:, order], 3, np.random.default_rng(1)) == labels


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
def test_inv_me_8_identical_models_share_a_cluster(count: int) -> None:
    rows = np.random.default_rng(0).normal(size=(4, 10))
    outputs = rows[[0, 1, 2, 3, 0, 1, 1, 3]]
    labels = clustered(outputs, count, np.random.default_rng(1))
    assert len(set(labels)) == min(count, 4)
    for same in ((0, 4), (1, 5, 6), (3, 7)):
        assert len({labels[i] for i in same}) == 1


@pytest.mark.parametrize("rounds", [(150, 225, 275), (250, 375, 450), (50, 75, 90)])
def test_inv_me_9_number_of_clusters(rounds: tuple[int, int, int]) -> None:
    method = FedMe(cluster_rounds=rounds)
    found = [method.clusters_in(round) for round in range(500)]
    edges = (0, *rounds, 500)
    assert found == [k + 1 for k in range(4) for _ in range(edges[k + 1] - edges[k])]
    assert {FedMe(cluster_rounds=rounds, model_clustering=False).clusters_in(round) for round in range(500)} == {1}
    assert FedMe(cluster_rounds=(2, 2)).clusters_in(2) == 3
