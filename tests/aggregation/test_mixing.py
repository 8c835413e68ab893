"""Messages that are mixed before a rule, and FLAME, against loops in NumPy and the order of HDBSCAN's own steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from rayfl.aggregation.exact_sum import Weighted
from rayfl.messages.aggregation_rule import Known, Rule
from rayfl.messages.aggregator_section import Aggregator
from rayfl.messages.aggregators import CenteredClipping, Krum, Mean, Median, TrimmedMean
from rayfl.messages.mixing_rules import Bucketing, Flame, NearestNeighborMixing
from rayfl.params import Tree
from tests.support.toys import assert_close, assert_equal

RECEIVED = {"w": torch.ones(4, 5, dtype=torch.float64), "b": torch.full((9,), 0.5, dtype=torch.float64)}


def sent_of(changes: np.ndarray) -> list[Weighted]:
    return [Weighted(as_tree(change), k + 1) for k, change in enumerate(changes)]


def as_tree(change: np.ndarray) -> Tree:
    row = torch.from_numpy(change)
    return {"w": 1 + row[:20].reshape(4, 5), "b": 0.5 + row[20:]}


def change_of(tree: Tree) -> np.ndarray:
    return torch.cat([tree["w"].flatten() - 1, tree["b"] - 0.5]).numpy()


def drawn(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 29))


@pytest.mark.parametrize("malicious", [0, 2, 3])
def test_each_message_becomes_the_mean_of_its_nearest(malicious: int) -> None:
    changes = drawn(8)
    mixed = []
    for own in changes:
        order = sorted(range(8), key=lambda k: float(((changes[k] - own) ** 2).sum()))
        mixed.append(changes[order[: 8 - malicious]].mean(0))
    rule = NearestNeighborMixing(malicious=malicious, then=Median())
    found = rule.combine(sent_of(changes), RECEIVED)
    np.testing.assert_allclose(change_of(found), np.median(mixed, axis=0), atol=1e-12)
    trimmed = NearestNeighborMixing(malicious=malicious, then=TrimmedMean(malicious=malicious))
    ordered = np.sort(mixed, axis=0)[malicious : 8 - malicious]
    np.testing.assert_allclose(change_of(trimmed.combine(sent_of(changes), RECEIVED)), ordered.mean(0), atol=1e-12)


def test_mixing_all_is_the_mean_and_mixing_none_is_the_rule() -> None:
    sent = sent_of(drawn(7))
    alike = [Weighted(message.tree, 1) for message in sent]
    assert_close(
        NearestNeighborMixing(malicious=0, then=Krum(malicious=1)).combine(sent, RECEIVED),
        Mean().combine(alike, RECEIVED),
        1e-12,
    )
    assert_close(Bucketing(size=1, then=Median()).combine(sent, RECEIVED), Median().combine(sent, RECEIVED), 1e-12)


def test_copies_of_an_outlier_do_not_move_what_is_nearest_to_others() -> None:
    changes = drawn(9)
    changes[7:] = 1e3
    honest = change_of(NearestNeighborMixing(malicious=2, then=Median()).combine(sent_of(changes), RECEIVED))
    assert np.abs(honest).max() < np.abs(changes[:7]).max()


@pytest.mark.parametrize("size", [2, 3])
def test_buckets_are_drawn_by_the_seed_and_averaged(size: int) -> None:
    changes = drawn(8, seed=2)
    order = np.random.Generator(np.random.Philox(11)).permutation(8)
    means = [changes[order[start : start + size]].mean(0) for start in range(0, 8, size)]
    found = Bucketing(size=size, then=Median()).combine(sent_of(changes), RECEIVED, Known(seed=11))
    np.testing.assert_allclose(change_of(found), np.median(means, axis=0), atol=1e-12)
    other = Bucketing(size=size, then=Median()).combine(sent_of(changes), RECEIVED, Known(seed=12))
    assert not np.allclose(change_of(found), change_of(other))


@pytest.mark.parametrize(
    ("rule", "least"),
    [
        (NearestNeighborMixing(malicious=3, then=Median()), 7),
        (NearestNeighborMixing(malicious=1, then=Krum(malicious=2)), 7),
        (Bucketing(size=2, then=Krum(malicious=2)), 13),
        (Bucketing(size=3, then=TrimmedMean(malicious=1)), 7),
        (Flame(), 3),
    ],
)
def test_how_many_messages_are_needed(rule: Rule, least: int) -> None:
    assert rule.least == least
    rule.combine(sent_of(drawn(least)), RECEIVED, Known(clients=range(least)))


def test_a_mixed_rule_remembers_what_its_own_rule_does() -> None:
    sent, memory = sent_of(drawn(6)), {"w": torch.full((4, 5), 0.2), "b": torch.full((9,), -0.1)}
    for rule in (NearestNeighborMixing(malicious=1, then=CenteredClipping()), Bucketing(then=CenteredClipping())):
        known = Known(clients=range(6), memory={name: leaf.double() for name, leaf in memory.items()}, seed=5)
        found = rule.combine(sent, RECEIVED, known)
        kept = rule.memory_after(sent, RECEIVED, known, found)
        assert_close(kept, {name: found[name] - RECEIVED[name] for name in RECEIVED}, 1e-12)
        assert not np.allclose(change_of(found), change_of(rule.combine(sent, RECEIVED, Known(range(6), seed=5))))


def alike(count: int, others: int) -> np.ndarray:
    """Changes in about one direction, and some in other ones, that are longer."""
    direction = drawn(1)[0]
    return np.concatenate([direction + 0.1 * drawn(count, 1), 5 * drawn(others, 2)])


def first_majority(vectors: np.ndarray) -> list[int]:
    """Joins the two groups with the nearest members, by cosine, until one group has more than half of all."""
    unit = vectors / np.linalg.norm(vectors, axis=1)[:, None]
    groups = [{k} for k in range(len(vectors))]
    while True:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a)]
        a, b = min(pairs, key=lambda pair: min(1 - unit[i] @ unit[j] for i in groups[pair[0]] for j in groups[pair[1]]))
        groups[b] |= groups.pop(a)
        if len(groups[b]) > len(vectors) // 2:
            return sorted(groups[b])


@pytest.mark.parametrize("compare", ["changes", "models"])
@pytest.mark.parametrize(("honest", "others"), [(7, 3), (7, 2), (12, 4)])
def test_flame_keeps_the_majority_clipped_to_the_median_norm(compare: Any, honest: int, others: int) -> None:
    changes = alike(honest, others)
    start = np.concatenate([np.ones(20), np.full(9, 0.5)]) if compare == "models" else 0
    inside = first_majority(changes + start)
    assert set(inside) <= set(range(honest)) or compare == "models"
    norms = np.linalg.norm(changes, axis=1)
    clipped = changes * np.minimum(1, np.median(norms) / norms)[:, None]
    found = Flame(compare=compare, noise=0).combine(sent_of(changes), RECEIVED)
    np.testing.assert_allclose(change_of(found), clipped[inside].mean(0), atol=1e-12)


def test_flame_adds_noise_in_multiples_of_the_median_norm() -> None:
    changes = alike(7, 2)
    quiet, known = Flame(compare="changes", noise=0), Known(seed=3)
    noisy = Flame(compare="changes", noise=0.5)
    noise = change_of(noisy.combine(sent_of(changes), RECEIVED, known)) - change_of(
        quiet.combine(sent_of(changes), RECEIVED, known)
    )
    drawn_noise = np.random.Generator(np.random.Philox(3)).standard_normal(29)
    np.testing.assert_allclose(noise, 0.5 * np.median(np.linalg.norm(changes, axis=1)) * drawn_noise, atol=1e-12)


def test_flame_takes_all_where_all_are_equally_unlike_or_nothing_changes() -> None:
    directions = np.eye(29)[:9] * 2.0
    found = Flame(compare="changes", noise=0).combine(sent_of(directions), RECEIVED)
    np.testing.assert_allclose(change_of(found), directions.mean(0), atol=1e-12)
    still = Flame().combine(sent_of(np.zeros((4, 29))), RECEIVED)
    assert_equal(still, dict(RECEIVED))


def test_the_next_rule_may_be_named_in_a_word_and_must_not_know_clients() -> None:
    section: TypeAdapter[Any] = TypeAdapter(Aggregator)
    assert section.validate_python({"name": "bucketing", "then": "median"}) == Bucketing(then=Median())
    made = section.validate_python({"name": "nnm", "malicious": 2, "then": {"name": "krum", "malicious": 2}})
    assert made == NearestNeighborMixing(malicious=2, then=Krum(malicious=2))
    for wrong in ("foolsgold", "nnm", "flame"):
        with pytest.raises(ValidationError):
            section.validate_python({"name": "bucketing", "then": wrong})
