"""One local Ray for all tests of this folder: starting it takes longer than most of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=8,  # logical: room for one actor per client on any machine
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    yield
    ray.shutdown()
