"""How many scalars travel between server and client, and the names of what is uploaded."""

from __future__ import annotations

from collections.abc import Iterable

from rayfl.models.base import Network


def whole(network: Network) -> int:
    """Scalars of one model."""
    return network.num_parameters


def twice(network: Network) -> int:
    """Scalars of two models."""
    return 2 * network.num_parameters


def nothing(network: Network) -> int:
    """Scalars of no message."""
    return 0


def no_names(network: Network) -> Iterable[str]:
    """Names of nothing."""
    return ()


def all_names(network: Network) -> Iterable[str]:
    """Names of all parameters."""
    return network.parameter_names


def all_names_and_choice(network: Network) -> Iterable[str]:
    """Names of all parameters, and the number that says whether the exchanged model replaces the client's own."""
    return {*network.parameter_names, "replaces"}


def triangle(network: Network) -> int:
    """Scalars of a model whose head weight is replaced by three endpoints."""
    return network.num_parameters + 2 * network.initialize(0)[network.head_weight].numel()


def triangle_names(network: Network) -> Iterable[str]:
    """Names of the tensors of such a model."""
    return {*network.parameter_names, "endpoints"} - {network.head_weight}


def gaussian(network: Network) -> int:
    """Scalars of a body, and of Gaussians of the head's inputs with one covariance."""
    width = network.head_shape[1]
    return body(network) + prototypes(network) + width**2


def convolved(network: Network) -> int:
    """Scalars of a model and a convolution that fuses two sets of its features (flat, as wide as the head's inputs)."""
    width = network.initialize(0)[network.head_weight].shape[1]
    return network.num_parameters + width * (2 * width + 1)


def convolved_names(network: Network) -> Iterable[str]:
    """Names of the tensors of such a model."""
    return {*network.parameter_names, "weight", "bias"}


def gated(network: Network) -> int:
    """Scalars of a model and a gate for each of its features."""
    return network.num_parameters + network.initialize(0)[network.head_weight].shape[1]


def gated_names(network: Network) -> Iterable[str]:
    """Names of the tensors of such a model."""
    return {*network.parameter_names, "gate"}


def represented(network: Network) -> int:
    """Scalars of a model and of a layer that makes two numbers of each of the head's inputs."""
    width = network.head_shape[1]
    return network.num_parameters + 2 * width * (width + 1)


def encoded(network: Network) -> int:
    """Scalars of a body and of such a layer."""
    return represented(network) - head(network)


def represented_names(network: Network) -> Iterable[str]:
    """Names of the tensors of both."""
    return {*network.parameter_names, "matrix", "offset"}


def body(network: Network) -> int:
    """Scalars of all parameters but the head's."""
    return network.num_parameters - head(network)


def head(network: Network) -> int:
    """Scalars of the head."""
    model = network.initialize(0)
    return sum(model[name].numel() for name in network.head_names)


def prototypes(network: Network) -> int:
    """Scalars of one mean feature a class."""
    return network.initialize(0)[network.head_weight].numel()


def classes(network: Network) -> int:
    """How many classes there are."""
    return len(network.initialize(0)[network.head_weight])


def features(network: Network) -> int:
    """How many features the head reads."""
    return network.initialize(0)[network.head_weight].shape[1]


def described(network: Network) -> int:
    """Scalars of a model, and of mean features."""
    return network.num_parameters + features(network)


def described_names(network: Network) -> Iterable[str]:
    """Names of the tensors of both."""
    return {*network.parameter_names, "features"}


LAYER = frozenset({"matrix", "offset", "norm_gain", "norm_offset"})
"""Names of the tensors of a layer that a method puts next to a network, and of its normalization."""


def valved(network: Network) -> int:
    """Scalars of a body, of a valve for its features, and of an embedding of every class."""
    width = features(network)
    return body(network) + 2 * (width**2 + 3 * width) + classes(network) * width


def valved_names(network: Network) -> Iterable[str]:
    """Names of the tensors of these."""
    return {*network.body_names, *LAYER, "embedding"}


def framed(network: Network, dim: int) -> int:
    """Scalars of a body, of a projection of its features to ``dim`` dimensions, and of a temperature."""
    return body(network) + (features(network) + 1) * dim + 1


def prototyped(network: Network) -> int:
    """Scalars of a body, of a scale, and of one direction a class."""
    return body(network) + 1 + prototypes(network)


def framed_names(network: Network) -> Iterable[str]:
    """Names of the tensors of these."""
    return {*network.body_names, "matrix", "offset", "temperature"}


def policed(network: Network) -> int:
    """Scalars of a model, and of a policy for its features."""
    return network.num_parameters + 2 * features(network) ** 2 + 6 * features(network)


def policed_names(network: Network) -> Iterable[str]:
    """Names of the tensors of these."""
    return {*network.parameter_names, *LAYER}


def names_and_statistics(network: Network) -> Iterable[str]:
    """Names of all parameters, and of statistics by class."""
    return {*network.parameter_names, "sums", "counts", "mean", "variance"}


def body_names(network: Network) -> Iterable[str]:
    """Names of all parameters but the head's."""
    return network.body_names


def head_names(network: Network) -> Iterable[str]:
    """Names of the head's parameters."""
    return network.head_names


def describing(network: Network) -> int:
    """Scalars of a PeFLL embedding network, with 8 hidden units and vectors of length 2."""
    classes, features = network.head_shape
    return body(network) + 8 * (features + classes + 1) + 2 * (8 + 1)


def describing_names(network: Network) -> Iterable[str]:
    """Names of what a client of PeFLL uploads: its vector, its model, and gradients of the embedding network."""
    return {*network.parameter_names, "descriptor", "weight", "bias"}
