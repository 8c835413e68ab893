"""The optimizers' rules: PyTorch's own, in all ways in which a step is taken."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rayfl.engine.optimizers import Kept, OptimizerName, ParameterGroup, Rule, clipped
from rayfl.errors import MethodError
from rayfl.params import copy
from tests.support.gradients import PLACES, PLAIN, PULLED, ByTorch, function, given, keeping, trained, tree_of, updates
from tests.support.toys import assert_close, assert_equal

torch.set_num_threads(1)

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
MODES = pytest.mark.parametrize("mode", ["looped", "vectorized"])
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
OBJECTIVES = pytest.mark.parametrize("objective", [PLAIN, PULLED, function], ids=["plain", "pulled", "function"])
ADAMS: tuple[OptimizerName, ...] = ("adam", "adamw")
RULES = {
    "sgd": Rule(0.01),
    "sgd-decay": Rule(0.01, weight_decay=0.1),
    "momentum": Rule(0.01, momentum=0.9),
    "dampening": Rule(0.01, momentum=0.9, dampening=0.4),
    "nesterov": Rule(0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "all-but-nesterov": Rule(0.01, momentum=0.8, dampening=0.3, weight_decay=0.1),
    **{name: Rule(0.01, name) for name in ADAMS},
    **{f"{name}-betas": Rule(0.01, name, betas=(0.7, 0.9)) for name in ADAMS},
    **{f"{name}-eps": Rule(0.01, name, eps=0.1) for name in ADAMS},
    **{f"{name}-decay": Rule(0.01, name, weight_decay=0.1) for name in ADAMS},
    **{f"{name}-no-memory": Rule(0.01, name, betas=(0.0, 0.0)) for name in ADAMS},
}
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
    """Three clients of 50, 20 and 33 steps; stacked, those that have finished leave the others."""
    requests = updates(objective, rule, dtype)
    starts = [copy(update.trainable) for update in requests]
    for update, start, found in zip(requests, starts, trained(mode, requests), strict=True):
        assert_close(found, ByTorch(update).run(), TOLERANCE[dtype])
        assert_equal(update.trainable, start)


@all_rules(KEEPING)
@DTYPES
@OBJECTIVES
@MODES
def test_what_is_kept_goes_on_where_it_was(mode: str, objective: Any, dtype: torch.dtype, rule: Rule) -> None:
    """Passes that hand on what the optimizer keeps are one long pass of ``torch.optim``."""
    requests = keeping(updates(objective, rule, dtype, (10, 3, 7)))
    references = [ByTorch(update) for update in requests]
    for passes in range(1, 4):
        models = trained(mode, requests)
        for update, reference, model in zip(requests, references, models, strict=True):
            assert_close(model, reference.run(), TOLERANCE[dtype])
            assert update.kept is not None
            assert set(update.kept.slots) == set(rule.slots)
            if rule.optimizer != "sgd":
                assert update.kept.steps == dict.fromkeys(("first", "second"), passes * update.plan.steps)
        stored = [Kept.of(update.kept.stored(), rule.slots) for update in requests if update.kept is not None]
        pairs = zip(requests, models, stored, strict=True)
        requests = [replace(update, trainable=model, kept=kept) for update, model, kept in pairs]


@all_rules(KEEPING)
@MODES
def test_keys_that_are_not_kept_begin_afresh(mode: str, rule: Rule) -> None:
    """Their number of steps, too, is 0 again."""
    (update,) = keeping(updates(PULLED, rule, torch.float64, (10,)))
    kept = ByTorch(update)
    (first,) = trained(mode, [update])
    assert update.kept is not None
    half = Kept.of(update.kept.stored(("first",)), rule.slots)
    assert all(path.startswith("first/") for slot in half.slots.values() for path in slot)
    kept.run()
    again = replace(update, trainable=first, kept=half)
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
        assert update.kept is not None
        kept = {name: {path.partition("/")[0] for path in slot} for name, slot in update.kept.slots.items()}
        assert kept == {"m": {"first"}, "v": {"first"}, "momentum": {"second"}}
        slots = {name for rule in update.rules for name in rule.slots}
        again = Kept.of(update.kept.stored(), slots)
        assert again.steps == update.kept.steps
        assert_equal(again.slots, update.kept.slots)


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
        known = replace(known, kept=Kept(steps={"first": 3, "second": 3}))
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
        assert update.kept is not None and all(leaf.any() for leaf in update.kept.slots["m"].values())


def unread(model: Any, batch: Any, task: Any, frozen: Any, draw: Any) -> Tensor:
    """Its gradient is 1 for all of ``first``, and none for ``second``."""
    total: Tensor = batch.mean(0 * batch.x.sum(-1)) + sum(leaf.sum() for leaf in model["first"].values())
    return total


@MODES
def test_what_is_not_read_is_moved_by_adams_decay_by_the_learning_rate(mode: str) -> None:
    """Coupled decay is all of its gradient, and Adam makes steps of one length; AdamW's shrinks it by its share."""
    start = updates(unread, Rule(0.0), torch.float64, (1,))[0].trainable["second"]["b.weight"]
    expected = {
        Rule(0.01, "adam", weight_decay=1e-3): start - 0.01 * start.sign(),
        Rule(0.01, "adamw", weight_decay=1e-3): start * (1 - 1e-5),
        Rule(0.01, "adam"): start,
    }
    for rule, after in expected.items():
        (found,) = trained(mode, updates(unread, rule, torch.float64, (1,)))
        assert float((found["second"]["b.weight"] - after).abs().max()) < 1e-5 * 0.01 * 100
        assert torch.equal(found["second"]["b.weight"], start) == (not rule.weight_decay)


