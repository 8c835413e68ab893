"""FedTPG: invariants TPG of the generator, rounds by an oracle of modules, unseen classes, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rayfl
from algorithms.fedtpg import FedTPG
from algorithms.parts.prompt_generator import first_generator, generated
from rayfl.engine.updates.batches import plan_batches
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
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
    clip_section,
    clip_toy,
    texts_with,
    wide_network,
    wide_reference,
)
from tests.support.toys import CPU, ListDataset, Toy, assert_close, assert_equal

CONTEXT = "model.texts.context"
COHORTS = ([0, 2], [1, 3], [0, 1, 2, 3])
PROMPT = {"length": 2}


def names_of(classes: list[int]) -> Tensor:
    """Features of the names alone, by transformers' own model; shape (classes, D)."""
    model, tokenizer = wide_reference()
    rows = []
    for number in classes:
        tokens = torch.tensor([tokenizer(NAMES[number])["input_ids"]])
        rows.append(model.get_text_features(input_ids=tokens).pooler_output[0])
    found = torch.stack(rows)
    return found / found.norm(dim=1, keepdim=True)


class Reference(nn.Module):
    """The generator of PyTorch's own modules, which reads those names alone that there are."""

    def __init__(self, tree: Tree, heads: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(tree["queries"].clone())
        (_, width), features = tree["queries"].shape, tree["key.weight"].shape[1]
        made = {"embed_dim": width, "num_heads": heads, "kdim": features, "vdim": features, "dtype": torch.float64}
        self.attention = nn.MultiheadAttention(**made)
        self.attention.load_state_dict({
            **{f"{layer[0]}_proj_weight": tree[f"{layer}.weight"] for layer in ("query", "key", "value")},
            "in_proj_bias": torch.cat([tree[f"{layer}.bias"] for layer in ("query", "key", "value")]),
            **{f"out_proj.{kind}": tree[f"output.{kind}"] for kind in ("weight", "bias")},
        })  # fmt: skip
        for norm in ("norm_queries", "norm_names", "norm_made"):
            module = nn.LayerNorm(len(tree[f"{norm}.bias"]), dtype=torch.float64)
            self.add_module(norm, self._filled(module, tree, norm))
        for layer in ("wide", "narrow"):
            outputs, inputs = tree[f"{layer}.weight"].shape
            self.add_module(layer, self._filled(nn.Linear(inputs, outputs, dtype=torch.float64), tree, layer))

    @staticmethod
    def _filled(module: nn.Module, tree: Tree, name: str) -> nn.Module:
        module.load_state_dict({kind: tree[f"{name}.{kind}"] for kind in ("weight", "bias")})
        return module

    def forward(self, names: Tensor) -> Any:
        known = self.norm_names(names)
        made, _ = self.attention(self.norm_queries(self.queries), known, known)
        content, gate = self.wide(self.norm_made(made)).chunk(2, -1)
        return made + self.narrow(content * nn.functional.gelu(gate))

    def tree(self) -> Tree:
        """The leaves, by the names of the method."""
        found = {name: leaf.detach().clone() for name, leaf in self.state_dict().items()}
        biases = dict(zip(("query", "key", "value"), found["attention.in_proj_bias"].chunk(3), strict=True))
        attention = {f"output.{kind}": found[f"attention.out_proj.{kind}"] for kind in ("weight", "bias")}
        for layer, bias in biases.items():
            attention |= {f"{layer}.weight": found[f"attention.{layer[0]}_proj_weight"], f"{layer}.bias": bias}
        return {**attention, **{name: leaf for name, leaf in found.items() if "attention" not in name}}


def drawn(toy: Toy) -> Tree:
    """The generator before any training, with biases and shifts that are not zero."""
    first = toy.server["shared"]["generator"]
    generator = torch.Generator().manual_seed(5)
    return {n: leaf + 0.1 * torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) for n, leaf in first.items()}


def test_inv_tpg_1_the_generator_is_torchs_modules_and_reads_the_marked_names_alone() -> None:
    toy = clip_toy(FedTPG(heads=3, expansion=2), prompt=PROMPT)
    tree, names = drawn(toy), names_of(list(range(10)))
    reference = Reference(tree, 3)
    for classes in ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [4], [9, 2, 7]):
        own = torch.zeros(10, dtype=torch.int64)
        own[classes] = 1
        found = generated(tree, names, own, 3)
        assert found.shape == (2, 48)
        assert_close(found, reference(names[classes]).detach(), 1e-12)  # in any order
    assert_close(Reference(tree, 3).tree(), tree, 0)


