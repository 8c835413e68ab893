"""The optimizers' rules: PyTorch's own, in all ways in which a step is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rayfl.optimization.optimizers import OptimizerName, OptimizerState, ParameterGroup, Rule
from rayfl.params import copy
from tests.support.gradients import PLAIN, PULLED, ByTorch, function, keeping, trained, updates
from tests.support.optimizer_rules import ADAMS, RULES
from tests.support.toys import assert_close, assert_equal

torch.set_num_threads(1)

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
DTYPES = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64], ids=["float32", "float64"]
)
OBJECTIVES = pytest.mark.parametrize(
    "objective",
    [PLAIN, pytest.param(PULLED, marks=pytest.mark.slow), function],
    ids=["plain", "pulled", "function"],
)
KEEPING = {name: rule for name, rule in RULES.items() if rule.slots}


def all_rules(rules: dict[str, Rule]) -> Any:
    return pytest.mark.parametrize("rule", rules.values(), ids=rules.keys())


def alone(rule: Rule, gradients: list[float], start: float = 1.0) -> list[float]:
    """A number after each step."""
    value, slots = (
        torch.tensor([start], dtype=torch.float64),
        [[torch.zeros(1, dtype=torch.float64)] for _ in rule.slots],
    )
    found = []
    for step, gradient in enumerate(gradients, 1):
        rule.step([value], [torch.tensor([gradient], dtype=torch.float64)], slots, torch.tensor(float(step)))
        found.append(float(value))
    return found


@all_rules(RULES)
@DTYPES
@OBJECTIVES
@MODES
def test_fed_equal_gradients_it_is_torch_optim(mode: str, objective: Any, dtype: torch.dtype, rule: Rule) -> None:
    """Three clients of 20, 8 and 13 steps; stacked, those that have finished leave the others."""
    requests = updates(objective, rule, dtype)
    starts = [copy(update.trainable) for update in requests]
    for update, start, found in zip(requests, starts, trained(mode, requests), strict=True):
        assert_close(found, ByTorch(update).run(), TOLERANCE[dtype])
        assert_equal(update.trainable, start)


@all_rules(KEEPING)
@DTYPES
@OBJECTIVES
@MODES
@pytest.mark.two_cases
def test_what_is_kept_goes_on_where_it_was(mode: str, objective: Any, dtype: torch.dtype, rule: Rule) -> None:
    """Passes that hand on what the optimizer keeps are one long pass of ``torch.optim``."""
    requests = keeping(updates(objective, rule, dtype, (5, 2, 3)))
    references = [ByTorch(update) for update in requests]
    for passes in range(1, 4):
        models = trained(mode, requests)
        for update, reference, model in zip(requests, references, models, strict=True):
            assert_close(model, reference.run(), TOLERANCE[dtype])
            assert update.optimizer_state is not None
            assert set(update.optimizer_state.slots) == set(rule.slots)
            if rule.counts and rule.optimizer != "sgd":
                assert update.optimizer_state.steps == dict.fromkeys(("first", "second"), passes * update.plan.steps)
        stored = [
            OptimizerState.of(update.optimizer_state.stored(), rule.slots)
            for update in requests
            if update.optimizer_state is not None
        ]
        pairs = zip(requests, models, stored, strict=True)
        requests = [replace(update, trainable=model, optimizer_state=kept) for update, model, kept in pairs]


@all_rules(KEEPING)
@MODES
@pytest.mark.two_cases
def test_keys_that_are_not_kept_begin_afresh(mode: str, rule: Rule) -> None:
    """Their number of steps, too, is 0 again."""
    (update,) = keeping(updates(PULLED, rule, torch.float64, (10,)))
    kept = ByTorch(update)
    (first,) = trained(mode, [update])
    assert update.optimizer_state is not None
    half = OptimizerState.of(update.optimizer_state.stored(("first",)), rule.slots)
    assert all(path.startswith("first/") for slot in half.slots.values() for path in slot)
    kept.run()
    again = replace(update, trainable=first, optimizer_state=half)
    (found,) = trained(mode, [again])
    assert_close(found["first"], kept.run()["first"], 1e-12)
    assert_close(found["second"], ByTorch(again).run()["second"], 1e-12)


@OBJECTIVES
@MODES
def test_groups_have_optimizers_of_their_own(mode: str, objective: Any) -> None:
    groups = (("second", ParameterGroup(lr=0.02, momentum=0.5, weight_decay=0.2, optimizer="sgd")),)
    requests = keeping(updates(objective, Rule(0.01, "adam", weight_decay=0.1), torch.float64, groups=groups))
    for update, found in zip(requests, trained(mode, requests), strict=True):
        assert_close(found, ByTorch(update, groups).run(), 1e-12)
        assert update.optimizer_state is not None
        kept = {name: {path.partition("/")[0] for path in slot} for name, slot in update.optimizer_state.slots.items()}
        assert kept == {"m": {"first"}, "v": {"first"}, "momentum": {"second"}}
        slots = {name for rule in update.rules for name in rule.slots}
        again = OptimizerState.of(update.optimizer_state.stored(), slots)
        assert again.steps == update.optimizer_state.steps
        assert_equal(again.slots, update.optimizer_state.slots)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_clients_that_have_made_other_numbers_of_steps_are_corrected_by_their_own(mode: str) -> None:
    """One is new, the others took part before, so that the same step is another one of theirs."""
    rule = Rule(0.01, "adam")
    requests = keeping(updates(PLAIN, rule, torch.float64, (12, 12, 12)))
    references = [ByTorch(update) for update in requests]
    (seen,) = trained(mode, requests[:1])
    references[0].run()
    requests[0] = replace(requests[0], trainable=seen)
    for reference, found in zip(references, trained(mode, requests), strict=True):
        assert_close(found, reference.run(), 1e-12)


def test_stacks_are_divided_by_steps_only_where_these_matter() -> None:
    for rule, divided in ((Rule(0.1, momentum=0.9), False), (RULES["dampening"], True), (Rule(0.1, "adam"), True)):
        new, known = keeping(updates(PLAIN, rule, torch.float32, (5, 5)))
        known = replace(known, optimizer_state=OptimizerState(steps={"first": 3, "second": 3}))
        assert (new.group() != known.group()) == divided


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Rule(0.1, "adam"), [0.900000002, 0.865439418117]),
        (Rule(0.1, "adam", weight_decay=0.01), [0.900000001961, 0.863364138070]),
        (Rule(0.1, "adamw", weight_decay=0.01), [0.899000002, 0.863540418115]),
        (Rule(0.1, momentum=0.9), [0.95, 0.925]),
        (Rule(0.1, momentum=0.9, nesterov=True), [0.905, 0.9025]),
        (Rule(0.1, momentum=0.9, dampening=0.5), [0.95, 0.915]),
    ],
    ids=str,
)
def test_by_hand(rule: Rule, expected: list[float]) -> None:
    """From 1 with the gradients 0.5 and -0.2."""
    assert alone(rule, [0.5, -0.2]) == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("gradient", [1e-12, 1e-8, 0.3, -7.0, 1e6])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.5), (0.5, 0.0)], ids=str)
def test_adams_first_step_is_as_long_as_the_learning_rate(gradient: float, betas: tuple[float, float]) -> None:
    (after,) = alone(Rule(0.1, "adam", betas=betas), [gradient], start=0.0)
    assert after == pytest.approx(-0.1 * gradient / (abs(gradient) + 1e-8), rel=1e-7)
    assert abs(after) <= 0.1 * (1 + 1e-12)


@pytest.mark.parametrize("optimizer", ADAMS)
def test_the_scale_of_a_loss_does_not_matter_to_adam_but_to_coupled_decay(optimizer: OptimizerName) -> None:
    gradients = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    scaled = [100 * gradient for gradient in gradients]
    rule = Rule(0.1, optimizer, eps=0.0)
    assert alone(rule, gradients) == pytest.approx(alone(rule, scaled), abs=1e-12)
    decaying = replace(rule, weight_decay=0.1)
    same = alone(decaying, gradients) == pytest.approx(alone(decaying, scaled), abs=1e-6)
    assert same == (optimizer == "adamw")


def test_adam_without_memory_goes_down_the_sign() -> None:
    rule, value = Rule(0.1, "adam", betas=(0.0, 0.0), eps=1e-3), 1.0
    for found, gradient in zip(alone(rule, [0.5, -0.2, 1e-3]), (0.5, -0.2, 1e-3), strict=True):
        value -= 0.1 * gradient / (abs(gradient) + 1e-3)
        assert found == pytest.approx(value, abs=1e-12)


def test_adamws_decay_alone_shrinks_by_its_share_each_step() -> None:
    shrunk = [(1 - 0.1 * 0.5) ** step for step in range(1, 6)]
    assert alone(Rule(0.1, "adamw", weight_decay=0.5), [0.0] * 5) == pytest.approx(shrunk, rel=1e-12)


def test_adam_without_memory_and_with_a_large_eps_is_scaled_sgd() -> None:
    gradients = [0.5, -0.2, 0.7]
    found = alone(Rule(1e9, "adam", betas=(0.0, 0.0), eps=1e10), gradients)
    assert found == pytest.approx(alone(Rule(0.1), gradients), rel=1e-9)


@MODES
def test_without_decay_adamw_is_adam_to_the_bit(mode: str) -> None:
    one, other = (trained(mode, updates(PULLED, Rule(0.01, name), torch.float32)) for name in ADAMS)
    for left, right in zip(one, other, strict=True):
        assert_equal(left, right)


@pytest.mark.parametrize("optimizer", ADAMS)
@OBJECTIVES
@MODES
def test_a_learning_rate_of_zero_moves_nothing_but_the_moments(
    mode: str, objective: Any, optimizer: OptimizerName
) -> None:
    requests = keeping(updates(objective, Rule(0.0, optimizer, weight_decay=0.1), torch.float32))
    for update, found in zip(requests, trained(mode, requests), strict=True):
        assert_equal(found, update.trainable)
        assert update.optimizer_state is not None and all(
            leaf.any() for leaf in update.optimizer_state.slots["m"].values()
        )
