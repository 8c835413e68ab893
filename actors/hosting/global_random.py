"""Finds clients' code that draws random numbers which no seed of an experiment controls."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class GlobalGenerators:
    """Compares the states of the process's global random generators, which methods must not draw from."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def states(self) -> dict[str, Any]:
        """Returns the states by name of the generator."""
        numpy = np.random.get_state()
        in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = range(torch.cuda.device_count()) if in_use else ()
        return {
            "torch": torch.get_rng_state().numpy().tobytes(),
            "torch.cuda": [torch.cuda.get_rng_state(device).numpy().tobytes() for device in devices],
            "numpy.random": (numpy[1].tobytes(), *numpy[2:]),  # type: ignore[index]
            "random": random.getstate(),
        }

    def remarks(self, before: dict[str, Any]) -> list[str]:
        """Returns a warning for each generator that has been drawn from and was not named before.

        Args:
            before: the states then; none where nobody could have drawn: the states take longer to read than a small
                client's evaluation.
        """
        if not before:
            return []
        after = self.states()
        drawn = [name for name, state in before.items() if state != after[name] and name not in self._said]
        self._said.update(drawn)
        return [
            f"warning: draws from the global generator of {name}, which the seed does not control: another run, or "
            "another number of actors, has other results. Draw from client.context.streams.generator(name, round, "
            "client.id), or with `draw` of client.train"
            for name in drawn
        ]
