from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rayfl.cosine import squared_cosine


def model(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(3, 4, generator=generator, dtype=torch.float64),
        "bias": torch.randn(3, generator=generator, dtype=torch.float64),
    }


def plainly(first: dict[str, Tensor], second: dict[str, Tensor]) -> Tensor:
    f, l = (torch.cat([t.flatten() for t in m.values()]) for m in (first, second))  # noqa: E741
    return (f @ l) ** 2 / ((f @ f) * (l @ l))


def with_gradient(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone().requires_grad_() for name, value in tree.items()}


@pytest.mark.parametrize("seed", range(5))
def test_value_and_gradient_are_those_of_the_definition(seed: int) -> None:
    f, l = with_gradient(model(seed)), with_gradient(model(seed + 100))  # noqa: E741
    ours, theirs = squared_cosine(f, l), plainly(f, l)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-13)
    leaves = [*f.values(), *l.values()]
    for a, b in zip(torch.autograd.grad(3 * ours, leaves), torch.autograd.grad(3 * theirs, leaves), strict=True):
        assert (a - b).abs().max() < 1e-14


def test_gradcheck() -> None:
    f, l = with_gradient(model(1)), with_gradient(model(2))  # noqa: E741
    names = list(f)
    torch.autograd.gradcheck(
        lambda *t: squared_cosine(dict(zip(names, t[:2], strict=True)), dict(zip(names, t[2:], strict=True))),
        (*f.values(), *l.values()),
    )


def test_parallel_models_have_cosine_one_and_no_gradient() -> None:
    f = with_gradient(model(3))
    l = with_gradient({name: -2 * value.detach() for name, value in f.items()})  # noqa: E741
    value = squared_cosine(f, l)
    assert value.item() == pytest.approx(1, abs=1e-14)
    for gradient in torch.autograd.grad(value, [*f.values(), *l.values()]):
        assert gradient.abs().max() < 1e-14


def test_a_model_of_zeros_is_finite() -> None:
    f, l = with_gradient({"w": torch.zeros(4, dtype=torch.float64)}), with_gradient({"w": torch.ones(4).double()})  # noqa: E741
    value = squared_cosine(f, l)
    assert value.item() == 0
    for gradient in torch.autograd.grad(value, [f["w"], l["w"]]):
        assert torch.isfinite(gradient).all()


def test_many_clients_at_once() -> None:
    first = {name: torch.stack([model(s)[name] for s in range(4)]) for name in model(0)}
    second = {name: torch.stack([model(s + 50)[name] for s in range(4)]) for name in model(0)}
    gradients = torch.func.vmap(torch.func.grad(squared_cosine))(first, second)
    for client in range(4):
        f = with_gradient({name: value[client] for name, value in first.items()})
        single = torch.autograd.grad(plainly(f, {n: v[client] for n, v in second.items()}), list(f.values()))
        for name, gradient in zip(f, single, strict=True):
            assert (gradients[name][client] - gradient).abs().max() < 1e-13
