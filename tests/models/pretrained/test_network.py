"""Trees hold adapters and head alone, the base is there once and never changes, and folds equal plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from rayfl.engine.gradients.stacked_gradients import StackedGradients
from rayfl.errors import ModelError
from rayfl.models.pretrained import network as network_module
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.tasks.classification import Classification
from tests.support.bases import CONFIGS, base, inputs, network, section, trained, transformers
from tests.support.bases import IMAGES as SPEC

FAMILIES = sorted(CONFIGS)
BLOCKS = 2
SITES = {"gpt2": 1}
HEADS = {"vit": 2, "bert": 2, "roberta": 4}


def reference(family: str, net: AdaptedNetwork, tree: dict[str, Tensor]) -> Any:
    """transformers' own model with the adapters' products added to its weights, and the head put in."""
    _, name, _ = CONFIGS[family]
    classes = net.head_shape[0]
    model = getattr(transformers, name).from_pretrained(
        base(family), num_labels=classes, ignore_mismatched_sizes=True, local_files_only=True
    )
    state = dict(model.named_parameters())
    with torch.no_grad():
        for site in net.sites:
            a, b = tree[f"{site}.lora_A.weight"], tree[f"{site}.lora_B.weight"]
            product = net.scale * b @ a
            weight = state[f"{site.removeprefix('model.')}.weight"]
            weight += product.T if family == "gpt2" else product
        for key in net.groups["head"]:
            state[key.removeprefix("model.")].copy_(tree[key])
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tree_is_adapters_and_head_and_nothing_else(family: str) -> None:
    net = network(family)
    sites = BLOCKS * SITES.get(family, 2)
    assert len(net.sites) == sites
    assert len(net.groups["lora_a"]) == len(net.groups["lora_b"]) == sites
    assert len(net.groups["head"]) == HEADS.get(family, 1)
    assert net.parameter_names == (*net.groups["adapters"], *net.groups["head"])
    assert not net.buffer_names and not net.fixed_parameters
    tree = net.initialize(5)
    assert tuple(tree) == net.parameter_names
    assert all(leaf.dtype == torch.float32 and leaf.device.type == "cpu" for leaf in tree.values())
    assert net.num_parameters == sum(leaf.numel() for leaf in tree.values())
    assert len(net.layers) == sites + len({name.rpartition(".")[0] for name in net.groups["head"]})
    assert all(len(layer) == 2 for layer in net.layers[:sites])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.two_cases
def test_it_computes_what_the_merged_weights_compute(family: str, attention: str) -> None:
    net = network(family, attention=attention)
    tree, x = trained(net, 3), inputs(family, 5, 0)
    with torch.no_grad():
        model = reference(family, net, tree)
        expected = model(pixel_values=x) if family == "vit" else model(input_ids=x)
        found = net.logits(tree, x)
    torch.testing.assert_close(found, expected.logits, rtol=2e-5, atol=2e-5)


@pytest.mark.two_cases
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_folded_gradients_are_those_of_one_client_at_a_time(family: str, attention: str, checkpointing: bool) -> None:
    net = network(family, attention=attention, checkpointing=checkpointing)
    check_gradients(net, family, cross_entropy, [trained(net, k) for k in range(4)])


def cross_entropy(net: AdaptedNetwork, tree: Any, x: Tensor, y: Tensor, teacher: Any) -> Tensor:
    return F.cross_entropy(net.logits(tree, x, training=True), y)


def two_models(net: AdaptedNetwork, tree: Any, x: Tensor, y: Tensor, teacher: Any) -> Tensor:
    """Losses at two models, each with a gradient, and a teacher without one."""
    moved = {name: 2 * leaf - teacher[name] for name, leaf in tree.items()}
    features, logits = net.features_and_logits(tree, x, training=True)
    with torch.no_grad():
        told = net.logits(teacher, x).softmax(-1)
    other = net.classify(tree, features.tanh()).log_softmax(-1)
    first = F.cross_entropy(net.logits(moved, x, training=True), y)
    return first + F.cross_entropy(logits, y) - (told * other).sum(-1).mean()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["vit", "llama", "roberta"])
@pytest.mark.two_cases
def test_several_passes_with_teachers_and_heads_alone(family: str, checkpointing: bool) -> None:
    net = network(family, checkpointing=checkpointing)
    check_gradients(net, family, two_models, [trained(net, k) for k in range(3)])


def stacked_gradients(
    loss: Any, task: Classification, stack: dict[str, Tensor], x: Tensor, y: Tensor, *others: Any
) -> dict[str, Tensor]:
    """Those of a loss of one client's tree, inputs, labels and others, by name."""

    def unmasked(tree: Any, x: Tensor, y: Tensor, mask: None, *rest: Any) -> Tensor:
        return loss(tree, x, y, *rest)  # type: ignore[no-any-return]

    gradients = StackedGradients(unmasked, task, [0] * len(others))
    return dict(zip(stack, gradients(stack, list(stack), None, x, y, None, *others), strict=True))


