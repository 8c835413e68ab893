"""Warns of models for which the memory of a machine does not suffice."""

from __future__ import annotations

from rayfl.diagnosis.machine_memory import machine_memory
from rayfl.experiment.parts import Parts
from rayfl.messages.aggregators import FoolsGold
from rayfl.selection.strategy import Strategy

_GIB = 1 << 30
_PROCESS = _GIB // 2
"""What an actor or the driver takes for itself."""
_MODELS = 6
"""Models of an actor or the driver: a trained one and its gradient or the mean, and a sum of 16 bytes a parameter."""


def memory_warning(parameters: int, actors: int, memory: int | None = None) -> str | None:
    """Returns a warning if the models of a run on one machine take more than its memory; None if they do not.

    What models compute from samples, and states of clients, come on top.

    Args:
        parameters: number of trained scalars of a model, in float32.
        actors: number of actors that compute on CPUs.
        memory: bytes of the machine; None: this one's.
    """
    model, memory = 4 * parameters, machine_memory() if memory is None else memory
    needed = (_PROCESS + _MODELS * model) * (actors + 1)
    if needed <= memory:
        return None
    return (
        f"{actors + 1} processes may need {needed / _GIB:.1f} GiB for models of {model / _GIB:.2g} GiB, gradients and "
        f"sums, and this machine has {memory / _GIB:.1f} GiB: if one dies without a word, lower cluster.num_actors, or "
        "take a smaller model or smaller inputs"
    )


def server_warning(parts: Parts, memory: int | None = None) -> str | None:
    """Returns a warning if what the server keeps of every client takes more than its machine's memory; else None.

    A commit makes one file of the server's tree in memory, so that what is kept is there twice for a while.

    Args:
        parts: method, selection and model.
        memory: bytes of the machine; None: this one's.
    """
    config, clients = parts.config, parts.num_clients
    method, selection, rule = config.algorithm, config.selection, config.aggregator
    samples = int(parts.sizes[:clients, 0].sum())
    changes = 4 * clients * getattr(parts.task.network, "num_parameters", 0)
    kept = {
        f"algorithm={method.name} keeps {method.kept_on_server}": method.kept_bytes(parts.task, parts.context, samples)
    }
    if isinstance(selection, Strategy) and selection.needs_updates:
        kept[f"selection={selection.name} keeps the last update of each client"] = changes + 8 * clients**2
    if isinstance(rule, FoolsGold):
        kept[f"aggregator={rule.name} keeps the sum of each client's changes"] = changes
    total, memory = sum(kept.values()), machine_memory() if memory is None else memory
    if 2 * total <= memory:
        return None
    keepers = " and ".join(keeper for keeper, size in kept.items() if size)
    return (
        f"{keepers} on the server: up to {total / _GIB:.1f} GiB for {clients} clients, and twice that while a commit "
        f"is written, and this machine has {memory / _GIB:.1f} GiB: have fewer clients (partition.num_clients) or a "
        "smaller model, or choose another method or selection"
    )