@pytest.mark.parametrize("optimizer", ADAMS)
@MODES
def test_adam_moves_nothing_where_loss_and_penalty_have_no_gradient(mode: str, optimizer: OptimizerName) -> None:
    """The gradient of a distance of 0 is 0, and no round-off."""
    made = []
    for update in updates(PULLED, Rule(0.01, optimizer), torch.float32):
        data = replace(update.examples, x=update.examples.x.clone())
        data.x[:, PLACES["b.weight"]] = 0
        made.append(
            replace(update, examples=data, frozen={f"{key} anchor": update.trainable[key] for key in update.trainable})
        )
    for found, update in zip(trained(mode, made), made, strict=True):
        assert torch.equal(found["second"]["b.weight"], update.trainable["second"]["b.weight"])
        assert not torch.equal(found["first"]["a.weight"], update.trainable["first"]["a.weight"])


@pytest.mark.parametrize("optimizer", ["sgd", *ADAMS])
@MODES
def test_bounds_hold_after_every_step(mode: str, optimizer: OptimizerName) -> None:
    groups = (("second", ParameterGroup(bounds=(-0.25, 0.25))),)
    requests = updates(PULLED, Rule(0.1, optimizer), torch.float64, groups=groups)
    free = trained(mode, updates(PULLED, Rule(0.1, optimizer), torch.float64))
    for found, unbounded in zip(trained(mode, requests), free, strict=True):
        assert (
            float(found["second"]["b.weight"].abs().max()) <= 0.25 < float(unbounded["second"]["b.weight"].abs().max())
        )
        assert_close(found["first"], unbounded["first"], 1e-12)


@pytest.mark.parametrize("rule", [Rule(0.1, momentum=0.9), Rule(0.1, "adam"), Rule(0.1, "adamw")], ids=str)
@MODES
def test_tensors_without_elements_are_left_alone(mode: str, rule: Rule) -> None:
    """What stays with a client has placeholders of no elements in the tree."""
    requests = keeping(updates(unread, rule, torch.float32, max_grad_norm=1.0))
    holed = [replace(r, trainable={**r.trainable, "second": {"b.weight": torch.zeros(0)}}) for r in requests]
    for found in trained(mode, holed):
        assert found["second"]["b.weight"].shape == (0,)
        assert found["first"]["a.bias"].isfinite().all()


def test_momentum_that_another_optimizer_would_ignore_is_refused() -> None:
    with pytest.raises(MethodError, match=r"momentum=0\.9.*adam.*betas.*optimizer='sgd'"):
        ParameterGroup(momentum=0.9).applied(Rule(0.1, "adam"))
    assert ParameterGroup(momentum=0.9, optimizer="sgd").applied(Rule(0.1, "adam")).slots == ("momentum",)
    assert ParameterGroup(optimizer="adam").applied(Rule(0.1, momentum=0.9)).slots == ("m", "v")
    assert ParameterGroup(momentum=0.0).applied(Rule(0.1, "adamw")).slots == ("m", "v")


@pytest.mark.parametrize("rule", [RULES["nesterov"], RULES["adam-decay"], RULES["adamw-decay"]], ids=str)
@pytest.mark.parametrize("max_norm", [1e-3, 2.0, 1e9])
@MODES
def test_gradients_are_clipped_before_decay_and_moments(mode: str, max_norm: float, rule: Rule) -> None:
    """Each client's by its own norm, over all of its tensors, whichever clients are stacked with it."""
    requests = updates(function, rule, torch.float64, max_grad_norm=max_norm)
    for update, found in zip(requests, trained(mode, requests), strict=True):
        assert_close(found, ByTorch(update).run(max_norm), 1e-12)


@MODES
def test_a_limit_that_is_not_reached_changes_no_bit(mode: str) -> None:
    """Not even with a sum of terms, which is taken by autograd then."""
    one, other = (trained(mode, updates(function, Rule(0.1), torch.float32, max_grad_norm=n)) for n in (None, 1e9))
    for left, right in zip(one, other, strict=True):
        assert_equal(left, right)


@pytest.mark.parametrize("stacked", [False, True])
def test_clipped_gradients_have_the_limits_length_and_their_direction(stacked: bool) -> None:
    gradients = [torch.randn(4, 3, 5), torch.randn(4, 7), torch.randn(4)]
    rows = [[g[k] for g in gradients] for k in range(4)] if stacked else [gradients]
    found = clipped(gradients, 0.5, stacked)
    for k, row in enumerate(rows):
        own = torch.cat([g.flatten() for g in row])
        cut = torch.cat([(g[k] if stacked else g).flatten() for g in found])
        assert 0.5 * (1 - 1e-5) < float(cut.norm()) <= 0.5 * (1 + 1e-6)
        assert float(torch.cosine_similarity(own, cut, dim=0)) == pytest.approx(1.0, abs=1e-6)
        if stacked:
            for mine, whole in zip(clipped(row, 0.5), found, strict=True):
                assert torch.allclose(mine, whole[k], rtol=1e-6)


def test_the_reference_is_fed_what_the_engine_is() -> None:
    """Steps of plain SGD are the sum of the gradients."""
    (update,) = updates(PLAIN, Rule(0.1), torch.float64, (5,))
    moved = tree_of(-0.1 * torch.stack(given(update)).sum(0))
    (found,) = trained("looped", [update])
    for key in ("first", "second"):
        for name, leaf in found[key].items():
            assert math.isclose(
                float((leaf - update.trainable[key][name] - moved[key][name]).abs().max()), 0, abs_tol=1e-14
            )
