"""What the layers of an unknown model do not tell is found by running it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import grad, vmap

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.base import Network


def made_up_inputs(spec: InputSpec, seed: int) -> Tensor:
    """Two random inputs, shape (2, *input shape)."""
    generator = torch.Generator().manual_seed(seed)
    if spec.kind == "tokens":
        return torch.randint(spec.vocabulary, (2, *spec.shape), generator=generator)
    return torch.rand(2, *spec.shape, generator=generator)


def try_out(network: Network, spec: InputSpec, model: str) -> None:
    """Runs a network on made-up inputs, and notes in it whether it draws random numbers and can be vectorised.

    Random numbers are noticed by the state of PyTorch's generator. A network whose outputs depend on the other samples
    of the batch, or which fails under ``vmap``, is not vectorised.

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
            trained = network.logits(tree, x, training=True)
        except Exception as error:
            raise ModelError(f"{model} cannot be applied to {spec}: {type(error).__name__}: {error}") from error
        draws = not torch.equal(before, torch.get_rng_state())
        places = spec.shape if spec.target == "tokens" else ()
        front = (2, *places)
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
        elif network.vectorizable:
            x[1] = made_up_inputs(spec, 1)[1]
            if not torch.allclose(network.logits(tree, x, training=True)[0], trained[0], rtol=1e-4, atol=1e-5):
                network.refuse_vectorization("the model's outputs depend on the other samples of the batch")
    if network.vectorizable:
        _try_vmap(network, tree, x)


def _try_vmap(network: Network, tree: dict[str, Tensor], x: Tensor) -> None:
    """Two stacked models on the device ``meta``, which costs neither time nor memory."""

    def loss(tree: dict[str, Tensor], x: Tensor) -> Tensor:
        return network.logits(tree, x, training=True).square().mean()

    stack = {name: torch.empty(2, *tensor.shape, device="meta") for name, tensor in tree.items()}
    inputs = torch.empty(2, *x.shape, dtype=x.dtype, device="meta")
    try:
        vmap(grad(loss))(stack, inputs)
    except Exception as error:  # whatever the model's own code raises
        network.refuse_vectorization(f"vmap fails: {(str(error) or type(error).__name__).splitlines()[0]}")
