"""Adapters with magnitudes (DoRA): layers and networks against formulas in float64 that make W + s B A."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rayfl.errors import ModelError
from rayfl.models.pretrained.magnitudes import MAGNITUDE, adapted_norms, rescaled, row_norms
from rayfl.models.pretrained.mixing import SHARES, blended, delta_name, mixed_by_rows, side_by_side, update_product
from rayfl.models.pretrained.network import AdaptedNetwork
from rayfl.models.pretrained.sites import Site, matrix_of
from tests.models.pretrained.test_network import check_gradients, cross_entropy, two_models
from tests.support.bases import (
    CONFIGS,
    IMAGES,
    base,
    inputs,
    language_network,
    network,
    section,
    texts,
    trained,
    transformers,
)

DORA = {"r": 3, "alpha": 6, "use_dora": True}
CLIENTS, ROWS, RANK, INPUTS, OUTPUTS = 3, 4, 2, 7, 5


def layer_of(kind: str) -> nn.Module:
    """A frozen layer with random weights, and a bias if it has one."""
    generator = torch.Generator().manual_seed(1)
    made: Any = nn.Linear(INPUTS, OUTPUTS, bias=kind != "no bias")
    if kind == "Conv1D":
        made = transformers.pytorch_utils.Conv1D(OUTPUTS, INPUTS)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    found: nn.Module = made.requires_grad_(False)
    return found


def dense(layer: Any, x: Tensor, a: Tensor, b: Tensor, m: Tensor, scale: float, constant: bool = True) -> Tensor:
    """m * (W + s B A) x / ||W + s B A|| + c of one client, with the matrix in memory."""
    whole = matrix_of(layer).double() + scale * b @ a
    norms = whole.square().sum(1).sqrt()
    found = x @ ((m / (norms.detach() if constant else norms))[:, None] * whole).T
    return found if layer.bias is None else found + layer.bias.double()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["bias", "no bias", "Conv1D"])
def test_outputs_and_gradients_are_those_of_the_formula(kind: str, shared: bool) -> None:
    """Of clients side by side, who have an A each or one together; the norm is a constant."""
    generator, layer, scale = torch.Generator().manual_seed(0), layer_of(kind), 1.5
    site = Site(layer, RANK, scale, ("a", "b"), decomposed=True)
    shapes = [(CLIENTS * ROWS, INPUTS), (CLIENTS, RANK, INPUTS), (CLIENTS, OUTPUTS, RANK), (CLIENTS, OUTPUTS)]
    if shared:
        shapes[1] = (1, RANK, INPUTS)
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    given = [one.float().requires_grad_() for one in exact]
    x, a, b, m = given
    site.lora_A._parameters["weight"] = a if not shared else a[0]  # type: ignore[assignment]
    site.lora_B._parameters["weight"] = b  # type: ignore[assignment]
    site._parameters["lora_magnitude_vector"] = m  # type: ignore[assignment]
    site.norms = row_norms(matrix_of(layer))
    weights = torch.randn(CLIENTS * ROWS, OUTPUTS, generator=generator, dtype=torch.float64)
    found = site(x)
    gradients = torch.autograd.grad((found * weights.float()).sum(), given)

    def expected(constant: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        own = [one.clone().requires_grad_() for one in exact]
        parts = [
            dense(layer, own[0].view(CLIENTS, ROWS, -1)[k], own[1][0 if shared else k], own[2][k], own[3][k], scale,
                  constant)
            for k in range(CLIENTS)
        ]  # fmt: skip
        outputs = torch.cat(parts)
        return outputs.detach(), torch.autograd.grad((outputs * weights).sum(), own)

    outputs, wanted = expected(constant=True)
    torch.testing.assert_close(found.double(), outputs, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5)
    # What the norm would add is no matter of rounding.
    _, through = expected(constant=False)
    assert all((one - other).abs().max() > 0.1 for one, other in zip(wanted[1:3], through[1:3], strict=True))


def test_norms_need_no_matrix_of_a_client() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix, a, b = (torch.randn(shape, generator=generator) for shape in ((9, 6), (4, 2, 6), (4, 9, 2)))
    found = adapted_norms(matrix, row_norms(matrix), a, b, 0.7)
    exact = torch.linalg.vector_norm(matrix.double() + 0.7 * (b.double() @ a.double()), dim=-1)
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    # A row of zeros has no direction: it stays what it is, and nothing is divided by zero.
    nothing = adapted_norms(torch.zeros(9, 6), torch.zeros(9), a, torch.zeros_like(b), 0.7)
    assert (nothing > 0).all() and (torch.zeros(9) / nothing == 0).all()


def merged(family: str, net: AdaptedNetwork, tree: dict[str, Tensor]) -> Any:
    """transformers' own model with m (W + s B A) / ||W + s B A|| for weights, and the head put in."""
    _, name, _ = CONFIGS[family]
    model = getattr(transformers, name).from_pretrained(
        base(family), num_labels=net.head_shape[0], ignore_mismatched_sizes=True, local_files_only=True
    )
    state = dict(model.named_parameters())
    with torch.no_grad():
        for site in net.sites:
            a, b, m = (tree[site + end].double() for end in (".lora_A.weight", ".lora_B.weight", MAGNITUDE))
            weight = state[f"{site.removeprefix('model.')}.weight"]
            turned = weight.T if family == "gpt2" else weight
            whole = turned.double() + net.scale * b @ a
            turned.copy_(whole * (m / whole.norm(dim=1))[:, None])
        for key in net.groups["head"]:
            state[key.removeprefix("model.")].copy_(tree[key])
    return model.eval()


