"""When an actor's Python looks for garbage: objects that only refer to each other."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 50_000
"""How many more objects there must be before it looks; Python's own number is 700, or 2,000 from 3.14 on."""


def settle() -> None:
    """Has Python look for garbage rarely, and never among the objects that there are now.

    A round makes some hundred objects for each client, which go when nothing refers to them any more. Looking for
    others took 4 to 9 % of what the host does around small clients. Hardly any are ever found, and no tensor among them
    (``tests/actors/processes/test_garbage.py``). Where memory runs out, all garbage is collected, as before.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
