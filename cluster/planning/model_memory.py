"""Warns of models for which the memory of a machine does not suffice."""

from __future__ import annotations

from actors.hosting.memory import machine_memory

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
