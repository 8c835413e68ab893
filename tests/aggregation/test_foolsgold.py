"""FoolsGold against its algorithm, client by client, and what it remembers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rayfl.aggregation.exact_sum import Weighted
from rayfl.messages.aggregation_rule import Known
from rayfl.messages.aggregators import CenteredClipping, FoolsGold, Rule
from rayfl.params import Tree
from tests.support.toys import assert_close, assert_equal

RECEIVED = {"w": torch.zeros(2, 3, dtype=torch.float64), "b": torch.ones(2).double(), "seen": torch.tensor(7)}


def as_tree(change: np.ndarray) -> Tree:
    row = torch.from_numpy(change)
    return {"w": row[:6].reshape(2, 3), "b": 1 + row[6:], "seen": torch.tensor(10)}


def change_of(tree: Tree) -> np.ndarray:
    return torch.cat([tree["w"].flatten(), tree["b"] - 1]).numpy()


def sent_of(changes: np.ndarray) -> list[Weighted]:
    return [Weighted(as_tree(change), k + 1) for k, change in enumerate(changes)]


def rates_of(histories: np.ndarray, kappa: float) -> np.ndarray:
    """Algorithm 1, client by client."""
    n = len(histories)
    cosine = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if i != j:
                cosine[i, j] = histories[i] @ histories[j]
                cosine[i, j] /= np.linalg.norm(histories[i]) * np.linalg.norm(histories[j])
    most = [max(row) for row in cosine]
    rates = []
    for i in range(n):
        row = [cosine[i, j] * most[i] / most[j] if most[j] > most[i] else cosine[i, j] for j in range(n)]
        rates.append(min(max(1 - max(row), 0), 1))
    found = []
    for rate in rates:
        share = min(rate / max(rates), 0.99)
        logit = -math.inf if share == 0 else math.log(share / (1 - share))
        found.append(min(max(kappa * (logit + 0.5), 0), 1))
    return np.array(found)


@pytest.mark.parametrize("kappa", [1.0, 0.3])
def test_learning_rates_are_those_of_the_algorithm_on_sums_of_changes(kappa: float) -> None:
    rule, memory, sums = FoolsGold(confidence=kappa), Tree(), {k: np.zeros(8) for k in range(9)}
    generator = np.random.default_rng(0)
    drift, seen = generator.normal(size=8), set[float]()
    for cohort in ([0, 1, 2, 3, 4], [1, 3, 5, 6, 8], [0, 1, 5, 7, 8]):
        changes = generator.normal(size=(5, 8)) + 1.2 * drift
        for client, change in zip(cohort, changes, strict=True):
            sums[client] += change
        rates = rates_of(np.stack([sums[client] for client in cohort]), kappa)
        seen |= set(rates.tolist())
        known = Known(cohort, memory)
        found = rule.combine(sent_of(changes), RECEIVED, known)
        np.testing.assert_allclose(change_of(found), rates @ changes / rates.sum(), atol=1e-12)
        memory = rule.memory_after(sent_of(changes), RECEIVED, known, found)
    assert any(0 < rate < 1 for rate in seen)
    assert set(memory) == set(map(str, range(9)))
    for client, total in sums.items():
        assert_close(
            memory[str(client)], {"w": torch.from_numpy(total[:6]).reshape(2, 3), "b": torch.from_numpy(total[6:])}
        )


def test_clients_that_send_the_same_have_no_say() -> None:
    changes = np.random.default_rng(1).normal(size=(6, 8))
    changes[[1, 3, 5]] = 50 * changes[5]
    found = change_of(FoolsGold().combine(sent_of(changes), RECEIVED, Known(range(6))))
    rates = rates_of(changes, 1.0)
    assert rates[[1, 3, 5]].tolist() == [0, 0, 0] and rates[[0, 2, 4]].all()
    np.testing.assert_allclose(found, rates @ changes / rates.sum(), atol=1e-12)


def test_where_all_send_the_same_nothing_is_learned() -> None:
    changes = np.tile(np.arange(1.0, 9.0), (4, 1))
    found = FoolsGold().combine(sent_of(changes), RECEIVED, Known(range(4)))
    assert np.abs(change_of(found)).max() == 0


def test_an_unchanged_model_stays_and_order_makes_no_difference() -> None:
    still = FoolsGold().combine(sent_of(np.zeros((4, 8))), RECEIVED, Known(range(4)))
    assert np.abs(change_of(still)).max() == 0
    changes = np.random.default_rng(4).normal(size=(5, 8))
    memory = {"3": {"w": torch.ones(2, 3).double(), "b": torch.ones(2).double()}}
    order = [2, 0, 4, 3, 1]
    found = FoolsGold().combine(sent_of(changes), RECEIVED, Known(range(5), memory))
    other = FoolsGold().combine(sent_of(changes[order]), RECEIVED, Known(order, memory))
    assert_close(other, found, atol=1e-12)


def test_histories_are_no_shorter_than_float32() -> None:
    received = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    sent = [Weighted({"w": torch.tensor(row, dtype=torch.bfloat16)}, 1) for row in ([1.0, 0, 0], [0, 1.0, 0])]
    rule, known = FoolsGold(), Known((4, 7))
    found = rule.combine(sent, received, known)
    assert found["w"].dtype is torch.bfloat16
    kept = rule.memory_after(sent, received, known, found)
    assert_equal(kept, {"4": {"w": torch.tensor([1.0, 0, 0])}, "7": {"w": torch.tensor([0, 1.0, 0])}})


@pytest.mark.parametrize("rule", [FoolsGold(), CenteredClipping()], ids=["foolsgold", "centered_clipping"])
def test_tensors_that_a_round_does_not_send_keep_their_memory(rule: Rule) -> None:
    """As where one factor of an adapter is sent in even rounds, and the other in odd ones."""
    memory: Tree = {}
    for name in ("a", "b", "a"):
        received = {name: torch.zeros(3)}
        messages = [Weighted({name: torch.tensor(values)}, 1.0) for values in ([1.0, 2.0, 3.0], [3.0, 1.0, 0.0])]
        known = Known((0, 1), memory=memory)
        found = rule.combine(messages, received, known)
        memory = rule.memory_after(messages, received, known, found)
    kept = memory["0"] if isinstance(rule, FoolsGold) else memory
    assert set(kept) == {"a", "b"}
    if isinstance(rule, FoolsGold):
        assert kept["a"].tolist() == [2.0, 4.0, 6.0] and kept["b"].tolist() == [1.0, 2.0, 3.0]
