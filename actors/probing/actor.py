"""Probes in processes of their own: one on each node that has a device for it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.hosting.building import build_host, data_memory_of, pin_threads
from actors.probing.measure import Measured, ProbeFailedError, measure
from actors.probing.memory import memory_of
from actors.probing.probe_calls import ProbeCall
from actors.processes.gpu_sharing import takes_one_process
from actors.processes.gpus import Gpu, own_gpu
from actors.processes.placement import ActorOptions, Node, free_nodes, most_together
from actors.processes.working_folder import work_in, working_folder
from algorithms.registry import Experiment
from rayfl.errors import ResourceError

_log = logging.getLogger("rayfl")
_RETURN_TIMEOUT_S = 5.0
_ASK_EVERY_S = 0.1


class ProbeActor:
    """A host that is made to be measured.

    Args:
        config: the configuration as plain data.
        device: ``cpu`` or ``cuda``.
        own_gpu: finds the GPU that this process sees; not called on the CPU.
        folder: working folder of the driver.
    """

    def __init__(self, config: dict[str, Any], device: str, own_gpu: Callable[[], Gpu], folder: str) -> None:
        work_in(folder)
        self._config = Experiment.model_validate(config)
        gpu = own_gpu() if device == "cuda" else None
        self._device = gpu.device if gpu else device
        self._exclusive = gpu is not None and takes_one_process(gpu.uuid)
        self._numbers = ray.get_gpu_ids() if gpu else []

    def measure(self, calls: Sequence[ProbeCall], samples_bytes: int, neighbours: int) -> Measured:
        """See :func:`actors.probing.measure.measure`.

        Args:
            calls: what may be run.
            samples_bytes: of all clients together.
            neighbours: how many actors share the machine's memory.
        """
        # Here, not in the constructor: the number of OpenMP threads belongs to the calling thread.
        pin_threads(self._config.cluster.threads_per_actor)
        # States that stay on the device have memory of their own; here they would hide what a stack brings along.
        cluster = self._config.cluster.model_copy(update={"device_state_memory": 0})
        host = build_host(self._config.model_copy(update={"cluster": cluster}), 0, self._device, neighbours)
        node = f"node {socket.gethostname()}"
        place = f"GPU {self._numbers[0]} of {node}" if self._numbers else node
        cluster, device = self._config.cluster, host.engine.device
        divides = cluster.data_memory == "auto" and device.type == "cuda"
        if not divides:
            samples_bytes = min(samples_bytes, data_memory_of(cluster, device, neighbours))
        memory = memory_of(device)
        found = measure(host, self._config.engine, calls, memory, place, samples_bytes, divides)
        return replace(found, exclusive=self._exclusive)


_RemoteProbe: Any = ray.remote(ProbeActor)


def _seat(node: Node | None, options: ActorOptions) -> dict[str, Any]:
    """Returns Ray's options for the place of a probe: a node, or any that the run may use."""
    if node is not None:
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=True)}
    return {"label_selector": dict(options.labels)} if options.labels else {}


def probe(
    config: dict[str, Any], options: ActorOptions, calls: Sequence[ProbeCall], samples_bytes: int
) -> list[Measured]:
    """Measures on one GPU of each node that has one free, or on one CPU of the cluster.

    Args:
        config: the configuration as plain data.
        options: what an actor of the run would get; a probe has a GPU for itself.
        calls: what may be run.
        samples_bytes: of all clients together.

    Returns:
        By place; none where nothing could be measured: the log says why.

    Raises:
        ResourceError: when a device has too little memory for a single client.
    """
    nodes = [node for node in free_nodes(options.labels) if _fits(node, options)]
    places: list[Node | None] = [*nodes] if options.per_gpu and nodes else [None]
    neighbours = most_together(nodes, options.num_cpus, options.per_gpu, options.count)
    given = ray.put(list(calls))
    actors: list[Any] = []
    try:
        actors += [
            _RemoteProbe.options(
                num_cpus=options.num_cpus,
                num_gpus=1.0 if options.per_gpu else 0.0,
                **_seat(node, options),
            ).remote(config, options.device, own_gpu, working_folder())
            for node in places
        ]
        handles = [actor.measure.remote(given, samples_bytes, neighbours) for actor in actors]
        found: list[Measured] = ray.get(handles, timeout=options.timeout_s)
        return sorted(found, key=lambda one: one.place)
    except GetTimeoutError:
        reason = f"not within cluster.startup_timeout_s={options.timeout_s:g} s"
    except RayTaskError as error:
        if isinstance(error.cause, ResourceError):
            raise error.cause from None
        reason = str(error.cause) if isinstance(error.cause, ProbeFailedError) else _last_line(error)
    except RayError as error:
        # What ends the probe's process may end the run's too, which then says so.
        reason = _last_line(error)
    finally:
        for actor in actors:
            ray.kill(actor)
        _await_return([node for node in places if node is not None])
    _log.warning("the cost of a client could not be measured: %s", reason)
    return []


def _await_return(before: Sequence[Node]) -> None:
    """Waits for the probes' GPUs: the run's actors are laid out over what is free."""
    ends = time.monotonic() + _RETURN_TIMEOUT_S
    while time.monotonic() < ends:
        free = {node.id: node.gpus for node in free_nodes({})}
        if all(free.get(node.id, node.gpus) >= node.gpus for node in before):
            return
        time.sleep(_ASK_EVERY_S)


def _fits(node: Node, options: ActorOptions) -> bool:
    return node.slots(options.num_cpus, options.per_gpu) >= 1


def _last_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
