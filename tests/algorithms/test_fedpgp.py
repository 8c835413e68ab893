"""FedPGP: invariants PGP of the contrast, factors and contexts, rounds by an oracle, messages, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayfl
from algorithms.fedavg import FedAvg
from algorithms.fedpgp import FedPGP, personal
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.models.pretrained.making_clip import NAMES
from rayfl.params import Tree
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
PROMPTS: dict[str, dict[str, Any]] = {
    "shared": {"length": 2},
    "by class": {"length": 3, "context": "by_class"},
    "words": {"start": "template"},
}


def first(toy: Toy) -> Tree:
    """p and the factors before any training."""
    model = toy.task.network.initialize(toy.context.streams.integer("init.global"))
    *classes, length, width = model[CONTEXT].shape
    generator, rank = toy.context.streams.generator("init.factors"), toy.algorithm.rank  # type: ignore[attr-defined]
    left, right = (generator.standard_normal(shape) for shape in ((*classes, length, rank), (*classes, rank, width)))
    return {"model": model, "left": 0.02 * torch.from_numpy(left), "right": 0.02 * torch.from_numpy(right)}


def lessened(context: Tensor, left: Tensor, right: Tensor, x: Tensor, y: Tensor, mu: float, tau: float) -> Tensor:
    """The loss of a mini-batch over transformers' own model, class by class and sample by sample."""
    model, tokenizer = wide_reference()
    images = model.get_image_features(pixel_values=x).pooler_output
    images = images / images.norm(dim=-1, keepdim=True)
    products = torch.stack([u @ v for u, v in zip(left, right, strict=True)]) if left.dim() == 3 else left @ right
    own, common = (texts_with(p, list(NAMES), ".") for p in (context + products, context))
    scores = [model.logit_scale.exp() * torch.stack([image @ text for text in own]) for image in images]
    cross = torch.stack([score.logsumexp(0) - score[label] for score, label in zip(scores, y, strict=True)]).mean()
    contrast = []
    for number, name in enumerate(NAMES):
        tokens = torch.tensor([tokenizer(f"a photo of a {name}.")["input_ids"]])
        fixed = model.get_text_features(input_ids=tokens).pooler_output[0]
        near, far = (torch.cosine_similarity(common[number], other, dim=0) for other in (fixed, own[number]))
        both = torch.stack([near, far]) / tau
        contrast.append(both.logsumexp(0) - both[0])
    return cross + mu * torch.stack(contrast).mean()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["looped", pytest.param("vectorized", marks=pytest.mark.slow)])
