"""Computes from a client's measured costs how many actors share a GPU, and how many clients are stacked.

The rule. An actor needs memory for its base (context, libraries), for the samples that it may load, and for each
stacked client (one if they are trained one by one). A tenth of the free memory stays free.

* Of a GPU's free memory, samples take a part that its actors divide, if ``data_memory`` is ``auto``.
* One by one, a GPU is idle between the small steps of a client, and several actors fill the gaps: ``actors_per_gpu:
  auto`` is the largest k whose actors fit, but no more than there are CPUs per GPU, nor clients in a round per GPU.
* Stacked, a GPU waits for what Python does around the steps of each client, and several actors do that side by side:
  ``auto`` is up to four, each with at least 64 clients of a round that fit together.
* In both cases ``auto`` is 1 over a pretrained base, which keeps a GPU at work and which each actor would have for
  itself; 1 on GPUs in an exclusive compute mode; and as few as ``num_actors`` (or one actor per client) asks for.
* ``engine.width: auto`` (the default on GPUs) is the number of clients that fit into an actor's part of the device, but
  no more than its part of a round's clients.
* ``model.checkpointing: auto`` is true if these are too few to fill ``engine.rows_per_step`` (16,384 if that is
  ``auto``), and more fit with it. Costs are then measured once more.

If devices differ, the one with the least room decides. All functions are pure: equal measurements give equal plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from actors.hosting.building import automatic_data_memory
from actors.probing.measure import Measured
from actors.processes.placement import ActorOptions, Node, resources_of
from cluster.planning.resources import asks_for, plan_actors
from rayfl.config.schema import ExperimentConfig
from rayfl.engine.engine import UNMEASURED_WIDTH
from rayfl.errors import ResourceError

_TENTHS_USED = 9
"""Tenths of the free memory that are used; the rest is for larger clients and fragmentation."""
_STACKS_ON_A_GPU = 4
"""Measured on an H100 with 1,000 small clients: four actors made a round twice as fast, eight hardly more."""
_LEAST_STACK = 64
"""Clients of a round below which a stack is not divided among more actors."""


@dataclass(frozen=True)
class Plan:
    """Which actors a run starts.

    Attributes:
        config: configuration with the planned values in place of ``auto``.
        options: resources that Ray reserves for each actor.
        lines: the plan in words.
        warnings: warnings of memory that may not suffice.
        fitting: number of clients that an actor stacks, if it was measured; else None.
        own_part: clients of a round that an actor trains.
        saves_memory: whether it was measured with steps that save memory, because others did not fit.
    """

    config: ExperimentConfig
    options: ActorOptions
    lines: tuple[str, ...]
    warnings: tuple[str, ...]
    fitting: int | None = None
    own_part: int = 1
    saves_memory: bool = False

    def lacks_room(self, asked_for: int | None) -> bool:
        """Returns whether memory alone makes stacks smaller than asked for.

        Args:
            asked_for: number of clients that fill the rows of a step; None if ``engine.rows_per_step`` is not set.
        """
        return self.fitting is not None and asked_for is not None and self.fitting < min(asked_for, self.own_part)


def depends_on_measuring(config: ExperimentConfig, options: ActorOptions) -> bool:
    """Returns whether a measurement would be used: on GPUs, and on CPUs if ``engine.width`` is ``auto``."""
    if not config.cluster.probe:
        return False
    return options.device == "cuda" or (config.engine.stacked and config.engine.width == "auto")


def final_plan(
    config: ExperimentConfig,
    options: ActorOptions,
    nodes: Sequence[Node],
    num_clients: int,
    cohort: int,
    measured: Sequence[Measured] = (),
) -> Plan:
    """Returns the final plan.

    Args:
        config: configuration of the experiment.
        options: plan of :func:`cluster.planning.resources.plan_actors`, which does not consider memory.
        nodes: nodes of the cluster, with all their resources.
        num_clients: K, the number of clients.
        cohort: m, the number of clients in a round.
        measured: measured costs of a client, one entry a measured node; may be empty.

    Raises:
        ResourceError: when it is certain that the actors do not fit into a device's memory, with numbers.
    """
    cluster, engine = config.cluster, config.engine
    gpus = sum(math.floor(node.gpus) for node in nodes) if options.per_gpu else 0
    stacked = any(one.vectorized for one in measured)
    if gpus and measured and asks_for(cluster, num_clients) is None and cluster.actors_per_gpu == "auto":
        alone = config.model.name == "pretrained"  # each actor would have a base of its own
        k = 1 if alone else actors_on_a_gpu(measured, options.num_cpus, nodes, cohort)
        cluster = cluster.model_copy(update={"actors_per_gpu": k})
        options = plan_actors(cluster, resources_of(nodes), num_clients, nodes)
    if options.per_gpu:
        cluster = cluster.model_copy(update={"actors_per_gpu": options.per_gpu})
    nodes_with_room = [node for node in nodes if node.slots(options.num_cpus, options.per_gpu) >= 1]
    sharing = math.ceil(options.count / max(gpus if options.per_gpu else len(nodes_with_room), 1))
    own_part = math.ceil(min(cohort, num_clients) / options.count)
    if options.per_gpu and measured and cluster.data_memory == "auto":
        fitting = min(automatic_data_memory(one.device_free_bytes, sharing) for one in measured)
        cluster = cluster.model_copy(update={"data_memory": fitting})
    width_found = None
    if stacked and (engine.width == "auto" or (engine.width is None and options.device == "cuda")):
        fitting = min(clients_at_a_time(one, sharing) for one in measured)
        width_found = max(min(fitting, own_part), 1)
        engine = engine.model_copy(update={"width": width_found})
    wanted = engine.width if isinstance(engine.width, int) else UNMEASURED_WIDTH
    width = min(wanted, own_part) if stacked else 1
    warnings = []
    for one in measured:
        refuse_what_cannot_fit(one, sharing, on_gpu=bool(options.per_gpu))
        warnings += _warnings(one, sharing, width)
    return Plan(
        config.model_copy(update={"cluster": cluster, "engine": engine}),
        options,
        (
            _in_words(options, nodes, gpus, own_part),
            *(_cost_in_words(one, sharing, width) for one in measured),
        ),
        tuple(warnings),
        width_found,
        own_part,
        any(one.saves_memory for one in measured),
    )


def actors_on_a_gpu(measured: Sequence[Measured], num_cpus: float, nodes: Sequence[Node], cohort: int) -> int:
    """Returns k, the number of actors that share a GPU; at least 1.

    Args:
        measured: measured costs of a client on GPUs.
        num_cpus: CPUs of each actor.
        nodes: nodes of the cluster.
        cohort: m, the number of clients in a round.
    """
    if any(one.exclusive for one in measured):
        return 1
    with_gpus = [node for node in nodes if node.gpus >= 1]
    cpus = max((node.cpus / math.floor(node.gpus) for node in with_gpus), default=0.0)
    beside = math.floor(cpus / num_cpus + 1e-9) if num_cpus else cohort
    useful = math.ceil(cohort / max(sum(math.floor(node.gpus) for node in with_gpus), 1))
    if not any(one.vectorized for one in measured):
        return max(min(beside, useful, *(_fitting(one) for one in measured)), 1)
    k = min(beside, useful // _LEAST_STACK, _STACKS_ON_A_GPU)
    while k > 1 and any(clients_at_a_time(one, k) < _LEAST_STACK for one in measured):
        k -= 1
    return max(k, 1)


def _fitting(measured: Measured) -> int:
    """Returns how many actors that train one client at a time fit on a device."""
    alone = actor_bytes(measured, 1, sharing=1)
    fitting = _usable(measured) // alone
    if measured.divides:
        # Samples take no more than their part of the device, however many actors divide it.
        part = automatic_data_memory(measured.device_free_bytes, 1)
        without = measured.base_bytes + measured.client_bytes
        fitting = max(fitting, (_usable(measured) - part) // without)
    return fitting


def clients_at_a_time(measured: Measured, sharing: int) -> int:
    """Returns the number of stacked clients, at least 1, that fit into an actor's part of a shared device."""
    left = _usable(measured) // sharing - measured.base_bytes - measured.held_by(sharing)
    return max(left // measured.client_bytes, 1)


def actor_bytes(measured: Measured, width: int, sharing: int) -> int:
    """Returns the bytes of a shared device that an actor takes which trains ``width`` clients at a time."""
    return measured.base_bytes + measured.held_by(sharing) + width * measured.client_bytes


def refuse_what_cannot_fit(measured: Measured, sharing: int, on_gpu: bool) -> None:
    """Checks that ``sharing`` actors fit on a device.

    On a GPU each must be able to train one client, since an actor halves ``engine.width`` down to that. A machine's
    memory may be freed by others or swapped, so that only the memory that actors need before training is checked.

    Raises:
        ResourceError: with numbers.
    """
    if on_gpu:
        needed, limit, having = measured.base_bytes + measured.client_bytes, measured.device_free_bytes, "free"
    else:
        needed, limit, having = measured.base_bytes, measured.device_total_bytes, "in all"
    if sharing * needed > limit:
        on_cpus = ", or train on CPUs (cluster.device=cpu)"
        fix = f"train.batch_size or cluster.actors_per_gpu{on_cpus}" if on_gpu else "cluster.num_actors"
        together = f", {_gib(sharing * needed)} for {sharing}" if sharing > 1 else ""
        raise ResourceError(
            f"needs {_gib(needed)} per actor{together}: {measured.place} has {_gib(limit)} {having}; lower {fix}"
        )


def _warnings(measured: Measured, sharing: int, width: int) -> list[str]:
    needed, held = actor_bytes(measured, width, sharing), measured.held_by(sharing)
    if sharing * needed <= measured.device_free_bytes:
        return []
    most = clients_at_a_time(measured, sharing)
    fixes = [f"engine.width (about {most} fit)"] if width > most else []
    fixes += [f"cluster.data_memory (samples may take {_gib(held)})"] if held else []
    fixes += ["the number of actors"] if sharing > 1 else []
    return [
        f"{measured.place} has {_gib(measured.device_free_bytes)} free for {_count(sharing, 'actor')}, one may come to "
        f"need {_gib(needed)}: if memory runs out, lower {' or '.join(fixes or ['train.batch_size'])}"
    ]


def _usable(measured: Measured) -> int:
    return measured.device_free_bytes * _TENTHS_USED // 10


def _in_words(options: ActorOptions, nodes: Sequence[Node], gpus: int, own_part: int) -> str:
    where = f"{_count(len(nodes), 'node')}, {_count(gpus, 'GPU')}: " if gpus else f"{_count(len(nodes), 'node')}: "
    cpus = f" with {_count(options.num_cpus, 'CPU')} each"
    shared = f", up to {options.per_gpu} on a GPU" if options.per_gpu else cpus
    return f"plan: {where}{_count(options.count, 'actor')}{shared}, {own_part} of a round's clients each"


def _cost_in_words(measured: Measured, sharing: int, width: int) -> str:
    clients = f"{width} clients at a time" if measured.vectorized else "one client at a time"
    return (
        f"measured on {measured.place}: first step after {measured.first_step_s:.1f} s, then {measured.step_s:.2g} s "
        f"each; an actor with {clients} needs {_gib(actor_bytes(measured, width, sharing))} "
        f"({_gib(measured.client_bytes)} per client, {_gib(measured.held_by(sharing))} for samples), "
        f"{_gib(measured.device_free_bytes)} are free for {sharing}"
    )


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}" if number == 1 else f"{number:g} {what}s"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
