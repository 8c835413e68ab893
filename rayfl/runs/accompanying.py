"""Checks of the files that accompany a run: what it took, and where it ran."""

from __future__ import annotations

import json
from collections.abc import Iterator

from rayfl.storage.files import Storage
from rayfl.tracking.costs import read_costs
from rayfl.tracking.environment import FILE as ENVIRONMENT
from rayfl.tracking.timings import read_timings
from rayfl.tracking.tune_files import JSON_FILE, read_results


def damaged_files(storage: Storage) -> Iterator[str]:
    """Yields what is wrong with such files, a sentence each. A last line that was cut off is not wrong.

    Args:
        storage: the run's folder.
    """
    for name, read in (
        ("costs.jsonl", read_costs),
        ("timings.jsonl", read_timings),
        (JSON_FILE, read_results),
        (ENVIRONMENT, _content),
    ):
        try:
            read(storage)
        except (ValueError, RecursionError) as error:
            yield f"{name} in {storage.uri} is damaged ({error}): delete it to do without what it says"


def _content(storage: Storage) -> object:
    return json.loads(storage.read(ENVIRONMENT)) if storage.exists(ENVIRONMENT) else None
