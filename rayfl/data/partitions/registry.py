"""All partitions that a configuration may name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rayfl.data.partitions.assignment import FilePartition
from rayfl.data.partitions.base import ClassesPartition, IIDPartition, NaturalPartition, PathologicalPartition
from rayfl.data.partitions.dirichlet import DirichletEqualPartition, DirichletPartition, LabelAndSizePartition
from rayfl.data.partitions.flower import FlowerPartition
from rayfl.data.partitions.grouped import (
    ClassBlocksPartition,
    ClassGroupsPartition,
    DomainsPartition,
    PrimaryClassesPartition,
)

Partition = Annotated[
    PathologicalPartition
    | ClassesPartition
    | ClassBlocksPartition
    | IIDPartition
    | DirichletPartition
    | DirichletEqualPartition
    | LabelAndSizePartition
    | PrimaryClassesPartition
    | ClassGroupsPartition
    | DomainsPartition
    | NaturalPartition
    | FilePartition
    | FlowerPartition,
    Field(discriminator="name"),
]
