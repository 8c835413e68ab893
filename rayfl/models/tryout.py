"""What the layers of an unknown model do not tell is found by running it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from rayfl.errors import ModelError, text_of
from rayfl.examples import InputSpec
from rayfl.models.base import Network


def made_up_inputs(spec: InputSpec, seed: int, count: int = 2) -> Tensor:
    """Random inputs, shape (count, *input shape)."""
    generator = torch.Generator().manual_seed(seed)
    if spec.kind == "tokens":
        return torch.randint(spec.vocabulary, (count, *spec.shape), generator=generator)
    x = torch.rand(count, *spec.shape, generator=generator)
    if spec.kind == "graph":  # symmetric, and all nodes exist
        nodes = spec.shape[0]
        x[..., :nodes] = x[..., :nodes] + x[..., :nodes].transpose(1, 2)
        x[..., nodes] = 1
    return x


def try_out(network: Network, spec: InputSpec, model: str) -> None:
    """Runs a network on made-up inputs, and notes in it whether it draws random numbers and can be vectorised.

    Random numbers beyond those of layers are noticed by the state of PyTorch's generator. A network whose outputs
    depend on what its mini-batches are padded with, or which fails under ``vmap``, is not vectorised.

    Args:
        network: what is tried; ``stochastic`` and ``vectorizable`` are corrected.
        spec: the inputs.
        model: what to call the model in messages.

    Raises:
        ModelError: the model fails on such inputs, or returns features or logits of another shape than (b, f) and
            (b, C).
    """
    x, tree = made_up_inputs(spec, 0), network.initialize(0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            features, logits = network.features_and_logits(tree, x)
            whole = network.logits(tree, x)
            before = torch.get_rng_state()
            trained = _trained(network, tree, x)
        except Exception as error:
            raise ModelError(f"{model} cannot be applied to {spec.words()}: {type(error).__name__}: {error}") from error
        draws = not torch.equal(before, torch.get_rng_state())
        front = (2, *spec.places)
        if features.shape[:-1] != front or logits.shape[:-1] != front or logits.shape[-1] < spec.num_classes:
            shown = ", ".join(map(str, front))
            raise ModelError(
                f"{model} makes features of shape {tuple(features.shape)} and logits of shape {tuple(logits.shape)} of "
                f"2 samples; needed are ({shown}, f) and ({shown}, {spec.num_classes})"
            )
        if not torch.allclose(whole, logits, rtol=1e-4, atol=1e-5):
            raise ModelError(f"{model}: forward is not classify(features(x))")
        if draws:
            network.stochastic = True
            network.refuse_vectorization("the model draws random numbers")
        elif network.vectorizable and (why := _why_padding_matters(network, tree, x, trained, made_up_inputs(spec, 1))):
            network.refuse_vectorization(why)
    if network.vectorizable:
        _try_vmap(network, tree, x)


def try_training(network: Network, spec: InputSpec, model: str) -> None:
    """Differentiates a network in training mode once, on made-up inputs, as a local step does.

    Args:
        network: what is tried.
        spec: the inputs.
        model: what to call the model in messages.

    Raises:
        ModelError: autograd refuses the model, or the model replaces one of its buffers.
    """
    tree = network.initialize(0)
    moved = [tree[name].requires_grad_() for name in network.parameter_names]
    try:
        with torch.random.fork_rng(devices=[]):
            network.begin_step(torch.tensor(0), False)
            logits = network.logits(tree, made_up_inputs(spec, 0), training=True)
            torch.autograd.grad(logits.square().mean(), moved, materialize_grads=True)
        replaced = network.replaced(tree)
    except Exception as error:  # whatever the model's own code raises
        raise ModelError(f"{model} cannot be trained: {text_of(error)}") from error
    finally:
        network.release()
    if replaced:
        name = replaced[0].removeprefix("body.")
        raise ModelError(
            f"{model}: a pass in training mode puts another tensor in the place of {name}, which would be lost: "
            f"change it in place, as in self.{name}.copy_(...)"
        )


def _trained(network: Network, tree: dict[str, Tensor], x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Outputs in training mode, always with the same random numbers; the tree stays as it is."""
    network.begin_step(torch.tensor(0), mask is not None)
    try:
        return network.logits({name: leaf.clone() for name, leaf in tree.items()}, x, training=True, mask=mask)
    finally:
        network.release()


def _why_padding_matters(
    network: Network, tree: dict[str, Tensor], x: Tensor, expected: Tensor, paddings: Tensor
) -> str:
    """Returns what depends on how a mini-batch is padded; empty if nothing does.

    Args:
        network: what is tried.
        tree: its model.
        x: two samples.
        expected: their outputs without padding.
        paddings: two samples to pad with.
    """
    mask = torch.tensor([1.0, 1.0, 0.0])
    try:
        first, second = (_trained(network, tree, torch.cat([x, one[None]]), mask)[:2] for one in paddings)
    except ModelError as error:
        return str(error)
    if not torch.allclose(first, second, rtol=1e-4, atol=1e-5):
        return "the model's outputs depend on the other samples of the batch"
    # Statistics of two samples magnify round-off.
    rtol, atol = (0.1, 0.01) if network.batch_statistics else (1e-4, 1e-5)
    if not torch.allclose(first, expected, rtol=rtol, atol=atol):
        return "the model's outputs depend on the size of the batch"
    return ""


def _try_vmap(network: Network, tree: dict[str, Tensor], x: Tensor) -> None:
    """Two stacked models, of which one has memory.

    The device ``meta`` computes nothing, but PyTorch imports its compiler for it, which takes longer.
    """

    def loss(tree: dict[str, Tensor], x: Tensor, mask: Tensor, key: Tensor) -> Tensor:
        network.begin_step(key, True)
        return network.logits(tree, x, training=True, mask=mask).square().mean()

    moved = {name: tree[name].detach().requires_grad_() for name in network.parameter_names}
    stack = {
        name: moved[name].expand(2, *leaf.shape) if name in moved else torch.stack([leaf, leaf])
        for name, leaf in tree.items()
    }
    inputs, mask, keys = torch.stack([x, x]), torch.ones(2, len(x)), torch.zeros(2, dtype=torch.int64)
    try:
        torch.autograd.grad(vmap(loss)(stack, inputs, mask, keys).sum(), [*moved.values()], materialize_grads=True)
    except Exception as error:  # whatever the model's own code raises
        network.refuse_vectorization(f"vmap fails: {(str(error) or type(error).__name__).splitlines()[0]}")
    finally:
        network.release()
