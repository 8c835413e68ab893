"""Objectives of local training as sums of terms, as papers write them: what methods import."""

from rayfl.objectives.points import TRAINED, line
from rayfl.objectives.terms import (
    Sum,
    constant,
    drawn,
    envelope,
    frozen,
    function,
    inner_product,
    loss,
    squared_cosine,
    squared_distance,
)
from rayfl.renamed import names_of

__all__ = [
    "TRAINED",
    "Sum",
    "constant",
    "drawn",
    "envelope",
    "frozen",
    "function",
    "inner_product",
    "line",
    "loss",
    "squared_cosine",
    "squared_distance",
]

__getattr__ = names_of(__name__)
