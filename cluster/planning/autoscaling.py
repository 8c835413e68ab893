"""Asks Ray's autoscaler for the nodes that a run needs at least, while it waits for them."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from ray.util.placement_group import placement_group, remove_placement_group

from cluster.planning.resources import asks_for
from rayfl.config.cluster_section import ClusterConfig

Bundle = dict[str, float]


def demand(config: ClusterConfig, resources: Mapping[str, float], num_clients: int) -> list[Bundle]:
    """Returns the bundles that a run needs at least: one a GPU or, without GPUs, one an actor.

    Args:
        config: cluster section. If it leaves the number of actors free, bundles for one actor are returned.
        resources: resources of the cluster; with ``device=auto`` GPUs are asked for only if it has some.
        num_clients: K, the number of clients.
    """
    actors = asks_for(config, num_clients) or 1
    if config.clients_per_actor == 1 and config.cpus_per_actor == "auto":
        actors = 1  # they share what there is
    cpus = 1.0 if config.cpus_per_actor == "auto" else config.cpus_per_actor
    if config.device == "cpu" or (config.device == "auto" and not resources.get("GPU")):
        return [{"CPU": cpus} for _ in range(actors) if cpus]
    per_gpu = config.actors_per_gpu
    if per_gpu == "auto":
        per_gpu = actors if config.clients_per_actor == 1 else 1
    return [_bundle(min(per_gpu, actors - first) * cpus) for first in range(0, actors, per_gpu)]


def _bundle(cpus: float) -> Bundle:
    return {"GPU": 1.0, "CPU": cpus} if cpus else {"GPU": 1.0}


class AutoscalerRequest:
    """A pending placement group, which shows the autoscaler what is missing; it is never used.

    ``ray.autoscaler.sdk.request_resources`` would replace the requests of others on the cluster. The context manager
    removes the group at its end.

    Args:
        name: name of the group in Ray's dashboard.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._group: Any = None

    def __enter__(self) -> AutoscalerRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def ask(self, bundles: list[Bundle], labels: Mapping[str, str] | None = None) -> None:
        """Asks once for bundles, on nodes with labels if there are some; further calls change nothing."""
        if self._group is None and bundles:
            selected = {"bundle_label_selector": [dict(labels)] * len(bundles)} if labels else {}
            self._group = placement_group(bundles, strategy="PACK", name=self._name, **selected)
