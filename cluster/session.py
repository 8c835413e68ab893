"""The connection to Ray: attach to a cluster that is there, or start a local one for this run."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from rayfl.errors import ResourceError


@contextmanager
def ray_session(address: str | None) -> Iterator[None]:
    """Connects to Ray for the duration of a run.

    A connection that exists is used and left alone; a cluster (``address``, or the environment's
    ``RAY_ADDRESS``) is attached to and never stopped; otherwise a local Ray is started, bound to the loopback
    interface and without dashboard, and stopped at the end.

    Raises:
        ResourceError: when there is no cluster at the address.
    """
    if ray.is_initialized():
        yield
        return
    target = address or os.environ.get("RAY_ADDRESS")
    if target and target != "local":
        try:
            ray.init(address=target, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ResourceError(f"no Ray cluster at {target}: {error}") from None
    else:
        ray.init(
            address="local",
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    try:
        yield
    finally:
        ray.shutdown()