@pytest.mark.two_cases
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_it_begins_as_the_base_and_computes_what_merged_weights_compute(family: str) -> None:
    net, plain, x = network(family, adapter=DORA), network(family), inputs(family, 5, 0)
    start = net.initialize(4)
    with torch.no_grad():
        torch.testing.assert_close(net.logits(start, x), plain.logits(plain.initialize(4), x), rtol=1e-6, atol=1e-6)
        tree = trained(net, 3)
        model = merged(family, net, tree)
        expected = model(pixel_values=x) if family == "vit" else model(input_ids=x)
        torch.testing.assert_close(net.logits(tree, x), expected.logits, rtol=2e-5, atol=2e-5)


@pytest.mark.two_cases
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["vit", "llama", "gpt2", "roberta"])
def test_folded_gradients_are_those_of_one_client_at_a_time(family: str, checkpointing: bool) -> None:
    net = network(family, adapter=DORA, checkpointing=checkpointing)
    check_gradients(net, family, cross_entropy, [trained(net, k) for k in range(4)])


def test_several_passes_and_a_factor_that_all_clients_have() -> None:
    net = network("vit", adapter={**DORA, "trains": ["b"]})
    assert not net.groups["lora_a"]
    check_gradients(net, "vit", two_models, [trained(net, k) for k in range(3)])


def test_magnitudes_are_a_part_of_the_adapters_and_go_with_b() -> None:
    net = network("vit", adapter=DORA)
    names = net.groups["magnitudes"]
    assert len(names) == len(net.sites) == 4 and all(net.initialize(0)[name].shape == (32,) for name in names)
    assert set(net.groups["lora_b"]) == {*names, *(f"{site}.lora_B.weight" for site in net.sites)}
    assert set(net.groups["adapters"]) == {*net.groups["lora_a"], *net.groups["lora_b"]}
    assert net.parameter_names == (*net.groups["adapters"], *net.groups["head"])
    assert all(len(layer) == 3 for layer in net.layers[:4])
    assert not network("vit").groups["magnitudes"]
    assert net.num_parameters == network("vit").num_parameters + 4 * 32


def test_a_language_model_has_them_too() -> None:
    net, plain = language_network("qwen2", adapter=DORA), language_network("qwen2")
    x, y = texts(4, 0)
    with torch.no_grad():
        found, expected = (one.token_losses(one.initialize(0), x, y) for one in (net, plain))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_initial_magnitudes_are_those_of_the_files_whatever_is_computed_in(tmp_path: Path) -> None:
    kind = transformers.ViTForImageClassification
    kind.from_pretrained(base("vit"), local_files_only=True, dtype=torch.bfloat16).save_pretrained(tmp_path)
    net = section("vit", adapter=DORA, folder=str(tmp_path)).network(IMAGES)
    assert net.source.own_type == torch.bfloat16 and network("vit").source.own_type == torch.float32
    state = kind.from_pretrained(tmp_path, local_files_only=True, dtype=torch.float32).state_dict()
    one, other = net.initialize(0), net.initialize(1)
    net.compute_in(torch.bfloat16)
    for name in net.groups["magnitudes"]:
        place = name.removeprefix("model.").removesuffix(MAGNITUDE)
        torch.testing.assert_close(one[name], state[f"{place}.weight"].norm(dim=1), rtol=1e-6, atol=1e-7)
        assert torch.equal(one[name], other[name]) and torch.equal(one[name], net.initialize(0)[name])


def test_a_base_in_bfloat16_has_no_more_error_than_its_own() -> None:
    net, exact = network("vit", adapter=DORA), network("vit", adapter=DORA)
    net.compute_in(torch.bfloat16)
    tree, x = trained(net, 0), inputs("vit", 64, 0)
    found, expected = net.logits(tree, x), exact.logits(tree, x)
    assert found.dtype == torch.float32
    assert 0 < (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_outputs_in_bfloat16_are_rounded_once() -> None:
    """A factor of 1 + 2^-8 lies in the middle between two numbers of that type."""
    outputs = torch.randn(1, 4096, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    norms, factor = torch.ones(1, 16), 1 + 2**-8
    found = rescaled(outputs, None, factor * norms, norms)
    expected = factor * outputs.double()
    last_digit = 2.0 ** (expected.abs().log2().floor() - 7)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - expected).abs() <= 0.51 * last_digit).all()
    assert torch.equal(rescaled(outputs, outputs[0, 0], norms, norms), outputs)


def test_models_with_magnitudes_are_not_laid_side_by_side() -> None:
    net = network("vit", adapter=DORA)
    one, other, x = trained(net, 0), trained(net, 1), inputs("vit", 2, 0)
    shares, message = torch.tensor([[0.5, 0.5]]), r"set model\.adapter\.use_dora=false"
    for call in (
        lambda: side_by_side([one, other], shares),
        lambda: mixed_by_rows(one, other, {}),
        lambda: blended([one, other], dict.fromkeys(one, (0.5, 0.5))),
        lambda: update_product(one, other, net.scale),
        lambda: net.logits({**one, SHARES: shares}, x),
        lambda: net.logits({**one, delta_name(next(iter(net.sites))): torch.zeros(32, 32)}, x),
    ):
        with pytest.raises(ModelError, match=message):
            call()  # type: ignore[no-untyped-call]
