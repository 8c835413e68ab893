"""Looks at made-up samples for which the memory of a machine does not suffice."""

from __future__ import annotations

from rayfl.data.sources.made_up.making import MadeUpSource
from rayfl.experiment.parts import Parts


def check_samples(parts: Parts, hosts: int) -> None:
    """Refuses made-up samples that do not fit into this machine's memory.

    Args:
        parts: has the data set; the driver has made its samples.
        hosts: how many hosts of clients on this machine make them as well.

    Raises:
        ResourceError: with numbers and the fix.
    """
    if isinstance(parts.config.dataset, MadeUpSource):
        parts.config.dataset.check_room(hosts + 1)


def sample_warning(parts: Parts, hosts: int) -> str | None:
    """Returns a warning if made-up samples may not fit while hosts make them. See :func:`check_samples`."""
    source = parts.config.dataset
    return source.room_warning(hosts + 1) if isinstance(source, MadeUpSource) else None
