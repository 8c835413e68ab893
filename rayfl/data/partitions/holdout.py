"""Each client's division of its own samples into train, validation and test."""

from __future__ import annotations

import math

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from rayfl.errors import DataError

_DEFAULT_TEST = 0.2
# 0.29 * 100 is 28.999999999999996 in binary floating point, and 29 samples are meant.
_ROUNDING = 1e-9


class HoldoutConfig(BaseModel):
    """How much of a client's samples is held out from training."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    test: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Fraction of a client's samples kept for its test part; null: 0.2, or the test part that the "
        "source itself has.",
    )
    validation: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Fraction of what is left after the test part that is kept for the client's validation part.",
    )
    public: int = Field(
        default=0,
        ge=0,
        description="Samples that belong to no client, drawn from all train parts; clients see no labels of theirs.",
    )


def split_client(indices: np.ndarray, config: HoldoutConfig, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Divide one client's samples at random.

    Of n shuffled samples the first floor(test * n) are the test part, the next floor(validation * rest) the
    validation part and all others the train part; validation and test may be empty.

    Args:
        indices: the client's samples, integers of shape (n,).
        config: the fractions.
        generator: the source of randomness, used for one permutation.

    Returns:
        Sorted, disjoint indices by split (``train``, ``validation``, ``test``), whose union is ``indices``.

    Raises:
        DataError: nothing is left to train on; names the client's number of samples.
    """
    shuffled = generator.permutation(indices)
    test_fraction = _DEFAULT_TEST if config.test is None else config.test
    num_test = _share(test_fraction, len(shuffled))
    num_validation = _share(config.validation, len(shuffled) - num_test)
    test, validation, train = np.split(shuffled, [num_test, num_test + num_validation])
    if not len(train):
        raise DataError(
            f"a client with {len(shuffled)} samples has none left to train on with holdout.test = {test_fraction} and "
            f"holdout.validation = {config.validation}; lower them or use fewer clients"
        )
    return {"train": np.sort(train), "validation": np.sort(validation), "test": np.sort(test)}


def _share(fraction: float, size: int) -> int:
    return math.floor(fraction * size + _ROUNDING)
