"""Users' own optimizers: what they may be, and that what they keep survives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rayfl
from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from tests.support.experiments import Interrupt, assert_same, outcome, small_experiment

OWN = '''
from typing import ClassVar

import torch

import rayfl


class Momentum(rayfl.ElementwiseOptimizer):
    """Lion by another name."""

    counts: ClassVar[bool] = True
    decoupled: ClassVar[bool] = True

    decay: float = 0.99

    @property
    def slots(self):
        return ("kept",)

    def step(self, parameters, gradients, slots, number, lr):
        assert number >= 1
        for parameter, gradient, kept in zip(parameters, gradients, slots[0]):
            parameter.sub_(lr * (0.9 * kept + (1 - 0.9) * gradient).sign())
            kept.mul_(self.decay).add_(gradient, alpha=1 - self.decay)


class Plain(rayfl.ElementwiseOptimizer):
    def step(self, parameters, gradients, slots, number, lr):
        assert number is None
        for parameter, gradient in zip(parameters, gradients):
            parameter.sub_(lr * self.pace(gradient))

    def pace(self, gradient):
        return gradient


class Normed(Plain):
    def pace(self, gradient):
        return gradient / (1 + gradient.norm())


class Drawn(Plain):
    def pace(self, gradient):
        return gradient + torch.randn_like(gradient)


class Copied(Plain):
    def step(self, parameters, gradients, slots, number, lr):
        parameters = [parameter - lr * gradient for parameter, gradient in zip(parameters, gradients)]


class Failing(Plain):
    def pace(self, gradient):
        raise ZeroDivisionError("by hand")


class Taken(Plain):
    @property
    def slots(self):
        return ("momentum",)


class Unfinished(rayfl.ElementwiseOptimizer):
    pass


class Stranger:
    pass
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_rules.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def experiment(folder: Path, name: str, optimizer: str, **more: Any) -> dict[str, Any]:
    content = small_experiment(folder, name, "ditto", backend="inline")
    train = {**content["train"], "momentum": 0.0, "lr": 0.01, "weight_decay": 0.1, "optimizer": optimizer, **more}
    return {**content, "train": train}


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.first_case
def test_the_same_rule_under_another_name_gives_the_same_models(folder: Path, mode: str) -> None:
    """Client by client to the bit: the same sums in the same order."""
    found = []
    for name, optimizer in (("theirs", "lion"), ("own", "own_rules:Momentum")):
        rayfl.run({**experiment(folder, name, optimizer), "engine": {"mode": mode}})
        found.append(outcome(folder / name).server["model"])
    for leaf, other in zip(found[0].values(), found[1].values(), strict=True):
        torch.testing.assert_close(leaf, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_is_kept_goes_on_after_an_interrupt(folder: Path) -> None:
    """A state has the optimizer's tensors and its number of steps."""
    more = {"persist_optimizer": True, "optimizer_options": {"decay": 0.5}}
    rayfl.run(experiment(folder, "whole", "own_rules:Momentum", **more))
    pieces = experiment(folder, "pieces", "own_rules:Momentum", **more)
    with pytest.raises(KeyboardInterrupt):
        rayfl.run(pieces, callbacks=[Interrupt(2)])
    rayfl.run(pieces)
    whole = outcome(folder / "whole")
    assert_same(whole, outcome(folder / "pieces"))
    kept = [tree for state in whole.states.values() for tree in state["optimizer"].values()]
    assert kept
    for tree in kept:
        assert set(tree) == {"kept", "count"} and all(count > 0 for count in tree["count"].values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Normed", r"train\.optimizer: own_rules:Normed moves a number otherwise where its tensor is cut into pieces"),
        ("Drawn", r"two runs of own_rules:Drawn over the same gradients differ"),
        ("Copied", r"steps of own_rules:Copied leave all parameters as they are: it must change the tensors"),
        ("Failing", r"train\.optimizer: own_rules:Failing fails: ZeroDivisionError: by hand"),
        ("Taken", r"own_rules:Taken keeps 'momentum': give its slots other names"),
        ("Unfinished", r"'own_rules:Unfinished' does not define step"),
        ("Stranger", r"'own_rules:Stranger' is no subclass of rayfl\.ElementwiseOptimizer"),
        ("Plian", r"module 'own_rules' has no 'Plian' \(did you mean 'Plain'\?\)"),
    ],
)
def test_what_an_optimizer_must_not_be_is_found_before_the_run(folder: Path, name: str, message: str) -> None:
    config = load_config(Experiment, experiment(folder, "run", f"own_rules:{name}"), {})
    with pytest.raises(ConfigError, match=message):
        Parts(config).check()


def test_unknown_options_and_what_keeps_nothing(folder: Path) -> None:
    for more, message in (
        ({"optimizer_options": {"decya": 0.5}}, r"own_rules:Plain has no 'decya'; it has none"),
        ({"persist_optimizer": True}, r"train\.persist_optimizer: own_rules:Plain keeps nothing: drop"),
    ):
        config = load_config(Experiment, experiment(folder, "run", "own_rules:Plain", **more), {})
        with pytest.raises(ConfigError, match=message):
            Parts(config).check()


def test_plain_descent_is_sgd(folder: Path) -> None:
    found = []
    for name, optimizer in (("sgd", "sgd"), ("own", "own_rules:Plain")):
        rayfl.run(experiment(folder, name, optimizer))
        found.append(outcome(folder / name).server["model"])
    for leaf, other in zip(found[0].values(), found[1].values(), strict=True):
        torch.testing.assert_close(leaf, other, rtol=1e-5, atol=1e-6)
