"""Which samples are whose."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rayfl.data.partitions.owners import places_by_owner


@given(st.lists(st.integers(0, 6), max_size=40))
def test_every_sample_is_its_owners_in_ascending_order(owner: list[int]) -> None:
    found = places_by_owner(np.array(owner, dtype=np.int64), 7)
    assert [places.tolist() for places in found] == [[i for i, one in enumerate(owner) if one == k] for k in range(7)]
