"""Units in which tables and figures say how much was sent."""

from __future__ import annotations

import pytest

from rayfl.report.cells import unit_of_bytes


@pytest.mark.parametrize(
    ("most", "found"),
    [
        (0, (1, "bytes")),
        (999, (1, "bytes")),
        (1000, (1e3, "kB")),
        (999_999, (1e3, "kB")),
        (1e6, (1e6, "MB")),
        (1e9, (1e9, "GB")),
        (5e12, (1e9, "GB")),
    ],
)
def test_the_largest_unit_that_is_not_above_it(most: float, found: tuple[float, str]) -> None:
    assert unit_of_bytes(most) == found
