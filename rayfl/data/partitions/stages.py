"""The section ``stages`` of a configuration: data that change from round to round.

Each kind is also the rule by which a client's samples belong to stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from rayfl.data.partitions.arriving import ClassStages, DomainStages, SampleStages
from rayfl.data.partitions.drifting import LabelStages, RotationStages
from rayfl.data.partitions.joining import ClientStages
from rayfl.data.partitions.stage import NoStages, Staged

Stages = Annotated[
    NoStages | ClassStages | DomainStages | SampleStages | ClientStages | RotationStages | LabelStages,
    Field(discriminator="name"),
]


def recorded_stages(content: Mapping[str, Any]) -> Staged | NoStages:
    """Returns the section of a run, given the content of its ``config.yaml``; runs from before had none."""
    found: Staged | NoStages = TypeAdapter(Stages).validate_python(content.get("stages", {"name": "none"}))
    return found
