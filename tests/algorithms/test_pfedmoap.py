"""pFedMoAP: invariants MOAP of gate and experts, rounds by an oracle over transformers, messages, what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayfl
from algorithms.fedavg import FedAvg
from algorithms.parts.gating import first_gate, gated_products, reduced, reduced_width
from algorithms.pfedmoap import Experts, PFedMoAP, nearest
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.models.pretrained.making_clip import NAMES
from rayfl.params import Tree
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
COHORTS = ([0, 2], [1, 3], [0, 1, 2, 3], [0, 2])
PROMPTS: dict[str, dict[str, Any]] = {"shared": {"length": 2}, "by class": {"length": 3, "context": "by_class"}}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gate_of(width: int, seed: int = 0) -> Tree:
    found = {}
    for number, layer in enumerate(("query", "key", "value", "output")):
        found[f"{layer}.weight"] = numbers(width, width, seed=seed + number)
        found[f"{layer}.bias"] = numbers(width, seed=seed + number + 10)
    return found


@pytest.mark.parametrize(("heads", "sharpness"), [(1, 0.3), (2, 1.0), (6, 0.05)])
def test_inv_moap_1_the_gate_is_torchs_attention(heads: int, sharpness: float) -> None:
    """Products with the features that ``nn.MultiheadAttention`` makes, whose inner products have another factor."""
    gate, images, experts = gate_of(6), numbers(5, 6, seed=20), numbers(3, 4, 6, seed=21)
    attention = nn.MultiheadAttention(6, heads, batch_first=True, dtype=torch.float64)
    factor = sharpness * math.sqrt(6 / heads)
    parts = [(gate[f"{layer}.weight"], gate[f"{layer}.bias"]) for layer in ("query", "key", "value")]
    weights, biases = zip((factor * parts[0][0], factor * parts[0][1]), *parts[1:], strict=True)
    attention.load_state_dict({
        "in_proj_weight": torch.cat(weights), "in_proj_bias": torch.cat(biases),
        "out_proj.weight": gate["output.weight"], "out_proj.bias": gate["output.bias"],
    })  # fmt: skip
    found = gated_products(gate, images, experts, heads, sharpness)
    for number in range(4):
        texts = experts[:, number].expand(5, -1, -1)
        made = attention(images[:, None], texts, texts)[0][:, 0]
        assert_close(found[:, number], (images * made).sum(1), 1e-12)


def test_inv_moap_2_experts_have_no_order_and_equal_ones_are_one() -> None:
    gate, images, experts = gate_of(6), numbers(5, 6, seed=20), numbers(3, 4, 6, seed=21)
    found = gated_products(gate, images, experts, 2, 1.0)
    assert_close(gated_products(gate, images, experts[[2, 0, 1]], 2, 1.0), found, 1e-12)
    alone = gated_products(gate, images, experts[:1], 2, 1.0)
    assert_close(gated_products(gate, images, experts[:1].expand(7, -1, -1), 2, 1.0), alone, 1e-12)
    # whatever the query and the keys are, a single expert has all of the attention
    others = {**gate, "query.weight": numbers(6, 6, seed=40), "key.bias": numbers(6, seed=41)}
    assert_close(gated_products(others, images, experts[:1], 2, 1.0), alone, 1e-12)
    # and with a sharpness of zero all have the same
    every = [gated_products(gate, images, experts[[n]], 2, 1.0) for n in range(3)]
    assert_close(gated_products(gate, images, experts, 2, 0.0), torch.stack(every).mean(0), 1e-12)


@pytest.mark.parametrize(
    ("features", "width"), [(32, 128), (512, 128), (768, 128), (1024, 128), (7, 5), (9, 5), (5, 1)]
)
def test_the_gate_reads_features_at_even_distances(features: int, width: int) -> None:
    row = torch.arange(features)
    kept = reduced(row, width)
    assert len(kept) == reduced_width(features, width) <= width
    assert len(set(kept.diff().tolist())) <= 1 and kept[0] == 0
    # what was reduced says how to reduce others
    assert_equal({"x": reduced(row, len(kept))}, {"x": kept})


def test_inv_moap_3_the_nearest_contexts_are_those_of_all_distances() -> None:
    contexts = {str(client): numbers(2, 3, seed=client) for client in (7, 2, 11, 4, 0)}
    for count in range(6):
        found = nearest(contexts, [11, 0, 2], count)
        for client in (11, 0, 2):
            apart = sorted((float((leaf - contexts[str(client)]).square().sum()), int(name))
                           for name, leaf in contexts.items() if name != str(client))  # fmt: skip
            assert found[client] == sorted(name for _, name in apart[:count])
    equal = {str(client): torch.zeros(2, 3) for client in (3, 1, 2, 10)}
    assert nearest(equal, [2], 2) == {2: [1, 3]}
    assert nearest({"5": torch.zeros(2, 3)}, [5], 3) == {5: []}


def mixed(gate: Tree, image: Tensor, texts: Tensor, heads: int, sharpness: float) -> Tensor:
    """Features of one image and class, head by head and expert by expert; texts have the shape (E, g)."""

    def through(layer: str, row: Tensor) -> Tensor:
        return gate[f"{layer}.weight"] @ row + gate[f"{layer}.bias"]

    query, keys, values = through("query", image), *([through(n, row) for row in texts] for n in ("key", "value"))
    size, outputs = len(image) // heads, []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores = torch.stack([sharpness * (query[part] @ key[part]) for key in keys])
        weights = (scores - scores.logsumexp(0)).exp()
        outputs.append(sum(weight * value[part] for weight, value in zip(weights, values, strict=True)))
    return through("output", torch.cat(outputs))


def logits_of(
    context: Tensor, x: Tensor, gate: Tree, experts: list[Tensor], heads: int, sharpness: float, weight: float
) -> Tensor:
    """Logits over transformers' own model, one image and class after the other; of 32 features every fourth counts."""
    model, _ = wide_reference()
    images = model.get_image_features(pixel_values=x).pooler_output
    texts = [texts_with(one, list(NAMES), ".") for one in (context, *experts)]
    texts = [texts[0], *(one.detach() for one in texts[1:])]
    rows = []
    for image in images:
        image = image / image.norm()
        row = []
        for number in range(len(NAMES)):
            known = torch.stack([one[number, ::4] for one in texts])
            found = mixed(gate, image[::4], known, heads, sharpness) if experts else torch.zeros(8).double()
            alone = image @ texts[0][number]
            row.append((weight if experts else 1) * alone + image[::4] @ found)
        rows.append(torch.stack(row))
    return model.logit_scale.exp() * torch.stack(rows)


