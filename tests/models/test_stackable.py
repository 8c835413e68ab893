"""Layers with a form for stacked clients: each computes what PyTorch's own does for one client."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from rayfl.errors import ModelError
from rayfl.models.forward_pass import ForwardPass, keys_of
from rayfl.models.stackable import make_stackable

torch.set_num_threads(1)

CLIENTS = 3


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_clients(make: Any) -> tuple[nn.Module, list[nn.Module], dict[str, Tensor]]:
    """A module that can be stacked, one of PyTorch's own for each client, and their tensors, stacked."""
    module, own = make(), [make() for _ in range(CLIENTS)]
    make_stackable(module, ForwardPass())
    for k, one in enumerate((module, *own)):
        for n, tensor in enumerate([*one.parameters(), *(b for b in one.buffers() if b.is_floating_point())]):
            tensor.data = values(*tensor.shape, seed=100 * k + n).square() + 0.5
    names = [name for name, tensor in own[0].state_dict().items() if tensor.is_floating_point()]
    return module, own, {name: torch.stack([one.state_dict()[name] for one in own]) for name in names}


LSTMS = [
    {"batch_first": True},
    {"num_layers": 2},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"bias": False, "batch_first": True},
]


@pytest.mark.parametrize("options", LSTMS, ids=str)
@pytest.mark.parametrize("begun", [False, True])
def test_a_stacked_lstm_is_pytorchs(options: dict[str, Any], begun: bool) -> None:
    module, own, stack = of_clients(lambda: nn.LSTM(3, 4, **options))
    x = values(CLIENTS, 5, 6, 3, seed=7)
    rows = 5 if options.get("batch_first") else 6
    width = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    state = tuple(values(CLIENTS, width, rows, 4, seed=s) for s in (8, 9)) if begun else None

    def run(tensors: dict[str, Tensor], x: Tensor, state: Any) -> Any:
        return functional_call(module, tensors, (x, state))

    variables = {name: tensor.clone().requires_grad_() for name, tensor in stack.items()}
    outputs, ends = vmap(run, in_dims=(0, 0, None if state is None else 0))(variables, x, state)
    gradients = torch.autograd.grad(outputs.square().sum() + ends[1].sum(), list(variables.values()))
    for k, one in enumerate(own):
        expected, expected_ends = one(x[k], None if state is None else (state[0][k], state[1][k]))
        torch.testing.assert_close(outputs[k], expected, rtol=0, atol=1e-12)
        for found, end in zip(ends, expected_ends, strict=True):
            torch.testing.assert_close(found[k], end, rtol=0, atol=1e-12)
        (expected.square().sum() + expected_ends[1].sum()).backward()
        for gradient, parameter in zip(gradients, one.parameters(), strict=True):
            torch.testing.assert_close(gradient[k], parameter.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 3), (5, 4, 2, 3), (5, 4, 2, 3, 2)], ids=str)
