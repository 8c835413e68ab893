"""Models that score items for one user: the user is the client, and its vector a part of the model."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from rayfl.examples import InputSpec
from rayfl.models.anatomy import under
from rayfl.models.architecture import NAME, Architecture
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.factorization import Factorizable

USER = "user"
"""Name of the group of a network's parameters that stand for one user."""
ITEMS = "items"
"""Name of the group of those that stand for items: a row for each item."""
_STD = "Standard deviation of the initial vectors of users and items, drawn from a normal distribution around 0."
_NEEDS = "items of which a user chose one (task=recommendation)"


class MatrixFactorization(Architecture):
    """Matrix factorization: the score of item i is p . q_i, with the vector p of the user and q_i of the item.

    The head is the user's vector, so that methods which keep the head at the client keep it there: in FedPer this is
    federated collaborative filtering (Ammad-ud-din et al., 2019), trained by gradient steps on both. With ``biases``
    the score is p . q_i + b_i + b: an affine function of the item's vector that is the user's own is the score function
    of PFedRec (Zhang et al., IJCAI 2023), which has no b_i.
    """

    name: Literal["matrix_factorization"] = Field(default="matrix_factorization", description=NAME)
    embedding: int = Field(default=16, ge=1, description="Numbers of an item's vector, and of the user's.")
    biases: bool = Field(default=False, description="Whether each item, and the user, has a bias.")
    init_std: float = Field(default=0.1, gt=0, le=100, description=_STD)

    def build(self, spec: InputSpec) -> ClassificationModel:
        if spec.target != "ranking":
            raise self.misfit(spec, _NEEDS)
        return LatentFactors(spec.vocabulary, self.embedding, self.biases, self.init_std)

    def network(self, spec: InputSpec) -> Network:
        """See the base class; the network has the groups ``user``, which is its head, and ``items``."""
        return _with_groups(super().network(spec), ("items", "item_biases"))


class LatentFactors(ClassificationModel):
    """See :class:`MatrixFactorization`; the features of an item are its vector, and its bias if there are biases.

    Args:
        items: how many there are.
        embedding: numbers of a vector.
        biases: whether there are biases.
        std: standard deviation of the initial vectors; biases begin as 0.
    """

    head_module = USER
    classifier_modules = (USER,)

    def __init__(self, items: int, embedding: int, biases: bool, std: float) -> None:
        super().__init__()
        self.items = nn.Embedding(items, embedding)
        self.item_biases = nn.Embedding(items, 1) if biases else None
        self.user = nn.Linear(embedding, 1, bias=biases)
        nn.init.normal_(self.items.weight, std=std)
        nn.init.normal_(self.user.weight, std=std)
        if self.item_biases is not None:
            nn.init.zeros_(self.item_biases.weight)
            nn.init.zeros_(self.user.bias)

    def features(self, x: Tensor) -> Tensor:
        vectors: Tensor = self.items(x)
        return vectors if self.item_biases is None else torch.cat([vectors, self.item_biases(x)], -1)

    def classify(self, features: Tensor) -> Tensor:
        if self.item_biases is None:
            scores: Tensor = self.user(features)
            return scores
        products: Tensor = self.user(features[..., :-1])
        return products + features[..., -1:]


class NeuralCF(Factorizable):
    """Neural collaborative filtering, NeuMF (He et al., WWW 2017, section 3.4): products of factors, beside an MLP.

    The head reads the products of the user's factors with the item's, and the last layer of a multilayer perceptron
    with ReLU on the user's and the item's embedding. ``hidden=[]`` is the paper's GMF, ``factors=0`` its MLP. The group
    ``user`` (``algorithm.head_group``) has the user's factors and embedding: where these stay at the client, and the
    rest is shared, the model is FedNCF (Perifanis and Efraimidis, 2022).
    """

    name: Literal["neural_cf"] = Field(default="neural_cf", description=NAME)
    factors: int = Field(default=8, ge=0, description="Factors of the user and of an item that are multiplied; 0: MLP.")
    embedding: int = Field(default=16, ge=1, description="Numbers of the user's and of an item's embedding in the MLP.")
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(16, 8), description="Units of each hidden layer of the MLP; none: there is no MLP."
    )
    init_std: float = Field(default=0.1, gt=0, le=100, description=_STD)

    @model_validator(mode="after")
    def _something_to_read(self) -> Self:
        if not self.factors and not self.hidden:
            raise ValueError("factors=0 and hidden=[] leave nothing that is scored: give one of them")
        if not self.hidden and self.embedding != type(self).model_fields["embedding"].default:
            raise ValueError("embedding is for the MLP, and with hidden=[] there is none: leave it out")
        return self

    def build(self, spec: InputSpec) -> ClassificationModel:
        if spec.target != "ranking":
            raise self.misfit(spec, _NEEDS)
        return NeuralFactors(spec.vocabulary, self.factors, self.embedding, self.hidden, self.init_std)

    def network(self, spec: InputSpec) -> Network:
        """See the base class; the network has the groups ``user`` and ``items``."""
        return _with_groups(super().network(spec), ("factors", "embedding"))


class NeuralFactors(ClassificationModel):
    """See :class:`NeuralCF`; the features of an item are what the head reads.

    Args:
        items: how many there are.
        factors: how many are multiplied.
        embedding: numbers of an embedding in the MLP.
        hidden: units of its layers.
        std: standard deviation of initial factors and embeddings.
    """

    def __init__(self, items: int, factors: int, embedding: int, hidden: tuple[int, ...], std: float) -> None:
        super().__init__()
        self.user = UserVectors(factors, embedding if hidden else 0, std)
        self.factors = nn.Embedding(items, factors) if factors else None
        self.embedding = nn.Embedding(items, embedding) if hidden else None
        for table in filter(None, (self.factors, self.embedding)):
            nn.init.normal_(table.weight, std=std)
        layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise((2 * embedding, *hidden))]
        self.hidden = nn.Sequential(*(part for layer in layers for part in layer))
        self.head = nn.Linear(factors + (hidden[-1] if hidden else 0), 1)
        self.classifier_modules = ("hidden", "head") if hidden else ("head",)

    def features(self, x: Tensor) -> Tensor:
        found = [] if self.factors is None else [self.user.factors * self.factors(x)]
        if self.embedding is not None:
            item = self.embedding(x)
            found.append(self.hidden(torch.cat([self.user.embedding.expand_as(item), item], -1)))
        return torch.cat(found, -1)

    def classify(self, features: Tensor) -> Tensor:
        scores: Tensor = self.head(features)
        return scores


class UserVectors(nn.Module):
    """The user's factors and embedding.

    Args:
        factors: numbers of the first; 0: there is none.
        embedding: numbers of the second; 0: there is none.
        std: standard deviation of their initial numbers.
    """

    factors: nn.Parameter
    embedding: nn.Parameter

    def __init__(self, factors: int, embedding: int, std: float) -> None:
        super().__init__()
        for name, size in (("factors", factors), ("embedding", embedding)):
            self.register_parameter(name, nn.Parameter(std * torch.randn(size)) if size else None)


def _with_groups(network: Network, tables: Iterable[str]) -> Network:
    """The network with its groups; the tables have a row for each item."""
    names = network.parameter_names
    network.groups = {**network.groups, USER: under(names, (USER,)), ITEMS: under(names, tables)}
    return network