def nearest_of(contexts: dict[int, Tensor], client: int, count: int) -> list[int]:
    far = {j: math.dist(own.flatten().tolist(), contexts[client].flatten().tolist()) for j, own in contexts.items()}
    return sorted(sorted((j for j in far if j != client), key=lambda j: (far[j], j))[:count])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["looped", pytest.param("vectorized", marks=pytest.mark.slow)])
@pytest.mark.parametrize("prompt", ["shared", *(pytest.param(one, marks=pytest.mark.slow) for one in [*PROMPTS][1:])])
def test_inv_moap_4_rounds_are_those_of_an_oracle_over_transformers(prompt: str, mode: str) -> None:
    """Ragged clients, one of which has a single sample, momentum, weight decay and partial participation."""
    method = PFedMoAP(peers=2, local_weight=0.7, gate_width=8, heads=2, sharpness=3.0, gate_lr=0.05)
    toy = clip_toy(method, mode, PROMPTS[prompt], train=TRAIN.model_copy(update={"weight_decay": 0.01}))
    common = begun = toy.task.network.initialize(toy.context.streams.integer("init.global"))[CONTEXT]
    first = first_gate(8, common, toy.context.streams.generator("init.gate"))
    own, gates = dict[int, Tensor](), dict[int, Tree]()
    for round, cohort in enumerate(COHORTS):
        sent = {}
        for client in cohort:
            experts = [own[j] for j in nearest_of(own, client, 2)] if client in own else []
            context = nn.Parameter(common.clone())
            gate = {name: nn.Parameter(leaf.clone()) for name, leaf in gates.get(client, first).items()}
            groups = [{"params": [context]}, *([{"params": [*gate.values()], "lr": 0.05}] if experts else [])]
            optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.5, weight_decay=0.01)
            part, n = toy.dataset.load(client)["train"], SIZES[client]
            stream = "batches.gate" if experts else "batches"
            plan = plan_batches(n, 4, 2 * -(-n // 4), toy.context.streams.generator(stream, round, client))
            for index in plan.batches(CPU):
                optimizer.zero_grad()
                logits = logits_of(context, part.x[index], gate, experts, 2, 3.0, 0.7)
                nn.functional.cross_entropy(logits, part.y[index]).backward()
                optimizer.step()
            sent[client] = context.detach()
            if experts:
                gates[client] = {name: leaf.detach() for name, leaf in gate.items()}
        own |= sent
        common = sum(SIZES[k] * leaf for k, leaf in sent.items()) / sum(SIZES[k] for k in sent)
        toy.step(cohort)
        assert_close(toy.server["model"], {CONTEXT: common}, 1e-11)
    assert_close(toy.server["contexts"], {str(client): context for client, context in own.items()}, 1e-11)
    assert set(gates) == {0, 1, 2, 3} and (common - begun).abs().max() > 1e-3
    scores = toy.scores()
    for client, context in own.items():
        assert_close(toy.states()[client], {"context": context, "gate": gates[client]}, 1e-11)
        part = toy.dataset.load(client)["test"]
        experts = [own[j] for j in nearest_of(own, client, 2)]
        rows = {"personalized": logits_of(context, part.x, gates[client], experts, 2, 3.0, 0.7),
                "global": logits_of(common, part.x, {}, [], 2, 3.0, 0.7)}  # fmt: skip
        for row, logits in rows.items():
            assert abs(scores[client][row].loss - float(nn.functional.cross_entropy(logits, part.y))) < 1e-10


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.first_case
def test_inv_moap_5_without_experts_the_server_is_that_of_promptfl_to_the_bit(prompt: str) -> None:
    ours, theirs = (clip_toy(method, prompt=PROMPTS[prompt]) for method in (PFedMoAP(peers=0), FedAvg()))
    for cohort in COHORTS:
        assert_equal(ours.step(cohort)["model"], theirs.step(cohort)["model"])
    found, known = ours.scores(), theirs.scores()
    for client in found:
        assert found[client]["global"].vector.tolist() == known[client]["global"].vector.tolist()
        assert set(ours.states()[client]) == {"context"}


def test_inv_moap_6_a_gate_of_zeros_leaves_the_clients_own_context() -> None:
    toy = clip_toy(PFedMoAP(peers=3, local_weight=1.0))
    toy.step([0, 1])
    toy.step([0, 1])
    method, model = toy.algorithm, toy.server["model"]
    gate = {name: torch.zeros_like(leaf) for name, leaf in toy.states()[0]["gate"].items()}
    own = Predictor.of(model, gate, {"experts": numbers(3, 10, 32)}, combine=method._experts)  # type: ignore[attr-defined]
    x = toy.dataset.load(0)["test"].x
    assert_close(own.predictions(own.models, x, toy.task), Predictor.of(model).predictions([model], x, toy.task), 1e-12)


def test_contexts_travel_gates_stay_and_experts_do_not_move() -> None:
    toy = clip_toy(PFedMoAP(peers=2), model={"adapter": ADAPTER})
    toy.step([0, 2])
    assert {k: set(state) for k, state in toy.states().items() if state} == {0: {"context"}, 2: {"context"}}
    size = 8 * sum(leaf.numel() for leaf in toy.server["model"].values())
    context = 8 * toy.server["model"][CONTEXT].numel()
    assert toy.federation.traffic.by_client == dict.fromkeys((0, 2), (size, size))
    toy.step([0, 1])
    kept, server = toy.states(), toy.server
    assert set(server["model"]) == set(toy.task.network.parameter_names)
    assert set(server["contexts"]) == {"0", "1", "2"}
    # in its second round client 0 is sent that of client 2, the only other one; client 1 is there for the first time
    assert toy.federation.traffic.by_client == {0: (size + context, size), 1: (size, size)}
    assert set(kept[0]) == {"context", "gate"} and set(kept[1]) == {"context"}
    assert_equal({"x": server["contexts"]["2"]}, {"x": kept[2]["context"]})
    toy.step([1, 3])
    assert_equal(toy.states()[0], kept[0])
    assert_equal({"x": toy.server["contexts"]["2"]}, {"x": kept[2]["context"]})


def test_newcomers_have_a_context_and_leave_nothing() -> None:
    toy = clip_toy(PFedMoAP(), unseen=1)
    toy.step([0, 1])
    before = toy.states()
    rows = toy.scores(newcomers=True)[3]
    assert rows["personalized"].loss < rows["global"].loss - 1e-4
    assert_equal(toy.states(), before)


def test_no_row_with_experts_can_be_exported_and_the_error_says_why() -> None:
    toy = clip_toy(PFedMoAP())
    own = Predictor.of(toy.server["model"], gate_of(8), {"experts": numbers(1, 10, 8)}, combine=Experts(0.5, 2, 1.0))
    with pytest.raises(ConfigError, match="'personalized' predicts with 3 models together"):
        single_model(own, "personalized")


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("adapter", [pytest.param("none", marks=pytest.mark.slow), ADAPTER])
def test_stacked_is_looped(prompt: str, adapter: Any) -> None:
    one, other = (
        clip_toy(PFedMoAP(peers=2), mode, PROMPTS[prompt], {"adapter": adapter}) for mode in ("looped", "vectorized")
    )
    assert_alike(one, other, COHORTS)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_single_samples_and_single_classes_stay_finite(mode: str, optimizer: str) -> None:
    train = TrainConfig(rounds=2, clients_per_round=4, local_epochs=3, batch_size=1, lr=0.01, optimizer=optimizer)
    toy = clip_toy(PFedMoAP(), mode, dataset=clip_images((1, 1, 3, 2), classes=1), train=train)
    toy.run()
    assert toy.server["model"][CONTEXT].isfinite().all()
    assert all(leaf.isfinite().all() for state in toy.states().values() for leaf in state["gate"].values())
    assert all(rows["personalized"].loss < 20 for rows in toy.scores().values())


def test_a_kept_optimizer_goes_on_in_rounds_with_experts_and_in_those_without() -> None:
    train = TRAIN.model_copy(update={"persist_optimizer": True})
    toy = clip_toy(PFedMoAP(), train=train)
    for cohort in COHORTS:
        toy.step(cohort)
    assert all(leaf.isfinite().all() for leaf in toy.states()[0]["gate"].values())


def prepared(**options: Any) -> Toy:
    return clip_toy(PFedMoAP(**options))


def test_other_models_and_heads_that_do_not_fit_are_refused_before_any_actor_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pFedMoAP needs CLIP with a context that is trained: set model=pretrained"):
        rayfl.run("quickstart", algorithm="pfedmoap", storage_path=str(tmp_path))
    without = clip_network({"context": "none"}, adapter=ADAPTER)
    with pytest.raises(ConfigError, match=r"model\.prompt\.context=shared or by_class"):
        PFedMoAP().check(Classification(without), prepared().context)
    toy = prepared(peers=0, heads=7)
    toy.algorithm.check(toy.task, toy.context)
    with pytest.raises(ConfigError, match=r"algorithm.heads=7: the gate reads 32 features .*: choose a divisor of 32"):
        PFedMoAP(heads=7).check(toy.task, toy.context)
