"""Reserves whole GPUs for a run: one placement group with one bundle each, which the actors share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.processes.placement import ActorOptions, free_nodes, lay_out, whole_nodes


@dataclass
class _Bundle:
    number: int
    group: PlacementGroup
    slots: int
    actors: set[int] = field(default_factory=set)


class GpuBundles:
    """The GPUs that are reserved for a run.

    Ray alone would give free shares of a GPU to any run. Here all shares of a GPU go to actors of this run. Each GPU
    has a placement group of its own, so that it can be added or removed alone.

    Args:
        options: resources of an actor.
    """

    def __init__(self, options: ActorOptions) -> None:
        self._options = options
        self._bundles: list[_Bundle] = []
        self._reserved = 0

    def reserve(self, count: int) -> None:
        """Reserves slots for ``count`` more actors, without waiting until Ray grants them."""
        missing = count - sum(bundle.slots - len(bundle.actors) for bundle in self._bundles)
        if missing <= 0:
            return
        options = self._options
        laid_out = lay_out(free_nodes(options.labels), missing, options.num_cpus, options.per_gpu)
        if sum(actors for _, actors in laid_out) < missing:
            # Others use some of the GPUs: Ray waits until they are free.
            laid_out = lay_out(whole_nodes(options.labels), missing, options.num_cpus, options.per_gpu)
        for node, actors in laid_out:
            self._add(actors, node)
            missing -= actors
        while missing > 0:
            actors = min(missing, options.per_gpu)
            self._add(actors, None)
            missing -= actors

    def _add(self, actors: int, node: str | None) -> None:
        wanted = {"GPU": 1.0, "CPU": actors * self._options.num_cpus}
        bundle = {name: amount for name, amount in wanted.items() if amount}
        labels = {"bundle_label_selector": [dict(self._options.labels)]} if self._options.labels else {}
        group = placement_group([bundle], strategy="STRICT_PACK", _soft_target_node_id=node, **labels)
        self._bundles.append(_Bundle(self._reserved, group, actors))
        self._reserved += 1

    def assign(self, actor: int) -> dict[str, Any]:
        """Assigns a reserved slot on the emptiest GPU to an actor; returns Ray's options for it."""
        vacant = [bundle for bundle in self._bundles if len(bundle.actors) < bundle.slots]
        bundle = min(vacant, key=lambda bundle: (len(bundle.actors), bundle.number))
        bundle.actors.add(actor)
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(bundle.group, placement_group_bundle_index=0)}

    def of(self, actor: int) -> int | None:
        """Returns the number of the GPU that is reserved for an actor."""
        return next((bundle.number for bundle in self._bundles if actor in bundle.actors), None)

    def release(self, actor: int) -> None:
        """Releases an actor's slot, and its GPU if no other actor uses it."""
        for bundle in self._bundles:
            bundle.actors.discard(actor)
        self.release_unused()

    def release_unused(self) -> None:
        """Releases the GPUs that no actor uses."""
        for bundle in self._bundles:
            if not bundle.actors:
                remove_placement_group(bundle.group)
        self._bundles = [bundle for bundle in self._bundles if bundle.actors]

    def close(self) -> None:
        """Releases all GPUs."""
        for bundle in self._bundles:
            remove_placement_group(bundle.group)
        self._bundles = []
