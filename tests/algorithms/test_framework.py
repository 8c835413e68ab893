"""What must hold for every method: invariants F1-F10 and F14, over all methods of ``ALGORITHMS``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.hosting import procedures
from actors.hosting.equipment import Equipment
from actors.hosting.job import ClientResult, Job
from actors.hosting.replies import found_of
from algorithms.base import Averaging
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.params import Tree, copy, leaves, num_bytes, tensors
from tests.support.cases import ALGORITHMS, CASES_OF_KINDS, TRAIN, of_kinds, toy_of
from tests.support.cases.base import SIZES, Case
from tests.support.experiments import FEW
from tests.support.toy_networks import normalized_layers
from tests.support.toys import ListDataset, RelabelledStreams, Toy, assert_close, assert_equal, random_clients


def digest(tree: Mapping[Any, Any]) -> str:
    """A hash of all leaves, to the bit."""
    total = hashlib.sha256()
    for path, leaf in leaves({str(key): value for key, value in tree.items()}):
        content = leaf.numpy().tobytes() if isinstance(leaf, Tensor) else repr(leaf).encode()
        total.update(path.encode() + content)
    return total.hexdigest()


def vectors(scores: Mapping[int, Mapping[str, Any]]) -> dict[tuple[int, str], list[float]]:
    """Statistics as plain lists, which compare to the bit."""
    return {(client, row): found.vector.tolist() for client, rows in scores.items() for row, found in rows.items()}


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """Records (client, reply) of every procedure that uploads something."""
    seen: list[tuple[int, Any]] = []

    def recording(own: Equipment, job: Job, client: Client, outcome: Any, *others: Any) -> ClientResult:
        if job.kind != "evaluate" and job.counted:
            seen.append((client.id, outcome))
        return found_of(own, job, client, outcome, *others)

    monkeypatch.setattr(procedures, "found_of", recording)
    return seen


def tree_of(reply: Any) -> Tree:
    return reply.tree if isinstance(reply, Weighted) else reply


def model_of(tree: Tree) -> Tree:
    """The model in what a client sends, which may be all of it."""
    model: Tree = tree.get("model", tree)
    return model


AVERAGING = {name: case for name, case in ALGORITHMS.items() if case.averages and isinstance(case.algorithm, Averaging)}


@pytest.mark.parametrize("policy", ["samples", "uniform", "population"])
@of_kinds(AVERAGING)
def test_inv_f1_weights_sum_to_one(case: Case, policy: str, replies: list[tuple[int, Any]]) -> None:
    assert isinstance(case.algorithm, Averaging)
    algorithm = case.algorithm.model_copy(update={"aggregation": policy})
    sizes = np.array(SIZES)
    for cohort in ([3], [0, 2], [0, 1, 2, 3, 4]):
        replies.clear()
        toy = toy_of(Case(algorithm))
        old = copy(toy.server["model"])
        rest = algorithm.remainder(old, cohort, toy.federation)
        new = toy.step(cohort)["model"]
        contributions = dict(replies) | ({-1: rest} if rest else {})
        total = sum(reply.weight for reply in contributions.values())
        shares = {client: reply.weight / total for client, reply in contributions.items()}
        expected = {
            "samples": {client: sizes[client] / sizes[cohort].sum() for client in cohort},
            "uniform": {client: 1 / len(cohort) for client in cohort},
            "population": {client: sizes[client] / sizes.sum() for client in cohort}
            | ({-1: 1 - sizes[cohort].sum() / sizes.sum()} if len(cohort) < len(sizes) else {}),
        }[policy]
        assert set(shares) == set(expected)
        assert min(shares.values()) >= 0
        assert abs(sum(shares.values()) - 1) < 1e-12
        for client, share in shares.items():
            assert abs(share - expected[client]) < 1e-12
        for name, leaf in new.items():
            mean = sum(share * model_of(contributions[client].tree)[name] for client, share in shares.items())
            assert_close(leaf, mean, 1e-12)


@CASES_OF_KINDS
def test_inv_f2_identical_replies_are_returned_as_they_are(case: Case, replies: list[tuple[int, Any]]) -> None:
    if case.distinct:
        pytest.skip("the server makes another model for each client")
    one = random_clients((9,), dtype=torch.float32).load(0)["train"]
    streams = RelabelledStreams(0, (0,) * 5)
    toy = toy_of(case, double=False, dataset=ListDataset([(one.x, one.y)] * 5, public=one.x[:4]), streams=streams)
    before = copy(toy.server)
    toy.step([0, 1, 2, 3, 4])
    first = [tree_of(reply) for client, reply in replies if client == replies[0][0]]
    for sender in {client for client, _ in replies}:
        for reply, other in zip((tree_of(reply) for client, reply in replies if client == sender), first, strict=True):
            if case.alike:
                assert_equal(reply, other)
            else:
                assert_close(reply, other, 1e-6)
    if case.averages:
        assert_equal(toy.server["model"], model_of(first[0]))
        assert digest(toy.server["model"]) != digest(before["model"])


@CASES_OF_KINDS
@pytest.mark.parametrize(
    ("idle", "mode"),
    [
        pytest.param({"local_epochs": 0}, "looped", id="no-epochs-looped"),
        pytest.param({"local_epochs": 0}, "vectorized", id="no-epochs-vectorized", marks=pytest.mark.slow),
        pytest.param({"lr": 0.0, "weight_decay": 0.0}, "looped", id="lr-0-looped", marks=pytest.mark.slow),
        pytest.param({"lr": 0.0, "weight_decay": 0.0}, "vectorized", id="lr-0-vectorized"),
    ],
)
def test_inv_f3_without_training_the_server_keeps_its_model(case: Case, idle: dict[str, Any], mode: str) -> None:
    toy = toy_of(case, double=False, train=TRAIN.model_copy(update=idle), mode=mode)
    before = copy(toy.server)
    for cohort in case.cohorts()[:2]:
        after = toy.step(cohort)
        for leaf in tensors(after):
            assert torch.isfinite(leaf).all()
        if case.averages:
            assert_equal(after["model"], before["model"])


@CASES_OF_KINDS
@pytest.mark.parametrize("hosts", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_inv_f4_states_of_clients_not_sampled_stay(case: Case, hosts: int) -> None:
    """With three hosts states are those of one: F7 shows it in the quick suite."""
    toy = toy_of(case, hosts=hosts)
    for cohort in case.cohorts() if case.everyone else (*case.cohorts(), [1], [3, 4]):
        before = {client: digest(state) for client, state in toy.states().items()}
        toy.step(cohort)
        after = {client: digest(state) for client, state in toy.states().items()}
        for client in set(range(len(SIZES) + 1)) - set(case.contacted(cohort)):
            assert after.get(client) == before.get(client)
    holding = {client for client, state in toy.states().items() if state}
    assert holding == (set(case.contacted(range(len(SIZES)))) if case.private else set())


def noisy(case: Case, **options: Any) -> Toy:
    dataset = random_clients((8, 12, 6, 10, 7), public=8 if case.public else 0)
    return toy_of(case, dataset=dataset, task=normalized_layers(0.3, case.any_layers), **options)


@CASES_OF_KINDS
def test_inv_f5_evaluation_has_no_side_effects(case: Case) -> None:
    watched, undisturbed = noisy(case), noisy(case)
    for number, cohort in enumerate(case.cohorts()[:3]):
        assert_equal(watched.step(cohort), undisturbed.step(cohort))
        assert_equal(watched.states(), undisturbed.states())
        if number == 1:
            continue
        before = digest(watched.server), digest(watched.states())
        generators = torch.random.get_rng_state(), np.random.get_state()[1].tolist()
        for final in (False, True):
            first, second = watched.scores(final), watched.scores(final)
            assert set(first) == set(range(len(SIZES)))
            assert vectors(first) == vectors(second)
        assert (digest(watched.server), digest(watched.states())) == before
        assert torch.equal(torch.random.get_rng_state(), generators[0])
        assert np.random.get_state()[1].tolist() == generators[1]


@CASES_OF_KINDS
def test_inv_f6_no_aliasing(case: Case, replies: list[tuple[int, Any]]) -> None:
    disturbed, clean = toy_of(case), toy_of(case)
    for cohort in case.cohorts():
        clean.step(cohort)
        replies.clear()
        disturbed.step(cohort)
        # what a client sent is the server's only through a copy, and the client's state likewise
        for _, reply in replies:
            for leaf in tensors(tree_of(reply)):
                leaf.fill_(1e6)
        assert_equal(disturbed.server, clean.server)
        # a server that writes into its tree reaches neither the clients nor what it sent them
        kept = copy(disturbed.server)
        for leaf in tensors(disturbed.server):
            leaf.fill_(1e6)
        assert_equal(disturbed.states(), clean.states())
        disturbed.server = kept


@dataclass
class History:
    """Everything a run shows to the outside."""

    servers: list[str]
    states: list[str]
    trained: list[Any]
    scores: Any
    traffic: list[tuple[int, int]]


def history(toy: Toy) -> History:
    seen = History([], [], [], {}, [])
    for _ in range(TRAIN.rounds):
        toy.step()
        seen.servers.append(digest(toy.server))
        seen.states.append(digest(toy.states()))
        seen.trained.append(vectors({c: found["test"] for c, found in sorted(toy.federation.trained_scores.items())}))
        seen.traffic.append((toy.federation.traffic.down, toy.federation.traffic.up))
    seen.scores = vectors(toy.scores(final=True))
    return seen


@CASES_OF_KINDS
def test_inv_f7_history_depends_on_the_seed_alone(case: Case) -> None:
    expected = history(toy_of(case))
    assert case.pooled or all(bool(found) == case.trains for found in expected.trained)
    assert history(toy_of(case, hosts=3)) == expected
    other = history(toy_of(case, seed=1))
    assert (other.servers, other.states) != (expected.servers, expected.states)


@pytest.mark.parametrize(
    "case",
    [pytest.param(one, id=name, marks=() if name in FEW else pytest.mark.slow) for name, one in ALGORITHMS.items()],
)
def test_inv_f7_history_with_random_layers_depends_on_the_seed_alone(case: Case) -> None:
    """The engine seeds the layers, not the method."""
    assert history(noisy(case, hosts=2)) == history(noisy(case))


@CASES_OF_KINDS
def test_inv_f7_vectorized_differs_by_rounding_alone(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    looped, stacked = (toy_of(case, mode=mode) for mode in ("looped", "vectorized"))
    for cohort in case.cohorts()[:3]:
        assert_close(looped.step(cohort), stacked.step(cohort))
        assert_close(looped.states(), stacked.states())
    assert "failed together" not in caplog.text


@CASES_OF_KINDS
def test_inv_f8_replies_hold_no_private_keys(case: Case, replies: list[tuple[int, Any]]) -> None:
    toy = toy_of(case)
    network = toy.task.network
    uploads: set[str] = set()
    opening = 0 if case.opening[1](network) == 0 else len(SIZES)
    for cohort in case.cohorts():
        replies.clear()
        toy.step(cohort)
        for client, reply in replies[:opening]:
            assert num_bytes(tree_of(reply)) == 8 * case.opening[1](network), client
        del replies[:opening]
        opening = 0
        sent = dict.fromkeys((client for client, _ in replies), 0)
        for client, reply in replies:
            encoded = reply.size if isinstance(reply, Weighted) else None
            sent[client] += num_bytes(tree_of(reply)) if encoded is None else encoded
            uploads.update(path.split("/")[-1] for path, _ in leaves(tree_of(reply)))
        for client, size in sent.items():
            silent = bool(case.quiet) and not size
            assert silent or not case.steady or size == 8 * (case.up(network) + case.numbers[1]), client
    assert uploads == set(case.uploads(network))
    assert {key for state in toy.states().values() for key in state} == set(case.private)
