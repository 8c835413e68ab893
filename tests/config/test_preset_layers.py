"""How the settings of a paper's presets are laid over each other."""

from __future__ import annotations

from typing import Any

import pytest

from rayfl.config.paper_presets import expanded


def layered(**family: Any) -> dict[str, Any]:
    base = {
        "config": {
            "dataset": "mnist",
            "partition": {"name": "iid", "num_clients": 3},
            "train": {"rounds": 5, "lr": 1.0},
        },
        "methods": {"fedavg": {}, "mine": {"algorithm": {"name": "fedprox", "proximal_weight": 1.0}, "row": "local"}},
    }
    paper = {"short": "P", "title": "T", "authors": "A"}
    whole = {"name": "p-{a}", "paper": "p", "table": "Table 1", "own": "mine", "bases": ["b"], **family}
    return {"papers": {"p": paper}, "bases": {"b": base}, "families": [whole]}


def test_later_layers_change_earlier_ones_and_another_name_replaces_a_section() -> None:
    axes = {
        "a": {
            "x": {"about": "X", "config": {"train": {"lr": 2.0}, "partition": {"num_clients": 9}}},
            "y": {
                "config": {"partition": {"name": "dirichlet", "alpha": 1.0}},
                "methods": {"mine": {"algorithm": {"proximal_weight": 3.0}, "train": {"rounds": 1}}},
            },
        }
    }
    presets = expanded(layered(axes=axes, about="with {a}", config={"train": {"momentum": 0.5}}))
    assert list(presets) == ["p-x", "p-y"]
    x, y = presets["p-x"], presets["p-y"]
    assert (x.about, y.about) == ("with X", "with y")
    assert x.content == {
        "dataset": {"name": "mnist"},
        "partition": {"name": "iid", "num_clients": 9},
        "algorithm": {"name": "fedprox", "proximal_weight": 1.0},
        "train": {"rounds": 5, "lr": 2.0, "momentum": 0.5},
    }
    assert y.content["partition"] == {"name": "dirichlet", "alpha": 1.0}
    assert y.content["train"] == {"rounds": 1, "lr": 1.0, "momentum": 0.5}
    assert y.methods["mine"] == {
        "algorithm": {"name": "fedprox", "proximal_weight": 3.0},
        "row": "local",
        "train": {"rounds": 1},
    }
    assert y.methods["fedavg"] == {"algorithm": {"name": "fedavg"}}


def test_copies_of_methods_have_every_combination_of_values() -> None:
    variants = [
        {
            "of": ["mine"],
            "named": "{of}_{proximal_weight}_e{train.lr}",
            "over": {"proximal_weight": [0, 1], "train.lr": [3]},
        }
    ]
    methods = expanded(layered(name="p", variants=variants))["p"].methods
    assert list(methods) == ["fedavg", "mine", "mine_0_e3", "mine_1_e3"]
    assert methods["mine_0_e3"] == {
        "algorithm": {"name": "fedprox", "proximal_weight": 0},
        "row": "local",
        "train": {"lr": 3},
    }


def test_two_presets_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two presets are called p"):
        expanded(layered(name="p", axes={"a": {"x": {}, "y": {}}}))
