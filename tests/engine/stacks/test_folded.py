"""Stacks of clients over a pretrained base: equal to looped, few operations, and as wide as rows allow."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rayfl.engine.engine import Engine, EngineConfig
from rayfl.engine.scoring.evaluation import evaluate
from rayfl.engine.scoring.evaluation_together import ScoringRequest, evaluate_together
from rayfl.engine.stack_sizes import rows_per_step_of
from rayfl.engine.stacks import stacked_terms, vectorized
from rayfl.engine.steps import looped
from rayfl.engine.updates.requests import TrainRequest
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.objectives import drawn, line, loss, squared_cosine, squared_distance
from rayfl.optimization.optimizers import OptimizerState, Rule
from rayfl.tasks.base import Batch, Predictor, Task
from rayfl.tasks.classification import Classification
from tests.support.bases import IMAGES, TOKENS, network, passes_of_networks, trained
from tests.support.problems import CPU, cross_entropy, examples, request
from tests.support.toys import assert_close

SIZES = (7, 3, 11, 6, 5)


def distillation(model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
    """FedPHP's: what a frozen teacher says, and the features of both."""
    features, logits = task.features_and_logits(model, batch)
    with torch.no_grad():
        taught, told = task.features_and_logits(frozen["received"], batch, training=False)
    alike = batch.mean(-(told.softmax(-1) * logits.log_softmax(-1)).sum(-1))
    return task.loss_of(logits, batch) + 0.5 * alike + 0.1 * batch.mean((features - taught).square().mean(-1))


PAIR = ("federated", "local")
OBJECTIVES: dict[str, tuple[tuple[str, ...], Any]] = {
    "FedAvg": ((), loss()),
    "FedAvg, a function": ((), cross_entropy),
    "Ditto": ((), loss() + 0.1 * squared_distance("", "received")),
    "SuPerFed": (
        PAIR,
        loss(at=line("federated", "local", drawn("coefficient")))
        + 0.01 * squared_distance("federated", "received")
        + squared_cosine("federated", "local"),
    ),
    "SuPerFed by layer": (
        PAIR,
        loss(at=line("federated", "local", drawn("by_layer"), groups=lambda task: task.network.layers))
        + squared_cosine("federated", "local"),
    ),
    "FedPHP": ((), distillation),
    "FedRep's head": ((), loss("", completed_by="received")),
}
MOMENTUM = Rule(0.05, momentum=0.9)
ADAMW = Rule(0.01, optimizer="adamw", weight_decay=0.1)


def updates(net: AdaptedNetwork, name: str, rule: Rule, sizes: Any = SIZES, keep: bool = True) -> list[TrainRequest]:
    """Local updates of ragged clients, with trees whose B are not zero."""
    keys, objective = OBJECTIVES[name]
    received, made = trained(net, 100), []
    for k, n in enumerate(sizes):
        tree: Any = trained(net, k)
        if name == "FedRep's head":
            tree = {name: tree[name] for name in net.groups["head"]}
        if keys:
            tree = {key: trained(net, k + 10 * i) for i, key in enumerate(keys)}
        spec = SPECS[net.head_weight]
        one = request(examples(n, spec, k), tree, objective, client=k, frozen={"received": received}, batch_size=4)
        generator = np.random.default_rng(k)
        draws: Mapping[str, Any] = {
            "coefficient": generator.random(one.plan.steps),
            "by_layer": generator.random((one.plan.steps, len(net.layers))),
        }
        made.append(
            replace(one, draws=draws if keys else None, rule=rule, optimizer_state=OptimizerState() if keep else None)
        )
    return made


SPECS = {"model.classifier.weight": IMAGES, "model.score.weight": TOKENS}


@pytest.mark.two_cases
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *(
            pytest.param(
                name, MOMENTUM, marks=() if name in ("FedAvg", "Ditto", "SuPerFed by layer") else pytest.mark.slow
            )
            for name in OBJECTIVES
        ),
        pytest.param("FedAvg", ADAMW, marks=pytest.mark.slow),
        ("SuPerFed", ADAMW),
    ],
)
def test_stacks_are_the_same_as_one_client_after_the_other(name: str, rule: Rule) -> None:
    net = network("vit")
    task = Classification(net)
    given, alone = (updates(net, name, rule) for _ in range(2))
    engine = Engine(task, CPU, EngineConfig(mode="vectorized"))
    for _ in range(2):  # the second time with the moments of the first, and the number of its steps
        replies = engine.execute(given)
        for reply, one, own in zip(replies, alone, given, strict=True):
            # Adam divides by roots of what is close to zero
            assert_close(reply, looped.train(one, task, CPU), 1e-5 if rule is MOMENTUM else 2e-4)
            assert one.optimizer_state is not None and own.optimizer_state is not None
            assert own.optimizer_state.steps == one.optimizer_state.steps
            assert_close(own.optimizer_state.slots, one.optimizer_state.slots, 1e-4)


