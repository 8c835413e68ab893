"""Sums of terms: called by autograd and read by the engine they are the same objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rayfl.engine.steps import looped, rows, term_step
from rayfl.engine.steps.rows import PIECE
from rayfl.engine.steps.term_step import StepOnTerms
from rayfl.errors import MethodError
from rayfl.examples import InputSpec
from rayfl.models.base import Network
from rayfl.models.zoo import TwoNN
from rayfl.objectives import TRAINED, line
from rayfl.objectives.numbers import Factor
from rayfl.objectives.terms import (
    Sum,
    constant,
    drawn,
    envelope,
    frozen,
    function,
    inner_product,
    loss,
    squared_cosine,
    squared_distance,
)
from rayfl.optimization.optimizers import OptimizerState, ParameterGroup, Rule
from rayfl.params import Tree, leaves
from rayfl.tasks.base import Batch, Task
from rayfl.tasks.classification import Classification
from tests.support import plain
from tests.support.problems import CPU, Normalized, examples, request
from tests.support.stacks import engine
from tests.support.toy_networks import DoubleNetwork, TwoLayers
from tests.support.toys import assert_close

SPEC = InputSpec("image", (6,), 4)
NETWORKS: dict[str, Network] = {
    "written out": DoubleNetwork(lambda: TwoNN(hidden=(5, 3)).build(SPEC)),
    "by autograd": DoubleNetwork(lambda: TwoLayers(6, 9, 4)),
    "normalized": DoubleNetwork(Normalized),
}
STEPS = 3
RULES = [
    Rule(0.1),
    Rule(0.1, momentum=0.9, weight_decay=0.01),
    Rule(0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    Rule(0.1, momentum=0.9, nesterov=True),
    Rule(0.01, "adam", weight_decay=0.01),
    Rule(0.01, "adamw", weight_decay=0.01),
]
GROUPS = [
    (),
    (("a", ParameterGroup(lr=0.3, momentum=0.0)), ("pair", ParameterGroup(weight_decay=0.1))),
    (("b", ParameterGroup(optimizer="adam")),),
]

MODELS = ["a", "b", "c"]
ENDS = st.sampled_from(["a", "b", "c", constant("a"), constant("b")])
NUMBERS: list[Factor] = [1, 0.3, -2.0, drawn("x"), 1 - 0.5 * drawn("x"), frozen("mu"), frozen("mu") * drawn("y") + 0.1]
FACTORS = st.sampled_from(NUMBERS)


def layers(task: Task) -> tuple[tuple[str, ...], ...]:
    return task.network.layers


def some_layers(task: Task) -> tuple[tuple[str, ...], ...]:
    """Without the last one."""
    return task.network.layers[:-1]


def entropic(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    """Reads several trees, and not as terms do."""
    first, second = task.logits(model["a"], batch), task.logits(frozen["c"], batch, training=False)
    first, second = first.log_softmax(-1), second.log_softmax(-1)
    return (first.exp() * (first - second)).sum() * draw["y"]


BUFFERS = st.sampled_from(["a", "b"])
LINES = st.builds(line, ENDS, ENDS, st.sampled_from([0.3, 0, 1, drawn("x"), frozen("mu")]), buffers_of=BUFFERS)
POINTS = st.sampled_from([drawn("point"), 1 - drawn("point")])
LAYERED = st.builds(line, ENDS, ENDS, POINTS, st.sampled_from([layers, some_layers]), buffers_of=BUFFERS)
TRAINED_LINES = st.one_of(LINES, LAYERED).filter(lambda one: {one.start, one.end} & {"a", "b"})
LOSSES = st.one_of(
    st.sampled_from(["a", "b"]).map(loss), st.just(loss("part", completed_by="c")), TRAINED_LINES.map(loss)
)
KINDS: st.SearchStrategy[Callable[..., Sum]] = st.sampled_from([squared_distance, inner_product, squared_cosine])
SAME = st.sampled_from(["a", "b", constant("a"), constant("b"), "c"])
PENALTIES = st.one_of(
    st.builds(lambda kind, of, to: kind(of, to), KINDS, SAME, SAME),
    st.builds(lambda kind, to: kind("part", to), KINDS, SAME),
    st.builds(lambda kind: kind(TRAINED, "whole"), KINDS),
    st.builds(lambda kind: kind("pair", "anchors"), KINDS),
    st.builds(lambda of: envelope(*of, drawn("due"), frozen("mu")), st.permutations(["a", "b"])),
)
SUMS = st.lists(st.tuples(FACTORS, st.one_of(LOSSES, PENALTIES)), max_size=6).map(
    lambda parts: sum((factor * term for factor, term in parts), loss("a"))
)


def update_of(network: Network, objective: Any, seed: int = 0) -> Any:
    """A local update of two models, a part of a third and a nested tree, with frozen ones and numbers."""
    models = {name: network.initialize(seed + k) for k, name in enumerate(MODELS)}
    part = {name: network.initialize(seed + 5)[name] for name in (*network.head_names, *network.buffer_names)}
    generator = torch.Generator().manual_seed(seed)
    pairs = [{"p": {"w": torch.randn(7, 3, generator=generator).double()}, "q": torch.ones(2).double()} for _ in "ab"]
    trained = {"a": models["a"], "b": models["b"], "part": part, "pair": pairs[0]}
    whole = {"part": part, **{name: network.initialize(seed + 7) for name in ("b", "a")}, "pair": pairs[1]}
    mu = torch.tensor(0.4, dtype=torch.float64)
    rng = np.random.default_rng(seed)
    numbers = {"x": rng.random(STEPS), "y": rng.random(STEPS), "due": np.arange(STEPS) % 2.0}
    return request(
        examples(23, SPEC, seed, torch.float64),
        trained,
        objective,
        frozen={"c": models["c"], "whole": whole, "anchors": pairs[1], "mu": mu},
        draws={**numbers, "point": rng.random((STEPS, len(network.layers)))},
        epochs=1,
    )


def assert_the_same(objective: Sum, name: str, rule: Rule, groups: Any, **options: Any) -> Tree:
    task = Classification(NETWORKS[name])
    updates = [replace(update_of(task.network, objective), rule=rule, groups=groups, **options) for _ in range(2)]
    found, expected = looped.train(updates[0], task, CPU), plain.train(updates[1], task, CPU)
    # Adam divides by the root of squares, which are small here and there
    adam = any(one.optimizer not in (None, "sgd") for one in (rule, *(group for _, group in groups)))
    assert_close(found, expected, 1e-8 if adam else 1e-11)
    return found


@settings(deadline=None, max_examples=60)
@given(
    SUMS, st.sampled_from(list(NETWORKS)), st.sampled_from(RULES), st.sampled_from(GROUPS), st.sampled_from([PIECE, 16])
)
def test_a_sum_is_read_as_it_is_called(objective: Sum, name: str, rule: Rule, groups: Any, piece: int) -> None:
    assert objective.readable
    # Adam makes much of round-off where a gradient is zero, as a bias's before a batch normalization is.
    assume(name != "normalized" or (rule.optimizer == "sgd" and groups != GROUPS[2]))
    with pytest.MonkeyPatch.context() as patched:
        for module in (rows, term_step):
            patched.setattr(module, "PIECE", piece)
        assert_the_same(objective, name, rule, groups)


@settings(deadline=None, max_examples=10)
@given(SUMS, st.sampled_from(list(NETWORKS)), st.sampled_from(RULES[:4]))
def test_a_sum_with_a_function_is_called(objective: Sum, name: str, rule: Rule) -> None:
    with_function = objective + entropic
    assert not with_function.readable
    assert_the_same(with_function, name, rule, ())
    assert_the_same(0.5 * function(entropic) + objective, name, rule, ())


BOTH = loss("a") + loss("b")
PULLED = loss("a") + 0.3 * squared_distance("a", "c")
CASES: dict[str, Sum] = {
    "as it moves what another reads": squared_distance("b", constant("a")) + squared_distance(TRAINED, "whole") / 2,
    "as another moves what it reads": squared_distance("a", constant("b")) + squared_distance(TRAINED, "whole") / 2,
    "more than ten": sum(
        (drawn("x") * squared_cosine(of, to) for of, to in 6 * [("a", "b"), ("b", "c")]), squared_cosine("a", "c")
    ),
    "losses at one model": BOTH + 2 * loss("a") + frozen("mu") * loss(line("a", "b", drawn("x"))),
    "a vector's entry and a number": drawn("x") * loss(line("a", "b", drawn("point"), layers)) + BOTH,
    "some layers": loss(line("a", "b", drawn("point"), some_layers)),
    "with itself": squared_distance("a", "a") + inner_product("a", "a") + squared_cosine("b", "b") + BOTH,
    "nothing else": 0 * squared_distance("a", "b") + BOTH,
    "penalties alone": squared_distance("a", "b") + inner_product("b", "c"),
}


@pytest.mark.parametrize("rule", [RULES[0], RULES[1]], ids=["plain", "momentum"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("case", CASES)
def test_sums_that_are_easily_read_wrongly(case: str, name: str, rule: Rule) -> None:
    found = assert_the_same(CASES[case], name, rule, ())
    start = update_of(NETWORKS[name], CASES[case]).trainable
    assert not torch.equal(found["a"]["head.weight"], start["a"]["head.weight"])


def test_parameters_without_a_group_are_those_of_the_start() -> None:
    task, update = Classification(NETWORKS["by autograd"]), None
    objective = loss(line("a", "b", drawn("point"), some_layers))
    update = update_of(task.network, objective)
    trained = looped.train(replace(update, rule=Rule(0.1)), task, CPU)
    for name in task.network.layers[-1]:
        assert torch.equal(trained["b"][name], update.trainable["b"][name])
        assert not torch.equal(trained["a"][name], update.trainable["a"][name])


def test_a_vector_and_numbers_in_float32() -> None:
    task = Classification(TwoNN(hidden=(5, 3)).network(SPEC))
    objective = loss("a") + frozen("mu") * squared_cosine("a", "b") + loss(line("a", "b", drawn("point"), layers))
    made = update_of(task.network, objective)
    data = examples(23, SPEC, 0)
    found, expected = (
        way(replace(made, examples=data, trainable={key: made.trainable[key] for key in "ab"}), task, CPU)
        for way in (looped.train, plain.train)
    )
    assert_close(found, expected, 1e-5)


CHANGES: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.05},
    "bounds": {"groups": (("b", ParameterGroup(bounds=(-0.1, 0.1))),)},
    "clipped and bounds": {"max_grad_norm": 0.05, "groups": (("a", ParameterGroup(lr=0.5, bounds=(-0.1, 0.1))),)},
}


@pytest.mark.parametrize("rule", RULES[:4] + RULES[5:], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_clipping_and_bounds_are_those_of_pytorch(change: str, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(StepOnTerms, "take")
    task = Classification(NETWORKS["written out"])
    objective = BOTH + 0.3 * squared_cosine("a", "b") + squared_distance("part", "a")
    options = {"groups": (), **CHANGES[change]}
    made = [replace(update_of(task.network, objective), rule=rule, **options) for _ in range(2)]
    found = looped.train(made[0], task, CPU)
    assert_close(found, plain.train(made[1], task, CPU), 1e-8 if rule.optimizer == "adamw" else 1e-12)
    if options["groups"]:
        first = options["groups"][0][0]
        assert max(float(leaf.abs().max()) for leaf in found[first].values()) <= 0.1


@pytest.mark.parametrize("rule", [RULES[1], RULES[2], RULES[3]], ids=str)
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("nested", [True, False])
def test_kept_momenta_go_on_where_they_were(nested: bool, clip: float | None, rule: Rule) -> None:
    """Two passes from what is kept are one pass of twice as many steps."""
    task = Classification(NETWORKS["written out"])
    model = task.network.initialize(0)
    start: Tree = {"m": model} if nested else model
    whole = request(
        examples(24, SPEC, 0, torch.float64), start, loss("m" if nested else TRAINED), epochs=2, batch_size=8
    )
    whole = replace(whole, rule=rule, max_grad_norm=clip)
    first, second = whole.pieces(3)
    stored: Tree = {}
    for piece in (first, second):
        kept = OptimizerState.of(stored, rule.slots)
        start = looped.train(replace(piece, trainable=start, optimizer_state=kept), task, CPU)
        stored = kept.stored()
    assert_close(start, plain.train(whole, task, CPU), 1e-12)


@pytest.mark.parametrize("rule", RULES[:4], ids=str)
@pytest.mark.parametrize("objective", [PULLED, CASES["losses at one model"], CASES["some layers"]])
def test_no_bit_depends_on_where_a_gradient_is_read(
    objective: Sum, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of large parameters are read where autograd puts them, without the padding of buffers."""
    task = Classification(NETWORKS["by autograd"])
    update = replace(update_of(task.network, objective), rule=rule)
    whole = looped.train(update, task, CPU)
    for module in (rows, term_step):
        monkeypatch.setattr(module, "PIECE", 16)
    in_pieces = dict(leaves(looped.train(update, task, CPU)))
    assert all(torch.equal(leaf, in_pieces[path]) for path, leaf in leaves(whole))


def test_padding_of_such_gradients_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and inner products are those of whole buffers."""
    for module in (rows, term_step):
        monkeypatch.setattr(module, "PIECE", 16)
    assert_the_same(BOTH + 5 * squared_cosine("a", "b"), "by autograd", RULES[1], ())


def test_sums_are_subtracted_and_numbers_divided() -> None:
    one, other = loss("a"), drawn("x") * squared_distance("a", "c")
    assert one - other == one + -1 * other
    assert -drawn("x") / 4 == drawn("x") * -1 * 0.25
    assert (-one).terms == (-1 * one).terms
    assert (one - entropic).terms == (one + -1 * function(entropic)).terms


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
def test_a_sum_without_terms_is_refused(mode: str) -> None:
    (found,) = engine(NETWORKS["by autograd"], mode).execute([update_of(NETWORKS["by autograd"], 0 * loss("a"))])
    assert isinstance(found, MethodError) and "has no terms" in str(found)
