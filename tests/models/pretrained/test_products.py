"""The error of averaged factors: against dense matrices, and where it is zero or not defined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import rayfl
from rayfl.aggregation.exact_sum import ExactSum, Weighted
from rayfl.models.pretrained.products import contribution, product_error
from rayfl.results.schemas import known_schema
from tests.support.adapter_runs import experiment
from tests.support.bases import network, trained
from tests.support.problems import NETWORK

WEIGHTS = (3, 1, 5, 2)


def estimated(trees: Any, weights: Any = WEIGHTS) -> float | None:
    net, total = network("vit"), ExactSum()
    for tree, weight in zip(trees, weights, strict=True):
        total.add(Weighted({"products": contribution(net, tree, weight)}, 1))
    return product_error(total.mean()["products"])


def dense(trees: Any, weights: Any = WEIGHTS) -> float:
    """By definition."""
    shares = [weight / sum(weights) for weight in weights]
    difference = size = 0.0
    for name in (name for name in trees[0] if ".lora_A." in name):
        other = name.replace("lora_A", "lora_B")
        mean = sum(p * tree[other].double() @ tree[name].double() for p, tree in zip(shares, trees, strict=True))
        a, b = (sum(p * tree[n].double() for p, tree in zip(shares, trees, strict=True)) for n in (name, other))
        difference, size = difference + float((mean - b @ a).square().sum()), size + float(mean.square().sum())
    return (difference / size) ** 0.5


@pytest.mark.parametrize("scale", [0.02, 0.1, 0.5])
def test_the_sketch_is_close_to_dense_matrices(scale: float) -> None:
    trees = [trained(network("vit"), k, scale) for k in range(4)]
    found, exact = estimated(trees), dense(trees)
    assert found is not None and exact / 1.5 < found < exact * 1.5


@pytest.mark.parametrize("apart", [0.01, 0.03, 0.1])
def test_the_sketch_is_close_where_adapters_are(apart: float) -> None:
    """As after a round of local updates, where the error is small: a weight that counts twice would hide it."""
    start, generator = trained(network("vit"), 0), torch.Generator().manual_seed(1)
    trees = [
        {name: leaf + apart * torch.randn(leaf.shape, generator=generator) for name, leaf in start.items()}
        for _ in range(4)
    ]
    found, exact = estimated(trees), dense(trees)
    assert exact < 0.5 and found is not None and exact / 1.5 < found < exact * 1.5


def test_it_is_zero_where_one_factor_is_common_or_there_is_one_client() -> None:
    net = network("vit")
    trees = [trained(net, k) for k in range(4)]
    common = [{n: trees[0][n] if ".lora_A." in n else tree[n] for n in tree} for tree in trees]
    assert (estimated(common) or 0) < 1e-6 < 0.1 < (estimated(trees) or 0)
    assert (estimated(trees[:1] * 4) or 0) < 1e-6
    assert (estimated(trees[:1], (7,)) or 0) < 1e-6
    assert estimated([net.initialize(0)] * 4) is None  # B = 0


def test_weights_count() -> None:
    trees = [trained(network("vit"), k) for k in range(2)]
    assert (estimated(trees, (1000, 1)) or 0) < 0.2 * (estimated(trees, (1, 1)) or 0)


def test_half_an_adapter_or_none_has_no_error() -> None:
    net = network("vit")
    tree = trained(net, 0)
    assert contribution(net, {n: t for n, t in tree.items() if ".lora_A." in n}, 1) == {}
    assert contribution(NETWORK, NETWORK.initialize(0), 1) == {}
    nested = contribution(net, {"model": tree, "control": tree}, 1)
    assert len(nested) == 1 + len(net.sites)


@pytest.mark.parametrize(
    ("method", "reported"),
    [
        ("fedavg", True),
        pytest.param("fedalt", True, marks=pytest.mark.slow),
        ({"name": "fedper", "head_group": "lora_b"}, False),
    ],
)
def test_it_is_a_column_of_the_cohorts_rows(method: Any, reported: bool, tmp_path: Path) -> None:
    rayfl.run(experiment(tmp_path, "run", method))
    table = pq.read_table(tmp_path / "run" / "rounds.parquet")
    assert known_schema("rounds", table.schema)
    cohort = [row for row in table.to_pylist() if row["cohort"] == "selected"]
    found = [row["product_error"] for row in cohort]
    assert cohort and all((value is not None and 0 < value < 2) if reported else value is None for value in found)
    assert all(row["product_error"] is None for row in table.to_pylist() if row["cohort"] == "all")
