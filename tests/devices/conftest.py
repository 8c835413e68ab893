"""What all tests of devices need."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def quick_collections() -> None:
    """Leaves all that is there already out of the collection that follows whenever memory of a device runs out.

    What earlier tests have made would take a seventh of a second each time, and some tests run out of memory at every
    moment in turn. Nothing is collected before: that would take as long.
    """
    gc.freeze()
