"""Methods without backpropagation over adapters of pretrained models: images and texts, looped and in stacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rayfl
from rayfl.params import Tree
from tests.models.pretrained.test_language_runs import experiment as of_texts
from tests.support.adapter_runs import experiment as of_images
from tests.support.experiments import Outcome, outcome
from tests.support.toys import assert_close

PLAIN = {"optimizer": "sgd", "lr": 0.001}
SEEDS = 64
METHODS: dict[str, dict[str, Any]] = {
    "fedzo": {"name": "fedzo", "directions": 2, "distribution": "gaussian"},
    "fedkseed": {"name": "fedkseed", "candidates": SEEDS},
    "fedkseed-pro": {"name": "fedkseed", "candidates": SEEDS, "sampling": "amplitude"},
    "decomfl": {"name": "decomfl", "local_steps": 2},
    "feedsign": {"name": "feedsign"},
}
KINDS = {"images": of_images, "texts": of_texts}
QUICK = {("fedkseed", "texts")}
RUNS = [
    pytest.param(name, kind, marks=() if (name, kind) in QUICK else pytest.mark.slow)
    for name in METHODS
    for kind in KINDS
]


def run(folder: Path, kind: str, method: dict[str, Any], mode: str, **sections: Any) -> Outcome:
    """What two rounds of three clients have given."""
    rayfl.run(KINDS[kind](folder, mode, method, train=PLAIN, engine={"mode": mode}, **sections))
    return outcome(folder / mode)


def sent(found: Outcome) -> set[tuple[int, int]]:
    """Bytes down and up of the clients of cohorts."""
    rows = [row for row in found.clients.to_pylist() if row["bytes_down"] is not None and row["cohort"] == "selected"]
    return {(row["bytes_down"], row["bytes_up"]) for row in rows}


def size_of(model: Tree) -> int:
    """Bytes of a model."""
    return sum(leaf.nbytes for leaf in model.values())


@pytest.mark.parametrize(("name", "kind"), RUNS)
def test_adapters_are_trained_and_stacks_are_looped_clients(tmp_path: Path, name: str, kind: str) -> None:
    """In float32 a slope has the rounding of two losses, divided by mu, which a step multiplies by eta."""
    looped, stacked = (run(tmp_path, kind, METHODS[name], mode) for mode in ("looped", "vectorized"))
    assert_close(looped.server["model"], stacked.server["model"], 1e-4)
    model, b = looped.server["model"], [name for name in looped.server["model"] if "lora_B" in name]
    assert b and any(model[name].any() for name in b)
    if name == "fedzo":
        assert sent(looped) == {(size_of(model), size_of(model))}
    else:
        assert all(down + up < size_of(model) for down, up in sent(looped))


@pytest.mark.parametrize("kind", [pytest.param("images", marks=pytest.mark.slow), "texts"])
def test_messages_are_as_long_for_adapters_of_any_rank(tmp_path: Path, kind: str) -> None:
    found = []
    for rank in (1, 4):
        adapter = {"adapter": {"r": rank, "alpha": 4}}
        found.append(run(tmp_path / str(rank), kind, METHODS["fedkseed"], "looped", model=adapter))
    assert size_of(found[1].server["model"]) > 2 * size_of(found[0].server["model"])
    assert sent(found[0]) == sent(found[1])
    assert {down for down, _ in sent(found[0])} == {4 * SEEDS}
