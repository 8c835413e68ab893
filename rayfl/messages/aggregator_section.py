"""The section aggregator of a configuration: every rule that there is."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rayfl.messages.aggregators import (
    Bulyan,
    CenteredClipping,
    DivideAndConquer,
    FoolsGold,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    NormBounding,
    TrimmedMean,
)
from rayfl.messages.forecasting_rule import Flanders
from rayfl.messages.mixing_rules import Bucketing, Flame, NearestNeighborMixing

Aggregator = Annotated[
    Mean
    | Median
    | TrimmedMean
    | Krum
    | Bulyan
    | GeometricMedian
    | NormBounding
    | CenteredClipping
    | DivideAndConquer
    | FoolsGold
    | Bucketing
    | NearestNeighborMixing
    | Flame
    | Flanders,
    Field(discriminator="name"),
]