def test_inv_tpg_2_renamed_classes_have_the_same_context() -> None:
    """With classes numbered otherwise, the context is the same, and outputs go along with the names."""
    order = [3, 9, 0, 1, 8, 2, 7, 4, 5, 6]
    toy = clip_toy(FedTPG(), prompt=PROMPT)
    other = clip_toy(FedTPG(), prompt={**PROMPT, "classes": [NAMES[n] for n in order]})
    x, own = toy.dataset.load(2)["test"].x, torch.tensor([1, 0, 0, 1, 0, 1, 0, 0, 0, 1])
    shared = {"generator": drawn(toy)}
    found, renamed = (
        method.algorithm.prompted(shared, method.task, marks)  # type: ignore[attr-defined]
        for method, marks in ((toy, own), (other, own[order]))
    )
    assert_close(found.models[0][CONTEXT], renamed.models[0][CONTEXT], 1e-12)
    wanted = found.predictions(found.models, x, toy.task)
    assert_close(renamed.predictions(renamed.models, x, other.task), wanted[:, order], 1e-11)


def test_names_alone_are_read_as_transformers_own_model_reads_them() -> None:
    for prompt in (PROMPT, {"length": 5, "template": "{} a photo"}, {"context": "by_class"}):
        assert_close(wide_network(prompt).name_features, names_of(list(range(10))), 1e-12)
    names = ["the_photo", "the picture of", "one"]
    model, tokenizer = wide_reference()
    tokens = [torch.tensor([tokenizer(name.replace("_", " "))["input_ids"]]) for name in names]
    rows = torch.cat([model.get_text_features(input_ids=one).pooler_output for one in tokens])
    network: Any = clip_section({"length": 2, "classes": names}).network(InputSpec("image", (1, 8, 8), len(names)))
    assert_close(network.name_features.double(), rows / rows.norm(dim=1, keepdim=True), 1e-5)
    network.compute_in(torch.float64)
    assert network.name_features.dtype == torch.float64


def lessened(reference: Reference, x: Tensor, y: Tensor, classes: list[int]) -> Tensor:
    """The loss of a mini-batch over transformers' own model, among some classes."""
    model, _ = wide_reference()
    images = model.get_image_features(pixel_values=x).pooler_output
    texts = texts_with(reference(names_of(classes)), [NAMES[number] for number in classes], ".")
    logits = model.logit_scale.exp() * images / images.norm(dim=1, keepdim=True) @ texts.T
    return nn.functional.cross_entropy(logits, torch.tensor([classes.index(int(label)) for label in y]))


