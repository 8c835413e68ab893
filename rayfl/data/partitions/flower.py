"""The partitioners of Flower Datasets, by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rayfl.data.partitions.base import Reads
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

_LABEL = "label"
_READS: dict[str, Reads] = {
    **dict.fromkeys(
        ("IidPartitioner", "SizePartitioner", "LinearPartitioner", "SquarePartitioner", "ExponentialPartitioner"),
        "nothing",
    ),
    "ContinuousPartitioner": "order",
}


class FlowerPartition(BaseModel):
    """A split by a partitioner of `flwr-datasets`, the same as there sample by sample.

    The samples are its data set's rows in their order, and their labels the column that ``partition_by`` names,
    whatever it is called. Its random numbers come from the option ``seed`` (42 if it is left out), not from the
    experiment's seed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["flower"] = Field(
        default="flower", description="A partitioner of Flower Datasets (needs the extra flwr-datasets)."
    )
    partitioner: Literal[
        "ContinuousPartitioner",
        "DirichletPartitioner",
        "DistributionPartitioner",
        "ExponentialPartitioner",
        "IidPartitioner",
        "InnerDirichletPartitioner",
        "LinearPartitioner",
        "PathologicalPartitioner",
        "ShardPartitioner",
        "SizePartitioner",
        "SquarePartitioner",
    ] = Field(description="Name of its class.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="The arguments of its class; partition_by may be left out."
    )

    @model_validator(mode="after")
    def _repeatable(self) -> FlowerPartition:
        if self.options.get("seed", 0) is None:
            raise ValueError("options.seed is null, so every process would draw another split; give a number")
        return self

    @property
    def reads(self) -> Reads:
        """Returns what the partitioner makes of labels."""
        return _READS.get(self.partitioner, "classes")

    def assign(self, labels: np.ndarray, streams: RandomStreams) -> list[np.ndarray]:
        """The samples of every client: sorted, disjoint, non-empty int64 arrays.

        Args:
            labels: of all samples, of shape (N,).
            streams: not used.

        Raises:
            DataError: the library is missing, does not take the options, or leaves a client without samples.
        """
        try:
            library, datasets = import_module("flwr_datasets.partitioner"), import_module("datasets")
        except ImportError as error:
            raise DataError(
                f"partition.name is flower, which needs the package flwr-datasets ({error}): pip install "
                "'rayfl[flwr-datasets]', or make the split where it is and use its partition.parquet (docs/data.md)"
            ) from None
        options = dict(self.options)
        if self.reads != "nothing":
            options.setdefault("partition_by", _LABEL)
        if "distribution_array" in options:
            options["distribution_array"] = np.array(options["distribution_array"])
        rows = datasets.Dataset.from_dict(
            {str(options.get("partition_by", _LABEL)): labels, "": np.arange(len(labels))}
        )
        try:
            partitioner = getattr(library, self.partitioner)(**options)
            partitioner.dataset = rows
            parts = [
                np.sort(np.asarray(partitioner.load_partition(client)[:][""], dtype=np.int64))
                for client in range(partitioner.num_partitions)
            ]
        except Exception as error:  # whatever the library raises
            raise DataError(
                f"partition.options: {self.partitioner} of flwr-datasets refuses {self.options}: "
                f"{type(error).__name__}: {str(error).strip()}"
            ) from error
        for client, part in enumerate(parts):
            if not len(part):
                raise DataError(
                    f"partition.options: {self.partitioner} leaves client {client} of {len(parts)} without samples; "
                    "change them"
                )
        if len(np.unique(np.concatenate(parts))) < sum(map(len, parts)):
            raise DataError(f"partition.options: {self.partitioner} gives a sample to two clients; change them")
        return parts
