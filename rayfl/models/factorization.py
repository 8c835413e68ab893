"""The section ``model.factorize``, and what all models have that offer it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.architecture import Architecture
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.layers.factors import SECOND, Composition, Layers, factorize

OWN_FACTORS = "own_factors"
"""Name of the group of a network's parameters that are the factors of W2 in W1 * (W2 + 1)."""


class Factorization(BaseModel):
    """Factors in the place of weights: models, and so messages and states, hold X and Y and no W.

    Source: Hyeon-Woo, Ye-Bin, Oh: FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated Learning,
    ICLR 2022.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Composition = Field(
        default="fedpara",
        description="What a weight is composed of: fedpara, W1 * W2; pfedpara, W1 * (W2 + 1); low_rank, W1 alone. W1 "
        "and W2 are products of factors, and * is by element.",
    )
    gamma: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Rank between the least with which W1 * W2 may have full rank (0) and the largest with which the "
        "factors have fewer numbers than the weight (1). low_rank: of as many numbers.",
    )
    layers: Layers | None = Field(
        default=None,
        description="Which linear layers and convolutions have factors, where these are smaller than the weight: all; "
        "hidden, all but the last layer, which some methods work on; convolutions alone. null: all for pfedpara, else "
        "hidden.",
    )

    def applied(self, model: ClassificationModel) -> int:
        """Replaces weights of a model by factors, in place, and returns of how many layers."""
        default: Layers = "all" if self.name == "pfedpara" else "hidden"
        return factorize(model, self.name, self.gamma, self.layers or default)


def _with_name(given: Any) -> Any:
    """A name alone stands for its section."""
    return {"name": given} if isinstance(given, str) else given


class Factorizable(Architecture):
    """A model whose layers can have factors in the place of their weights."""

    factorize: Annotated[Factorization | None, BeforeValidator(_with_name)] = Field(
        default=None,
        description="Low-rank factors in the place of weights (FedPara); null: weights.",
    )

    def network(self, spec: InputSpec) -> Network:
        """See the base class; composed by pfedpara, a network has the group ``own_factors``."""
        found = super().network(spec)
        if self.factorize is not None and self.factorize.name == "pfedpara":
            found.groups = {OWN_FACTORS: tuple(name for name in found.parameter_names if name.endswith(SECOND))}
        return found

    def whole(self, spec: InputSpec) -> ClassificationModel:
        """See the base class."""
        model = self.build(spec)
        if self.factorize is not None and not self.factorize.applied(model):
            raise ModelError(
                f"model {self.name}: model.factorize finds no layer whose factors are smaller than its weight: choose "
                "a larger model, model.factorize.layers=all, or model.factorize=null"
            )
        return model
