"""One local Ray for all tests of this folder: starting it takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from cluster.session import start_local


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    start_local(num_cpus=8)  # logical: room for one actor per client on any machine
    yield
    ray.shutdown()
