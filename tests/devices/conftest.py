"""What all tests of devices need."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quick_collections() -> Iterator[None]:
    """Leaves all that is there already out of the rubbish that is looked for whenever memory of a device runs out.

    The thousands of tests themselves, and what others have imported, would make each of many searches slow.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