@pytest.mark.parametrize("tracks", [True, False])
def test_stacked_batch_normalization_leaves_padding_out(shape: tuple[int, ...], tracks: bool) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    module, own, stack = of_clients(lambda: kind(4, track_running_stats=tracks))
    sizes, x = (5, 2, 3), values(CLIENTS, *shape, seed=3)
    mask = torch.stack([(torch.arange(5) < size).double() for size in sizes])

    def run(tensors: dict[str, Tensor], x: Tensor, mask: Tensor) -> Tensor:
        module.forward_pass.mask, module.forward_pass.padded = mask, True  # type: ignore[union-attr]
        return functional_call(module, tensors, (x,))

    x.requires_grad_()
    found = vmap(run)(stack, x, mask)
    (gradient,) = torch.autograd.grad((found.square() * mask.view(CLIENTS, 5, *[1] * (len(shape) - 1))).sum(), x)
    for k, one in enumerate(own):
        real = x[k, : sizes[k]].detach().requires_grad_()
        expected = one(real)
        expected.square().sum().backward()
        torch.testing.assert_close(found[k, : sizes[k]], expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(gradient[k, : sizes[k]], real.grad, rtol=0, atol=1e-8)
        assert not gradient[k, sizes[k] :].any()
        for name in ("running_mean", "running_var") if tracks else ():
            torch.testing.assert_close(stack[name][k], getattr(one, name), rtol=0, atol=1e-12)


def test_one_sample_among_padding_is_normalized_by_running_statistics() -> None:
    module, own, stack = of_clients(lambda: nn.BatchNorm1d(4))
    before, x = {name: tensor.clone() for name, tensor in stack.items()}, values(CLIENTS, 3, 4)

    def run(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        module.forward_pass.mask = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)  # type: ignore[union-attr]
        return functional_call(module, tensors, (x,))

    found = vmap(run)(stack, x)
    for k, one in enumerate(own):
        torch.testing.assert_close(found[k, 0], one.eval()(x[k, :1])[0], rtol=0, atol=1e-12)
    assert all(torch.equal(tensor, before[name]) for name, tensor in stack.items())
    alone = make_alone(nn.BatchNorm1d(4))
    torch.testing.assert_close(alone(x[0, :1].float()), nn.BatchNorm1d(4).eval()(x[0, :1].float()))


def make_alone(module: nn.Module) -> nn.Module:
    make_stackable(module, ForwardPass())
    return module


def test_rows_of_which_the_padding_is_not_known_are_refused() -> None:
    module = make_alone(nn.BatchNorm1d(4))
    state: Any = module.forward_pass
    state.padded = True
    with pytest.raises(ModelError, match="not known which"):
        module(torch.zeros(3, 4))
    state.mask = torch.ones(2)
    with pytest.raises(ModelError, match="not known which"):
        module(torch.zeros(3, 4))
    assert module.eval()(torch.zeros(3, 4)).shape == (3, 4)


@pytest.mark.parametrize(
    ("kind", "shape", "entries"),
    [
        (nn.Dropout, (64, 40), (64, 40)),
        (nn.Dropout1d, (64, 40, 3), (64, 40)),
        (nn.Dropout2d, (64, 40, 3, 2), (64, 40)),
        (nn.Dropout3d, (64, 40, 3, 2, 2), (64, 40)),
    ],
)
def test_counted_dropout_zeroes_a_share_and_keeps_the_mean(kind: Any, shape: Any, entries: Any) -> None:
    module, state = kind(0.3), ForwardPass()
    make_stackable(module, state)
    state.key = torch.tensor(5)
    found = module(torch.ones(shape))
    flat = found.flatten(2)[..., :1] if len(shape) > 2 else found[..., None]
    assert torch.equal(found, flat.view(*entries, *[1] * (len(shape) - 2)).expand(shape))
    kept = found > 0
    assert abs(kept.double().mean() - 0.7) < 0.03
    torch.testing.assert_close(found[kept], torch.full_like(found[kept], 1 / 0.7), rtol=1e-4, atol=0)
    again, state.calls = module(torch.ones(shape)), 0
    assert not torch.equal(again, found) and torch.equal(module(torch.ones(shape)), found)
    x = torch.ones(shape)
    state.calls, module.inplace = 0, True
    assert module(x) is x and torch.equal(x, found)
    module.p = 1.0
    assert not module(torch.ones(shape)).any()


def test_masks_are_those_of_splitmix_wherever_they_are_drawn() -> None:
    """The first numbers of SplitMix64 seeded with 1234567, and masks of a client in a stack with padding."""
    assert [int(k) % 2**64 for k in keys_of([1234567], [0], 3)[:, 0]] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    assert keys_of([7, 8], [2, 0], 3)[0, 0] == keys_of([7], [0], 3)[2, 0]
    state, keys = ForwardPass(), torch.from_numpy(keys_of([1, 2], [0, 0], 1))[0]

    def drawn(key: Tensor) -> Tensor:
        state.key, state.calls = key, 3
        return state.kept((5, 7), 0.5, torch.zeros(()))

    stacked = vmap(drawn)(keys)
    for k in range(2):
        state.key, state.calls = keys[k], 3
        assert torch.equal(state.kept((3, 7), 0.5, torch.zeros(())), stacked[k, :3])
    # Bits are independent enough: of neighbours, steps and calls.
    many = torch.stack([drawn(key) for key in torch.from_numpy(keys_of(range(400), [0] * 400, 1))[0]]).flatten(1) - 1
    correlations = (many.T @ many / 400).fill_diagonal_(0)
    assert correlations.abs().max() < 0.3


def test_without_a_key_pytorchs_generator_decides() -> None:
    module = make_alone(nn.Dropout(0.5))
    found = []
    for seed in (0, 0, 1):
        module.forward_pass.calls = 0  # type: ignore[union-attr]
        torch.manual_seed(seed)
        found.append(module(torch.ones(50)))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