def check_gradients(net: AdaptedNetwork, family: str, loss: Any, trees: list[dict[str, Tensor]]) -> None:
    """Stacked gradients against PyTorch's own of each client alone."""
    classes, task = net.head_shape[0], Classification(net)
    xs = torch.stack([inputs(family, 3, 10 + k) for k in range(len(trees))])
    ys = torch.randint(classes, xs.shape[:2], generator=torch.Generator().manual_seed(1))
    teachers = [trained(net, 50 + k) for k in range(len(trees))]
    stack = {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}
    teaching = {name: torch.stack([tree[name] for tree in teachers]) for name in trees[0]}

    def objective(tree: Any, x: Tensor, y: Tensor, teacher: Any) -> Tensor:
        return loss(net, tree, x, y, teacher)  # type: ignore[no-any-return]

    found = stacked_gradients(objective, task, stack, xs, ys, teaching)
    for k, tree in enumerate(trees):
        own = {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}
        value = loss(net, own, xs[k], ys[k], teachers[k])
        expected = torch.autograd.grad(value, list(own.values()))
        for name, gradient in zip(own, expected, strict=True):
            assert gradient.abs().max() > 0
            error = (found[name][k] - gradient).abs().max() / gradient.abs().max()
            assert error < 1e-5, name


def test_a_client_is_not_touched_by_its_neighbours() -> None:
    net, task = network("vit"), Classification(network("vit"))

    def objective(tree: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net.logits(tree, x), y)

    xs = torch.stack([inputs("vit", 3, k) for k in range(3)])
    ys = torch.tensor([[0, 1, 2]] * 3)
    trees = [trained(net, k) for k in range(4)]
    kept = [
        stacked_gradients(objective, task, {n: torch.stack([trees[i][n] for i in who]) for n in trees[0]}, xs, ys)
        for who in ([0, 1, 2], [0, 3, 2])
    ]
    for name in trees[0]:
        assert torch.equal(kept[0][name][0], kept[1][name][0])
        assert torch.equal(kept[0][name][2], kept[1][name][2])
        assert not torch.equal(kept[0][name][1], kept[1][name][1])


def test_a_shared_model_under_vmap_is_one_pass() -> None:
    net = network("vit")
    tree, xs = trained(net, 0), torch.stack([inputs("vit", 3, k) for k in range(2)])
    found = vmap(lambda x: net.logits(tree, x))(xs)
    for k in range(2):
        torch.testing.assert_close(found[k], net.logits(tree, xs[k]), rtol=1e-6, atol=1e-6)


def test_initial_values_are_functions_of_seed_and_name() -> None:
    one, other = network("vit"), network("vit", adapter={"r": 3, "alpha": 6, "targets": ["v_proj"]})
    state = torch.get_rng_state()
    first, again, further = one.initialize(7), network("vit").initialize(7), one.initialize(8)
    assert torch.equal(torch.get_rng_state(), state)
    for name in first:
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], further[name]) == name.endswith((".lora_B.weight", ".bias"))
    shared = other.initialize(7)
    assert all(torch.equal(shared[name], first[name]) for name in shared)
    for name in one.groups["lora_a"]:
        bound = first[name].shape[1] ** -0.5
        assert 0.8 * bound < first[name].abs().max() <= bound
    assert all(not first[name].any() for name in one.groups["lora_b"])


def test_the_untrained_factor_is_in_no_tree_and_follows_the_seed() -> None:
    net = network("vit", adapter={"r": 3, "trains": ["b"]})
    assert not net.groups["lora_a"] and len(net.groups["lora_b"]) == 4
    assert sorted(net.fixed_parameters) == sorted(name.replace("lora_B", "lora_A") for name in net.groups["lora_b"])
    tree, x = trained(net, 0), inputs("vit", 2, 0)
    before = net.logits(tree, x)
    net.settle(1)
    assert not torch.equal(net.logits(tree, x), before)
    net.settle(0)
    assert torch.equal(net.logits(tree, x), before)
    check_gradients(net, "vit", cross_entropy, [trained(net, k) for k in range(2)])