@pytest.mark.parametrize("prompt", ["shared", *(pytest.param(one, marks=pytest.mark.slow) for one in [*PROMPTS][1:])])
def test_inv_pgp_1_rounds_are_those_of_an_oracle_over_transformers(prompt: str, mode: str) -> None:
    """Ragged clients, one of which has a single sample, momentum, weight decay and partial participation."""
    train = TRAIN.model_copy(update={"weight_decay": 0.01})
    toy = clip_toy(FedPGP(rank=3, contrast_weight=0.7, temperature=0.4), mode, PROMPTS[prompt], train=train)
    begun = first(toy)
    context, factors = begun["model"][CONTEXT], dict[int, tuple[Tensor, Tensor]]()
    for round, cohort in enumerate(COHORTS):
        sent = []
        for client in cohort:
            own = factors.get(client, (begun["left"], begun["right"]))
            leaves = [nn.Parameter(leaf.clone()) for leaf in (context, *own)]
            optimizer = torch.optim.SGD(leaves, lr=0.02, momentum=0.5, weight_decay=0.01)
            part, n = toy.dataset.load(client)["train"], SIZES[client]
            plan = plan_batches(n, 4, 2 * -(-n // 4), toy.context.streams.generator("batches", round, client))
            for index in plan.batches(CPU):
                optimizer.zero_grad()
                lessened(*leaves, part.x[index], part.y[index], 0.7, 0.4).backward()
                optimizer.step()
            sent.append((n, leaves[0].detach()))
            factors[client] = leaves[1].detach(), leaves[2].detach()
        context = sum(n * leaf for n, leaf in sent) / sum(n for n, _ in sent)
        toy.step(cohort)
        assert_close(toy.server["model"], {CONTEXT: context}, 1e-11)
    for client, (left, right) in factors.items():
        assert_close(toy.states()[client], {"left": left, "right": right}, 1e-11)
    assert (context - begun["model"][CONTEXT]).abs().max() > 1e-3


@pytest.mark.parametrize("prompt", ["shared", *(pytest.param(one, marks=pytest.mark.slow) for one in [*PROMPTS][1:])])
def test_inv_pgp_2_without_contrast_and_with_zero_factors_it_is_promptfl_to_the_bit(
    prompt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors = FedPGP.factors
    monkeypatch.setattr(FedPGP, "factors", lambda self, client: {n: 0 * f for n, f in factors(self, client).items()})
    ours, theirs = (clip_toy(method, prompt=PROMPTS[prompt]) for method in (FedPGP(contrast_weight=0), FedAvg()))
    for cohort in COHORTS:
        assert_equal(ours.step(cohort), theirs.step(cohort))
    found, known = ours.scores(), theirs.scores()
    for client in found:
        for row in ("personalized", "global"):
            assert found[client][row].vector.tolist() == known[client]["global"].vector.tolist()
    assert all(not leaf.any() for state in ours.states().values() for leaf in state.values())


@pytest.mark.slow
def test_inv_pgp_3_the_contrast_draws_the_global_texts_to_the_template() -> None:
    found = {}
    for mu in (0.0, 20.0):
        toy = clip_toy(FedPGP(contrast_weight=mu), "vectorized", train=TRAIN.model_copy(update={"lr": 0.05}))
        for _ in range(6):
            toy.step([0, 1, 2, 3])
        common = toy.task.network.text_features(toy.server["model"])
        found[mu] = float((common * toy.task.network.template_features).sum(1).mean())
    assert found[20.0] > found[0.0] + 0.3, found


def test_inv_pgp_4_the_personal_context_differs_from_the_global_one_by_rank_b() -> None:
    for rank in (1, 2):
        toy = clip_toy(FedPGP(rank=rank), prompt={"length": 4})
        toy.run()
        for state in toy.states().values():
            own = personal({"model": toy.server["model"], **state})[CONTEXT]
            assert int(torch.linalg.matrix_rank(own - toy.server["model"][CONTEXT], rtol=1e-9)) == rank


def test_the_context_travels_alone_and_factors_stay() -> None:
    toy = clip_toy(FedPGP(), model={"adapter": ADAPTER})
    toy.step([0, 2])
    kept = toy.states()
    names = set(toy.task.network.parameter_names)
    assert set(toy.server["model"]) == names and len(names) > 1
    assert set(kept[0]) == {"left", "right"} and kept[0]["left"].shape == (2, 4) and kept[0]["right"].shape == (4, 48)
    size = 8 * sum(leaf.numel() for leaf in toy.server["model"].values())
    assert toy.federation.traffic.by_client == dict.fromkeys((0, 2), (size, size))
    assert not torch.equal(kept[0]["left"], kept[2]["left"])
    toy.step([1, 2])
    assert_equal(toy.states()[0], kept[0])


def test_rows_are_the_context_with_and_without_the_clients_factors() -> None:
    toy = clip_toy(FedPGP())
    toy.step([0, 2])
    begun, scores = first(toy), toy.scores()
    for client in range(4):
        state = toy.states().get(client) or {name: begun[name] for name in ("left", "right")}
        part, server = toy.dataset.load(client)["test"], toy.server["model"]
        for row, p in (("global", server[CONTEXT]), ("personalized", server[CONTEXT] + state["left"] @ state["right"])):
            loss = nn.functional.cross_entropy(toy.task.network.logits({CONTEXT: p}, part.x), part.y)
            assert abs(scores[client][row].loss - float(loss)) < 1e-11


def test_newcomers_have_factors_of_their_own_and_leave_nothing() -> None:
    toy = clip_toy(FedPGP(), unseen=1)
    toy.step([0, 1])
    before = toy.states()
    rows = toy.scores(newcomers=True)[3]
    assert rows["personalized"].loss != rows["global"].loss
    assert_equal(toy.states(), before)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("adapter", [pytest.param("none", marks=pytest.mark.slow), ADAPTER])
@pytest.mark.first_case
def test_stacked_is_looped(prompt: str, adapter: Any) -> None:
    one, other = (clip_toy(FedPGP(), mode, PROMPTS[prompt], {"adapter": adapter}) for mode in ("looped", "vectorized"))
    assert_alike(one, other, COHORTS)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.first_case
def test_single_samples_and_single_classes_stay_finite(mode: str, optimizer: str) -> None:
    train = TrainConfig(rounds=2, clients_per_round=4, local_epochs=3, batch_size=1, lr=0.01, optimizer=optimizer)
    toy = clip_toy(FedPGP(), mode, dataset=clip_images((1, 1, 3, 2), classes=1), train=train)
    toy.run()
    assert toy.server["model"][CONTEXT].isfinite().all()
    assert all(leaf.isfinite().all() for state in toy.states().values() for leaf in state.values())
    assert all(rows["personalized"].loss < 20 for rows in toy.scores().values())


def test_other_models_are_refused_before_any_actor_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"FedPGP needs CLIP with a context that is trained: set model=pretrained"):
        rayfl.run("quickstart", algorithm="fedpgp", storage_path=str(tmp_path))
    without = clip_network({"context": "none"}, adapter=ADAPTER)
    with pytest.raises(ConfigError, match=r"model\.prompt\.context=shared or by_class"):
        FedPGP().check(Classification(without), clip_toy(FedPGP()).context)


def test_a_template_that_cannot_be_read_is_refused_unless_nothing_is_contrasted() -> None:
    toy = clip_toy(FedPGP(contrast_weight=0), prompt={"length": 1, "template": "a " * 40 + "{}"})
    with pytest.raises(ConfigError, match=r"the template's texts have 43 tokens, .* or set contrast_weight=0"):
        FedPGP().check(toy.task, toy.context)
    toy.algorithm.check(toy.task, toy.context)
    toy.step([0, 2])
