"""Checks that an actor computes on the GPU that is meant for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayfl.errors import ResourceError

_FIX = (
    "do nodes set RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, or share a machine's GPUs between two Rays? Let each "
    "Ray have GPUs of its own (CUDA_VISIBLE_DEVICES before `ray start`)"
)


@dataclass(frozen=True)
class Gpu:
    """The GPU that an actor computes on.

    Attributes:
        uuid: UUID of the device (of a part of it, with MIG), the same in all processes.
        device: torch's name of the device in this process.
    """

    uuid: str
    device: str


def own_gpu() -> Gpu:
    """Returns the GPU that this process sees.

    Raises:
        ResourceError: when it sees none, or several.
    """
    seen = torch.cuda.device_count()
    if seen != 1:
        raise ResourceError(f"the actor sees {seen} GPUs where Ray should show it one; {_FIX}")
    return Gpu(str(torch.cuda.get_device_properties(0).uuid), "cuda")


@dataclass(frozen=True)
class ActorGpu:
    """The GPU that was reserved for an actor, and the one that it computes on.

    Attributes:
        name: name of the actor.
        bundle: number of the GPU that was reserved for it; None inside a given placement group.
        uuid: UUID of the GPU that it sees.
    """

    name: str
    bundle: int | None
    uuid: str


def check_gpus(actors: Sequence[ActorGpu], per_gpu: int) -> None:
    """Checks that actors are on the GPUs reserved for them: one device for each bundle, and at most k actors on one.

    Args:
        actors: all actors of a run.
        per_gpu: k, the number of actors that may share a GPU.

    Raises:
        ResourceError: naming actors and devices.
    """
    by_uuid: dict[str, list[ActorGpu]] = {}
    device_of: dict[int, ActorGpu] = {}
    for actor in actors:
        by_uuid.setdefault(actor.uuid, []).append(actor)
        if actor.bundle is None:
            continue
        first = device_of.setdefault(actor.bundle, actor)
        if first.uuid != actor.uuid:
            raise ResourceError(
                f"GPU {actor.bundle} of the run is {first.uuid} for {first.name}, but {actor.uuid} for {actor.name}: "
                f"its actors are spread over two devices; {_FIX}"
            )
    for uuid, sharing in by_uuid.items():
        names = ", ".join(actor.name for actor in sharing)
        if len(sharing) > per_gpu:
            raise ResourceError(
                f"{len(sharing)} actors share {uuid} ({names}), where cluster.actors_per_gpu allows {per_gpu}; {_FIX}"
            )
        bundles = sorted({actor.bundle for actor in sharing if actor.bundle is not None})
        if len(bundles) > 1:
            numbers = " and ".join(str(bundle) for bundle in bundles)
            raise ResourceError(f"GPUs {numbers} of the run are one device, {uuid} ({names}); {_FIX}")