def test_networks_of_a_process_share_one_base_and_no_step_writes_to_it() -> None:
    one, other = network("vit"), network("vit", adapter={"r": 5, "targets": ["fc1"]})
    x = inputs("vit", 2, 0)
    one.logits(one.initialize(0), x)
    other.logits(other.initialize(0), x)
    (first,), (second,) = one._bases.values(), other._bases.values()
    assert first is second
    before = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    check_gradients(one, "vit", cross_entropy, [trained(one, k) for k in range(2)])
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, before[name]) and not tensor.requires_grad


def test_the_base_is_never_in_training_mode() -> None:
    net = network("bert")  # with dropout of 0.1 in its configuration
    tree, x = trained(net, 0), inputs("bert", 3, 0)
    assert not net.stochastic
    for _ in range(2):  # it was in the other mode before
        assert torch.equal(net.logits(tree, x, training=True), net.logits(tree, x))


def test_layers_are_computed_again_from_the_first_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    net, again = network("vit", checkpointing=True), []

    def counted(run: Any, *args: Any, **options: Any) -> Any:
        again.append(run)
        return run(*args)

    monkeypatch.setattr(network_module, "checkpoint", counted)
    tree, x = trained(net, 0), inputs("vit", 3, 0)
    net.logits(tree, x, training=True)
    assert len(again) == BLOCKS
    net.logits(tree, x)
    assert len(again) == BLOCKS
    net.logits(tree, x, training=True)
    assert len(again) == 2 * BLOCKS


@pytest.mark.parametrize("family", ["vit", "llama", "bert"])
def test_a_base_in_bfloat16_has_float32_adapters_gradients_and_logits(family: str) -> None:
    net, exact = network(family), network(family)
    net.compute_in(torch.bfloat16)
    tree, x = trained(net, 0), inputs(family, 4, 0)
    found, expected = net.logits(tree, x), exact.logits(tree, x)
    assert found.dtype == torch.float32
    assert 0 < (found - expected).abs().max() < 0.05 * expected.abs().max()
    assert {leaf.dtype for leaf in next(iter(net._bases.values())).parameters()} == {torch.bfloat16}

    def objective(tree: Any, x: Tensor, y: Tensor | None = None) -> Tensor:
        return net.logits(tree, x).square().mean()

    stack = {name: torch.stack([leaf, leaf * 1.1]) for name, leaf in tree.items()}
    both = x.expand(2, *x.shape)
    gradients = stacked_gradients(objective, Classification(net), stack, both, both)
    assert {leaf.dtype for leaf in gradients.values()} == {torch.float32}
    own = {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}
    for name, alone in zip(own, torch.autograd.grad(objective(own, x), list(own.values())), strict=True):
        assert (gradients[name][0] - alone).abs().max() <= 0.03 * alone.abs().max()


def test_scale_layers_targets_and_head() -> None:
    rooted = network("vit", adapter={"r": 4, "alpha": 6, "scaling": "alpha_over_sqrt_r"})
    assert rooted.scale == 3 and network("vit").scale == 2
    last = network("vit", adapter={"r": 2, "layers": [1], "targets": ["q_proj", "fc2"]})
    assert tuple(last.sites) == ("model.vit.layers.1.attention.q_proj", "model.vit.layers.1.mlp.fc2")
    given = section("vit", head={"init": "folder"})
    with pytest.raises(
        ModelError, match=r"model\.head: .* shape \(5, 32\) for classifier\.weight, needed is \(10, 32\)"
    ):
        given.network(SPEC)
    fitting = given.network(type(SPEC)("image", (1, 8, 8), 5))
    kept = transformers.ViTForImageClassification.from_pretrained(base("vit")).classifier.weight
    assert torch.equal(fitting.initialize(3)[fitting.head_weight], kept)
    fixed = section("vit", head={"init": "folder", "train": False}).network(type(SPEC)("image", (1, 8, 8), 5))
    assert (
        fixed.head_is_fixed
        and not fixed.groups["head"]
        and torch.equal(fixed.fixed_parameters[fixed.head_weight], kept)
    )
    assert fixed.logits(trained(fixed, 0), inputs("vit", 2, 0)).shape == (2, 5)