@pytest.mark.parametrize("name", ["FedAvg", "SuPerFed"])
def test_products_on_one_block_take_the_folded_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as on GPUs; :func:`vmap` of ``grad`` would run attention client by client there."""
    made = []

    class Noted(stacked_terms.StackedTerms):
        def __init__(self, *args: Any) -> None:
            made.append(1)
            super().__init__(*args)

    monkeypatch.setattr(vectorized, "are_products", lambda device: True)
    monkeypatch.setattr(vectorized, "StackedTerms", Noted)
    net = network("llama")
    task = Classification(net)
    for reply, one in zip(
        vectorized.train(updates(net, name, Rule(0.05)), task, CPU), updates(net, name, Rule(0.05)), strict=True
    ):
        assert_close(reply, looped.train(one, task, CPU), 1e-5)
    assert made == [1]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_base_in_bfloat16_trains_float32_trees(precision: Any) -> None:
    net = network("vit")
    engines = [Engine(Classification(net), CPU, EngineConfig(mode=mode, precision=precision)) for mode in MODES]
    folded, alone = (engine.execute(updates(net, "Ditto", ADAMW, keep=False)) for engine in engines)
    for one, other in zip(folded, alone, strict=True):
        assert all(leaf.dtype == torch.float32 for leaf in one.values())
        assert_close(one, other, 1e-5 if precision == "float32" else 2e-2)


MODES: tuple[Any, ...] = ("vectorized", "looped")


def test_a_stack_is_as_wide_as_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[int] = []

    def train(requests: Any, *_: Any) -> list[Any]:
        stacks.append(len(requests))
        return [one.trainable for one in requests]

    monkeypatch.setattr(vectorized, "train", train)
    net = network("vit")
    assert net.rows_per_sample == 5  # 2 x 2 patches and the class token
    for rows, expected in ((60, [3, 3, 2]), (20, [1] * 8), (1, [1] * 8), (None, [4, 4]), (10_000, [4, 4])):
        stacks.clear()
        config = EngineConfig(mode="vectorized", width=4, rows_per_step=rows)
        Engine(Classification(net), CPU, config).execute(updates(net, "FedAvg", Rule(0.1), [9] * 8))
        assert stacks == expected, rows


def test_a_step_has_more_rows_where_memory_was_measured() -> None:
    cases: tuple[tuple[Any, Any, str, int | None], ...] = (
        ("auto", 40, "cuda", 65536),
        ("auto", "auto", "cuda", 16384),  # nothing was measured
        ("auto", None, "cuda", 16384),
        ("auto", 40, "cpu", 16384),
        (100, 40, "cuda", 100),
        (None, 40, "cuda", None),
    )
    for rows, width, device, expected in cases:
        config = EngineConfig(width=width, rows_per_step=rows)
        assert rows_per_step_of(config, torch.device(device)) == expected


@pytest.mark.parametrize("rows", [None, 60])
def test_clients_are_scored_in_stacks_of_so_many_rows(rows: int | None) -> None:
    net = network("vit")
    task = Classification(net)
    asked = [
        ScoringRequest(
            {"own": Predictor.of(trained(net, k)), "shared": Predictor.of(trained(net, 100))}, examples(n, IMAGES, k)
        )
        for k, n in enumerate((7, 3, 11))
    ]
    with passes_of_networks() as passes:
        found = evaluate_together(asked, task, 4, rows)
    seen = [len(x) for x in passes]
    if rows is not None:
        assert max(seen) <= rows // net.rows_per_sample == 12
    else:
        assert max(seen) == 12 and len(seen) < 7
    for one, scores in zip(asked, found, strict=True):
        for name, expected in evaluate(one.predictors, one.examples, task, 4).items():
            np.testing.assert_allclose(scores[name].vector, expected.vector, rtol=1e-5, atol=1e-5)


class Operations(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.partition("::")[2]
        if name not in VIEWS:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


_VIEWS = """view t transpose expand slice select unsqueeze squeeze detach alias as_strided split unbind permute
_unsafe_view lift_fresh empty empty_like"""
VIEWS = frozenset(_VIEWS.split())


def operations(clients: int) -> Counter[str]:
    """The operations of one step: of three, less those of two."""
    net = network("vit")
    task, counted = Classification(net), []
    for steps in (2, 3):
        requests = [
            request(
                examples(4 * steps, IMAGES, k), trained(net, k), cross_entropy, batch_size=4, epochs=1, momentum=0.0
            )
            for k in range(clients)
        ]
        with Operations() as count:
            vectorized.train(requests, task, CPU)
        counted.append(count.found)
    return counted[1] - counted[0]


def test_a_step_of_many_clients_takes_no_more_operations_than_one_of_few() -> None:
    """One pass of fused attention for all, and one product for each frozen matrix: a lost fusion is noticed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns where vmap has no rule and makes a loop over clients
        few, many = operations(2), operations(8)
    assert few == many
    attention = {name: count for name, count in many.items() if "attention" in name}
    assert sum(attention.values()) == 4  # two blocks, forward and backward
    assert many["addmm"] + many["mm"] <= 24
    assert sum(many.values()) <= MOST_OPERATIONS


MOST_OPERATIONS = 150
"""What was counted for two blocks, with PyTorch 2.15 and transformers 5.23, and a little room."""


def test_loss_of_a_stack_is_a_mean_over_samples() -> None:
    """A padded batch has no part in it: the mutation of a mean over padding."""
    net = network("vit")
    tree, data = trained(net, 0), examples(3, IMAGES, 0)
    task = Classification(net)
    padded = Batch(torch.cat([data.x, data.x[:1]]), torch.cat([data.y, data.y[:1]]), torch.tensor([1.0, 1, 1, 0]))
    expected = F.cross_entropy(net.logits(tree, data.x), data.y)
    torch.testing.assert_close(task.loss(tree, padded), expected)
