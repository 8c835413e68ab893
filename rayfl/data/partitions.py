"""All partitions that a configuration may name."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rayfl.data.assignment import FilePartition
from rayfl.data.dirichlet import DirichletEqualPartition, DirichletPartition, LabelAndSizePartition
from rayfl.data.grouped import ClassGroupsPartition, PrimaryClassesPartition
from rayfl.data.partition import ClassesPartition, IIDPartition, NaturalPartition, PathologicalPartition

Partition = Annotated[
    PathologicalPartition
    | ClassesPartition
    | IIDPartition
    | DirichletPartition
    | DirichletEqualPartition
    | LabelAndSizePartition
    | PrimaryClassesPartition
    | ClassGroupsPartition
    | NaturalPartition
    | FilePartition,
    Field(discriminator="name"),
]
