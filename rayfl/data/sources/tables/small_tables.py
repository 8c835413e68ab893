"""The small tables that come with scikit-learn: always there, and one for each kind of target that a table may have."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import Field

from rayfl.data.sources.base import Samples, Source
from rayfl.examples import InputSpec
from rayfl.randomness import RandomStreams


class DiabetesSource(Source):
    """Configuration of 442 patients with 10 measurements, and how far the disease went in a year (Efron et al., 2004).

    scikit-learn's columns have mean 0 and sum of squares 1; here they have standard deviation 1. The target, from 25 to
    346, is divided by 100.
    """

    name: Literal["diabetes"] = Field(default="diabetes", description="scikit-learn's table of diabetes; a number.")

    def open(self, streams: RandomStreams | None = None) -> Samples:
        """All samples: x float32 of shape (442, 10), y float32 of shape (442, 1)."""
        table = _loaded("load_diabetes")
        x = (table.data * np.sqrt(len(table.data))).astype(np.float32)
        y = (table.target / 100).astype(np.float32)[:, np.newaxis]
        return Samples(x, y, InputSpec("image", (10,), 1, target="values"))


class BreastCancerSource(Source):
    """Configuration of 569 tumours with 30 measurements each, malignant (0) or benign (1) (Wolberg et al., 1995)."""

    name: Literal["breast_cancer"] = Field(
        default="breast_cancer", description="scikit-learn's table of breast cancer; two classes."
    )

    def open(self, streams: RandomStreams | None = None) -> Samples:
        """All samples: x float32 of shape (569, 30), each column of mean 0 and standard deviation 1."""
        table = _loaded("load_breast_cancer")
        return Samples(_standardized(table.data), table.target.astype(np.int64), InputSpec("image", (30,), 2))


class WineSource(Source):
    """Configuration of 178 wines with 13 measurements each, of three growers (Aeberhard, Forina, 1991)."""

    name: Literal["wine"] = Field(default="wine", description="scikit-learn's table of wines; three classes.")

    def open(self, streams: RandomStreams | None = None) -> Samples:
        """All samples: x float32 of shape (178, 13), each column of mean 0 and standard deviation 1."""
        table = _loaded("load_wine")
        return Samples(_standardized(table.data), table.target.astype(np.int64), InputSpec("image", (13,), 3))


def _loaded(name: str) -> Any:
    # Slow to import, and only these sources need it.
    import sklearn.datasets

    return getattr(sklearn.datasets, name)()


def _standardized(x: np.ndarray) -> np.ndarray:
    """Over all samples, of which the moments are published with the table."""
    scaled: np.ndarray = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
    return scaled