@pytest.mark.parametrize("mode", ["looped", pytest.param("vectorized", marks=pytest.mark.slow)])
@pytest.mark.parametrize("names", [pytest.param("own", marks=pytest.mark.slow), "all"])
def test_inv_tpg_3_rounds_are_those_of_an_oracle_of_modules(names: Any, mode: str) -> None:
    """Ragged clients, one of which has a single sample, momentum, weight decay and partial participation."""
    train = TRAIN.model_copy(update={"weight_decay": 0.01})
    toy = clip_toy(FedTPG(names=names, heads=3, expansion=2), mode, PROMPT, train=train)
    toy.server = {"shared": {"generator": drawn(toy)}}
    common = first = toy.server["shared"]["generator"]

    def classes_of(client: int) -> list[int]:
        return list(range(10)) if names == "all" else sorted(set(toy.dataset.load(client)["train"].y.tolist()))

    for round, cohort in enumerate(COHORTS):
        sent = []
        for client in cohort:
            reference = Reference(common, 3)
            optimizer = torch.optim.SGD(reference.parameters(), lr=0.02, momentum=0.5, weight_decay=0.01)
            part, n = toy.dataset.load(client)["train"], SIZES[client]
            plan = plan_batches(n, 4, 2 * -(-n // 4), toy.context.streams.generator("batches", round, client))
            for index in plan.batches(CPU):
                optimizer.zero_grad()
                lessened(reference, part.x[index], part.y[index], classes_of(client)).backward()
                optimizer.step()
            sent.append((n, reference.tree()))
        total = sum(n for n, _ in sent)
        common = {name: sum(n * tree[name] for n, tree in sent) / total for name in first}
        toy.step(cohort)
        assert_close(toy.server["shared"]["generator"], common, 1e-11)
    assert (common["queries"] - first["queries"]).abs().max() > 1e-4
    assert not any(toy.states().values())
    for client, rows in toy.scores().items():
        part = toy.dataset.load(client)["test"]
        for row, classes in (("personalized", classes_of(client)), ("global", list(range(10)))):
            context = Reference(common, 3)(names_of(classes)).detach()
            loss = nn.functional.cross_entropy(toy.task.network.logits({CONTEXT: context}, part.x), part.y)
            assert abs(rows[row].loss - float(loss)) < 1e-10


def test_inv_tpg_4_a_newcomer_with_classes_that_nobody_trained_has_a_context_of_their_names() -> None:
    """Nothing is trained for it: the generator reads names that it has not met before."""
    images = clip_images((6, 6, 6, 4), classes=4)
    clients = [(part.x, part.y + 4 * (client == 3)) for client in range(4) for part in [images.load(client)["train"]]]
    toy = clip_toy(FedTPG(), prompt=PROMPT, dataset=ListDataset(clients, classes=10), unseen=1)
    for _ in range(2):
        toy.step([0, 1, 2])
    generator, part = toy.server["shared"]["generator"], toy.dataset.load(3)["test"]
    met = {int(label) for client in range(3) for label in toy.dataset.load(client)["train"].y}
    new = sorted(set(part.y.tolist()))
    assert not met & set(new)
    context = Reference(generator, 4)(names_of(new)).detach()
    loss = nn.functional.cross_entropy(toy.task.network.logits({CONTEXT: context}, part.x), part.y)
    rows, before = toy.scores(newcomers=True)[3], toy.states()
    assert abs(rows["personalized"].loss - float(loss)) < 1e-10
    assert abs(rows["personalized"].loss - rows["global"].loss) > 1e-6
    assert_equal(toy.states(), before)


def test_inv_tpg_5_all_names_make_one_context_for_everybody() -> None:
    toy = clip_toy(FedTPG(names="all"), prompt=PROMPT)
    toy.step([0, 2])
    for rows in toy.scores().values():
        assert rows["personalized"].vector.tolist() == rows["global"].vector.tolist()


def test_the_generator_travels_with_adapters_and_nothing_stays() -> None:
    toy = clip_toy(FedTPG(expansion=1), prompt=PROMPT, model={"adapter": ADAPTER})
    toy.step([0, 2])
    shared = toy.server["shared"]
    assert set(shared["adapters"]) == set(toy.task.network.parameter_names) - {CONTEXT}
    size = 8 * sum(leaf.numel() for tree in shared.values() for leaf in tree.values())
    assert toy.federation.traffic.by_client == dict.fromkeys((0, 2), (size, size))
    assert not any(toy.states().values())


@pytest.mark.parametrize("names", ["own", "all"])
@pytest.mark.parametrize("adapter", [pytest.param("none", marks=pytest.mark.slow), ADAPTER])
@pytest.mark.first_case
def test_stacked_is_looped(names: Any, adapter: Any) -> None:
    method = FedTPG(names=names)
    one, other = (clip_toy(method, mode, PROMPT, {"adapter": adapter}) for mode in ("looped", "vectorized"))
    assert_alike(one, other, COHORTS)


@pytest.mark.parametrize("mode", ["looped", "vectorized"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.first_case
def test_single_samples_and_single_classes_stay_finite(mode: str, optimizer: str) -> None:
    """Where a client has one class its loss is zero, and nothing moves but by decay."""
    train = TrainConfig(rounds=2, clients_per_round=4, local_epochs=3, batch_size=2, lr=0.01, optimizer=optimizer)
    toy = clip_toy(FedTPG(), mode, PROMPT, dataset=clip_images((1, 1, 3, 2), classes=1), train=train)
    before = toy.server["shared"]["generator"]
    toy.run()
    assert all(leaf.isfinite().all() for leaf in toy.server["shared"]["generator"].values())
    assert all(rows["personalized"].loss < 20 for rows in toy.scores().values())
    if optimizer == "sgd":
        assert_equal(toy.server["shared"]["generator"], before)


def test_first_values_are_those_of_torchs_layers() -> None:
    context = torch.zeros(3, 40)
    tree = first_generator(context, 24, 2, clip_toy(FedTPG(), prompt=PROMPT).context.streams.generator("x"))
    attention = nn.MultiheadAttention(40, 4, kdim=24, vdim=24)
    assert tree["key.weight"].shape == attention.k_proj_weight.shape
    for layer, ours in (("q", "query"), ("k", "key"), ("v", "value")):
        theirs = getattr(attention, f"{layer}_proj_weight").detach()
        assert abs(float(tree[f"{ours}.weight"].std() / theirs.std()) - 1) < 0.1
        assert not tree[f"{ours}.bias"].any()
    assert abs(float(tree["output.weight"].std() / attention.out_proj.weight.detach().std()) - 1) < 0.1


def test_what_does_not_fit_is_refused_before_any_actor_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"FedTPG needs CLIP with a context that is trained: set model=pretrained"):
        rayfl.run("quickstart", algorithm="fedtpg", storage_path=str(tmp_path))
    context = clip_toy(FedTPG(), prompt=PROMPT).context
    for prompt, method, message in (
        ({"length": 2, "context": "by_class"}, FedTPG(), r"one context for all classes: set model\.prompt\.context="),
        ({"start": "template"}, FedTPG(), r"set model\.prompt\.start=drawn"),
        (PROMPT, FedTPG(heads=5), r"algorithm\.heads=5: the text tower is 48 wide, .*: choose a divisor of 48"),
    ):
        with pytest.raises(ConfigError, match=message):
            method.check(Classification(clip_network(prompt)), context)
