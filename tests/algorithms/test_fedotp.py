"""FedOTP: invariants OTP of the transport plan, rounds by an oracle over transformers, messages, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

import rayfl
from algorithms.fedotp import FedOTP, Transport
from algorithms.parts.transport import transport_plan
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.models.pretrained.making_clip import NAMES
from rayfl.runs.committed import single_model
from rayfl.tasks.base import Predictor
from rayfl.tasks.classification import Classification
from tests.support.clips import (
    ADAPTER,
    SIZES,
    TRAIN,
    assert_alike,
    clip_images,
    clip_network,
    clip_toy,
    texts_with,
    wide_reference,
)
from tests.support.toys import CPU, Toy, assert_close, assert_equal

CONTEXT = "model.texts.context"
COHORTS = ([0, 2], [1, 3], [0, 1, 2, 3])
PROMPTS: dict[str, dict[str, Any]] = {"shared": {"length": 2}, "by class": {"length": 3, "context": "by_class"}}


def similarities(*shape: int, seed: int = 0) -> Tensor:
    """Cosines such as those of patches and texts."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (0.3 * drawn).clamp(-1, 1)


@pytest.mark.parametrize("texts", [1, 2, 3])
@pytest.mark.parametrize("mass", [0.3, 0.8, 1.0])
def test_inv_otp_1_the_plan_is_the_solution_by_its_optimality_conditions(mass: float, texts: int) -> None:
    """T = diag(u) K diag(v) with u <= 1, and where a patch's limit is not reached, u = 1."""
    similarity = similarities(4, 5, 16, texts)
    plan = transport_plan(similarity, mass, 0.1, 3000)
    assert_close(plan.sum(-2), torch.full((4, 5, texts), mass / texts, dtype=torch.float64), 1e-14)
    rows = plan.sum(-1)
    assert rows.max() <= 1 / 16 + 1e-9
    factors = plan / torch.exp((similarity - 1) / 0.1)
    v = factors.amax(-2, keepdim=True)  # u is one where a limit is not reached, if that is so anywhere
    u = factors / v
    assert_close(u, u[..., :1].expand_as(u), 1e-9)
    if mass < 1:
        free = rows < 1 / 16 - 1e-7
        assert free.any((-1, -2)).all()
        assert (u[..., 0][free] - 1).abs().max() <= 1e-9
    else:
        assert_close(rows, torch.full_like(rows, 1 / 16), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mass", [0.5, 1.0])
def test_inv_otp_2_with_little_entropy_it_is_the_linear_program(mass: float) -> None:
    similarity = similarities(9, 2, seed=3)
    plan = transport_plan(similarity, mass, 1e-3, 20000)
    rows, columns = np.kron(np.eye(9), np.ones((1, 2))), np.kron(np.ones((1, 9)), np.eye(2))
    exact = linprog(-similarity.numpy().ravel(), rows, np.full(9, 1 / 9), columns, np.full(2, mass / 2))
    assert plan.isfinite().all()
    assert abs(float((plan * similarity).sum()) + exact.fun) < 2e-3


def test_inv_otp_3_texts_that_are_the_same_share_what_one_has_alone() -> None:
    one = similarities(6, 16, 1)
    alone, both = transport_plan(one, 0.8, 0.1, 500), transport_plan(one.expand(-1, -1, 2), 0.8, 0.1, 500)
    assert_close(both, alone.expand(-1, -1, 2) / 2, 1e-12)


def test_inv_otp_4_no_plan_depends_on_other_samples_and_it_is_a_constant() -> None:
    similarity = similarities(7, 3, 16, 2).requires_grad_()
    plan = transport_plan(similarity, 0.8, 0.1, 50)
    assert not plan.requires_grad
    assert_equal(transport_plan(similarity[2:3], 0.8, 0.1, 50), plan[2:3])
    narrow = transport_plan(similarity.detach().float(), 0.8, 1e-4, 50)
    assert narrow.dtype == torch.float32 and narrow.isfinite().all()


def moved(similarity: Tensor, mass: float, regularization: float, iterations: int) -> Tensor:
    """The plan of one image and class by sums one after the other, without logarithms."""
    patches, texts = similarity.shape
    kernel = np.exp((similarity.detach().numpy() - 1) / regularization)
    u, v = np.ones(patches), np.ones(texts)
    for _ in range(iterations):
        u = np.array([min(1 / (patches * sum(kernel[p, n] * v[n] for n in range(texts))), 1) for p in range(patches)])
        v = np.array([mass / (texts * sum(kernel[p, n] * u[p] for p in range(patches))) for n in range(texts)])
    return torch.from_numpy(u[:, None] * kernel * v)


def logits_of(contexts: list[Tensor], x: Tensor, mass: float, regularization: float, iterations: int) -> Tensor:
    """Logits over transformers' own model, one image and class after the other."""
    model, _ = wide_reference()
    with torch.no_grad():
        hidden = model.vision_model(pixel_values=x).last_hidden_state[:, 1:]
        patches = model.visual_projection(model.vision_model.post_layernorm(hidden))
    texts = [texts_with(context, list(NAMES), ".") for context in contexts]
    rows = []
    for image in patches:
        image = image / image.norm(dim=1, keepdim=True)
        row = []
        for number in range(len(NAMES)):
            similarity = torch.stack([image @ one[number] for one in texts], 1)
            row.append((moved(similarity, mass, regularization, iterations) * similarity).sum())
        rows.append(torch.stack(row))
    return model.logit_scale.exp() * torch.stack(rows)


def contexts_at_first(toy: Toy) -> tuple[Tensor, Tensor]:
    """p_g and p_k before any training."""
    one, other = (toy.context.streams.integer(name) for name in ("init.global", "init.local"))
    return toy.task.network.initialize(one)[CONTEXT], toy.task.network.initialize(other)[CONTEXT]


@pytest.mark.parametrize("mode", ["looped", pytest.param("vectorized", marks=pytest.mark.slow)])
@pytest.mark.parametrize("prompt", ["shared", *(pytest.param(one, marks=pytest.mark.slow) for one in [*PROMPTS][1:])])
def test_inv_otp_5_rounds_are_those_of_an_oracle_over_transformers(prompt: str, mode: str) -> None:
    """Ragged clients, one of which has a single sample, momentum, weight decay and partial participation."""
    train = TRAIN.model_copy(update={"weight_decay": 0.01})
    toy = clip_toy(FedOTP(mass=0.7, regularization=0.2, iterations=9), mode, PROMPTS[prompt], train=train)
    common, begun = contexts_at_first(toy)
    first, local = common, dict[int, Tensor]()
    for round, cohort in enumerate(COHORTS):
        sent = []
        for client in cohort:
            leaves = [nn.Parameter(leaf.clone()) for leaf in (common, local.get(client, begun))]
            optimizer = torch.optim.SGD(leaves, lr=0.02, momentum=0.5, weight_decay=0.01)
            part, n = toy.dataset.load(client)["train"], SIZES[client]
            plan = plan_batches(n, 4, 2 * -(-n // 4), toy.context.streams.generator("batches", round, client))
            for index in plan.batches(CPU):
                optimizer.zero_grad()
                nn.functional.cross_entropy(logits_of([*leaves], part.x[index], 0.7, 0.2, 9), part.y[index]).backward()
                optimizer.step()
            sent.append((n, leaves[0].detach()))
            local[client] = leaves[1].detach()
        common = sum(n * leaf for n, leaf in sent) / sum(n for n, _ in sent)
        toy.step(cohort)
        assert_close(toy.server["model"], {CONTEXT: common}, 1e-11)
    for client, context in local.items():
        assert_close(toy.states()[client], {"local": context}, 1e-11)
        part = toy.dataset.load(client)["test"]
        rows = toy.scores()[client]
        for row, contexts in (("personalized", [common, context]), ("global", [common])):
            loss = float(nn.functional.cross_entropy(logits_of(contexts, part.x, 0.7, 0.2, 9), part.y))
            assert abs(rows[row].loss - loss) < 1e-10
    assert (common - first).abs().max() > 1e-3


@pytest.mark.slow
def test_inv_otp_6_equal_contexts_predict_what_the_global_one_does() -> None:
    """Both begin as the template's words, and are the same before any training."""
    toy = clip_toy(FedOTP(iterations=300), prompt={"start": "template"})
    assert_equal(*({CONTEXT: context} for context in contexts_at_first(toy)))
    for rows in toy.scores().values():
        assert abs(rows["personalized"].loss - rows["global"].loss) < 1e-9
    toy.step([0, 2])
    toy.step([0, 1])
    rows = toy.scores()[0]
    assert abs(rows["personalized"].loss - rows["global"].loss) > 1e-6


def test_no_row_can_be_exported_and_the_error_says_why() -> None:
    toy = clip_toy(FedOTP())
    (alone,) = FedOTP().global_predictors(toy.server, toy.task).values()
    with pytest.raises(ConfigError, match=r"'global' predicts with a model and what the method makes .* \(Transport\)"):
        single_model(alone, "global")
    both = Predictor.of(*alone.models, *alone.models, combine=alone.combine)
    with pytest.raises(ConfigError, match="'personalized' predicts with 2 models together"):
        single_model(both, "personalized")


def test_the_global_context_travels_alone_and_the_local_one_stays() -> None:
    toy = clip_toy(FedOTP(), model={"adapter": ADAPTER})
    toy.step([0, 2])
    kept = toy.states()
    assert set(toy.server["model"]) == set(toy.task.network.parameter_names)
    assert {client: set(state) for client, state in kept.items() if state} == {0: {"local"}, 2: {"local"}}
    size = 8 * sum(leaf.numel() for leaf in toy.server["model"].values())
    assert toy.federation.traffic.by_client == dict.fromkeys((0, 2), (size, size))
    assert not torch.equal(kept[0]["local"], kept[2]["local"])
    toy.step([1, 2])
    assert_equal(toy.states()[0], kept[0])


def test_newcomers_have_a_local_context_and_leave_nothing() -> None:
    toy = clip_toy(FedOTP(), unseen=1)
    toy.step([0, 1])
    before = toy.states()
    untrained = Transport(0.8, 0.1, 100)
    model, (_, begun) = toy.server["model"], contexts_at_first(toy)
    part = toy.dataset.load(3)["test"]
    loss = nn.functional.nll_loss(untrained([model, {CONTEXT: begun}], part.x, toy.task), part.y)
    rows = toy.scores(newcomers=True)[3]
    assert rows["personalized"].loss < float(loss) - 1e-4
    assert_equal(toy.states(), before)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("adapter", [pytest.param("none", marks=pytest.mark.slow), ADAPTER])
def test_stacked_is_looped(prompt: str, adapter: Any) -> None:
    one, other = (clip_toy(FedOTP(), mode, PROMPTS[prompt], {"adapter": adapter}) for mode in ("looped", "vectorized"))
    assert_alike(one, other, COHORTS)


@pytest.mark.parametrize("mode", [pytest.param("looped", marks=pytest.mark.slow), "vectorized"])
@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.slow), "adamw"])
def test_single_samples_and_single_classes_stay_finite(mode: str, optimizer: str) -> None:
    train = TrainConfig(rounds=2, clients_per_round=4, local_epochs=3, batch_size=1, lr=0.01, optimizer=optimizer)
    toy = clip_toy(FedOTP(regularization=1e-3), mode, dataset=clip_images((1, 1, 3, 2), classes=1), train=train)
    toy.run()
    assert toy.server["model"][CONTEXT].isfinite().all()
    assert all(state["local"].isfinite().all() for state in toy.states().values())
    assert all(rows["personalized"].loss < 20 for rows in toy.scores().values())


def test_other_models_are_refused_before_any_actor_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"FedOTP needs CLIP with a context that is trained: set model=pretrained"):
        rayfl.run("quickstart", algorithm="fedotp", storage_path=str(tmp_path))
    without = clip_network({"context": "none"}, adapter=ADAPTER)
    with pytest.raises(ConfigError, match=r"model\.prompt\.context=shared or by_class"):
        FedOTP().check(Classification(without), clip_toy(FedOTP()).context)
