"""What malicious clients send, against the formulas of the papers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from rayfl.aggregation.attacks import (
    Limit,
    Perturbation,
    a_little,
    against_mean,
    gaussian,
    most_deviations,
    scaled,
    within_the_spread,
)
from rayfl.params import Tree
from tests.support.toys import assert_close

RECEIVED = {"body/w": torch.zeros(400, 5), "b": torch.tensor([1.0, 2.0])}


def message(change: float) -> Tree:
    return {"body": {"w": RECEIVED["body/w"] + change}, "b": RECEIVED["b"] + change}


def test_changes_are_scaled_and_reversed() -> None:
    assert_close(scaled(message(0.5), RECEIVED, 10), message(5.0), atol=1e-6)
    assert_close(scaled(message(0.5), RECEIVED, -1), message(-0.5), atol=1e-6)


def test_noise_stands_in_place_of_the_change() -> None:
    first, second = (gaussian(message(100.0), RECEIVED, 0.3, np.random.default_rng(seed)) for seed in (0, 1))
    noise = first["body"]["w"]
    assert float(noise.std()) == pytest.approx(0.3, rel=0.05) and abs(float(noise.mean())) < 0.03
    assert abs(float(torch.corrcoef(torch.stack([noise.flatten(), second["body"]["w"].flatten()]))[0, 1])) < 0.1


def test_inner_product_manipulation_reverses_the_mean_of_the_honest() -> None:
    honest = [message(1.0), message(3.0)]
    assert_close(against_mean(honest, RECEIVED, 0.5), message(-1.0), atol=1e-6)


def test_a_little_is_as_many_standard_deviations_below_the_mean() -> None:
    honest = [message(1.0), message(3.0), message(5.0)]
    deviation = float(np.std([1, 3, 5]))
    assert_close(a_little(honest, 1.5), message(3 - 1.5 * deviation), atol=1e-6)


@pytest.mark.parametrize(("clients", "malicious"), [(50, 24), (50, 12), (20, 4), (10, 2)])
def test_how_far_is_what_enough_honest_clients_are_expected_to_be(clients: int, malicious: int) -> None:
    supporters = clients // 2 + 1 - malicious
    expected = stats.norm.ppf((clients - malicious - supporters) / (clients - malicious))
    assert most_deviations(clients, malicious) == pytest.approx(max(expected, 0))


def test_how_far_of_the_papers_example() -> None:
    # 50 workers, 24 of them corrupted: 2 supporters are needed, z = 1.43
    assert most_deviations(50, 24) == pytest.approx(1.43, abs=0.01)
    assert most_deviations(3, 2) == 0  # a majority has no need to hide


def drawn(count: int, seed: int = 0) -> tuple[dict[str, torch.Tensor], list[Tree], np.ndarray]:
    """Returns what clients received, what honest ones send, and their changes, float64 of shape (count, 8)."""
    generator = np.random.default_rng(seed)
    changes = generator.normal(size=8) + generator.normal(size=(count, 8)) * generator.uniform(0.1, 2, size=8)
    received = {"body/w": torch.from_numpy(generator.normal(size=(2, 3))), "s": torch.tensor(0.5, dtype=torch.float64)}
    received["b"] = torch.zeros(1, dtype=torch.float64)
    sent: list[Tree] = []
    for row in torch.from_numpy(changes):
        w = received["body/w"] + row[:6].reshape(2, 3)
        sent.append({"body": {"w": w}, "s": received["s"] + row[6], "b": received["b"] + row[7:]})
    return received, sent, changes


def change_of(tree: Tree, received: dict[str, torch.Tensor]) -> np.ndarray:
    parts = ((tree["body"]["w"], "body/w"), (tree["s"], "s"), (tree["b"], "b"))
    return torch.cat([(leaf - received[path]).flatten() for leaf, path in parts]).numpy()


def longest(changes: np.ndarray, p: np.ndarray, limit: str) -> float:
    """The largest gamma by the roots of the quadratic equations that limit it."""
    apart = ((changes[:, None] - changes[None]) ** 2).sum(-1)
    away = changes.mean(0) - changes
    if limit == "min_max":
        roots = [np.roots([p @ p, 2 * p @ one, one @ one - apart.max()]).max() for one in away]
        return float(min(roots))
    return float(np.sqrt((apart.sum(1).max() - (away**2).sum()) / (len(changes) * p @ p)))


@pytest.mark.parametrize("perturbation", ["deviation", "unit", "sign"])
@pytest.mark.parametrize("limit", ["min_max", "min_sum"])
@pytest.mark.parametrize("count", [2, 7])
def test_messages_go_as_far_as_the_honest_are_apart(count: int, limit: Limit, perturbation: Perturbation) -> None:
    received, sent, changes = drawn(count)
    mean = changes.mean(0)
    p = -{"deviation": changes.std(0), "unit": mean / np.linalg.norm(mean), "sign": np.sign(mean)}[perturbation]
    gamma = longest(changes, p, limit)
    assert gamma > 0
    found = change_of(within_the_spread(sent, received, limit, perturbation), received)
    np.testing.assert_allclose(found, mean + gamma * p, rtol=1e-9, atol=1e-12)
    # what the papers limit, of the message itself
    to_honest, between = ((found - changes) ** 2).sum(1), ((changes[:, None] - changes[None]) ** 2).sum(-1)
    pair = (to_honest.max(), between.max()) if limit == "min_max" else (to_honest.sum(), between.sum(1).max())
    assert pair[0] == pytest.approx(pair[1], rel=1e-9)
    backwards = within_the_spread(sent[::-1], received, limit, perturbation)
    np.testing.assert_allclose(change_of(backwards, received), found, rtol=1e-9)


@pytest.mark.parametrize("limit", ["min_max", "min_sum"])
def test_where_the_honest_agree_there_is_nothing_to_hide_in(limit: Limit) -> None:
    received, sent, _ = drawn(1)
    for honest in (sent, sent * 5):
        for perturbation in ("deviation", "unit", "sign"):
            assert_close(within_the_spread(honest, received, limit, perturbation), sent[0], atol=1e-12)
    still = {"body": {"w": received["body/w"]}, "s": received["s"], "b": received["b"]}
    assert_close(within_the_spread([still, still, still], received, limit, "sign"), still, atol=1e-15)
