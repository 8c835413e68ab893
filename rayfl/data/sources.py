"""All data sources that a configuration can name."""

from __future__ import annotations

from typing import Annotated, Union

from pydantic import BeforeValidator, Field

from rayfl.data.cifar import Cifar10Source, Cifar100Source
from rayfl.data.custom import CustomSource, data_named_by_object
from rayfl.data.digits import DigitsSource
from rayfl.data.emnist import EmnistSource
from rayfl.data.natural import LeafSource
from rayfl.data.parquet import ParquetSource
from rayfl.data.synthetic import SyntheticSource
from rayfl.data.tiny_imagenet import TinyImageNetSource
from rayfl.data.vision import MnistSource

DatasetConfig = Annotated[
    Union[  # noqa: UP007
        DigitsSource,
        MnistSource,
        EmnistSource,
        Cifar10Source,
        Cifar100Source,
        TinyImageNetSource,
        LeafSource,
        SyntheticSource,
        ParquetSource,
        CustomSource,
    ],
    Field(discriminator="name"),
    BeforeValidator(data_named_by_object),
]
