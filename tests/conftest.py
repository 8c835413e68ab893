"""How tests run: on CPUs, on every machine, and side by side by file, but for those that start Ray.

RAYFL_TEST_DEVICE names another device for those that can use one.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

# Here: before anything asks CUDA for devices, in this process or in those that tests start.
if not os.environ.get("RAYFL_TEST_DEVICE"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# What tests prepare is no business of the user's own data root. Processes that this one starts have the same.
_DATA = None if "RAYFL_DATA" in os.environ else tempfile.mkdtemp(prefix="rayfl-tests-")
if _DATA is not None:
    os.environ["RAYFL_DATA"] = _DATA

# A busy machine is no failure. Ray's workers have the same priority as tests beside them: with a niceness of 15, Ray's
# default, an actor can take minutes to start.
os.environ.setdefault("RAY_worker_niceness", "0")
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

_METHODS = Path(__file__).parents[1] / "algorithms"
_RAY = "tests/cluster/"
_STARTS_RAY = ("local_ray", "start_local", "import ray", "subprocess")
"""Words of files whose tests start Ray, or programs that may."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow what ``make test`` has no time for: further cases of tests that have several.

    All but the first and the last of a test of one method, or of one marked ``two_cases``; of one marked ``first_case``
    all but that. A method's tests differ little from case to case (an option, a mode, a seed), and there are hundreds
    of methods. On another device than a CPU there are all cases.
    """
    if os.environ.get("RAYFL_TEST_DEVICE"):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    for found in cases.values():
        if found[0].get_closest_marker("first_case"):
            further = found[1:]
        elif found[0].get_closest_marker("two_cases") or _of_one_method(found[0]):
            further = found[1:-1]
        else:
            further = []
        for item in further:
            item.add_marker("slow")


def _of_one_method(item: pytest.Item) -> bool:
    path = item.path
    return path.parent.name == "algorithms" and (_METHODS / path.name.removeprefix("test_")).is_file()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leaves the modules and tests that are there out of later garbage collections, half a second of CPU time each.

    Running out of device memory is answered with a full collection, and many tests run out of it on purpose. While
    tests are collected next to nothing becomes garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """Leaves what modules and tests before this one have made out of full collections, which took a second each."""
    if len(gc.get_objects()) > 100_000:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks() -> Iterator[None]:
    """Leaves it to the system when files reach a disk: tests kill processes and pull no plugs.

    A run waits for that some fifty times, for milliseconds each. Tests of it put their own function there.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def drawing_figures() -> Iterator[Callable[..., AbstractContextManager[None]]]:
    """Has reports make their figures and leave them undrawn, which takes three quarters of a report's time.

    Gives a context manager in which they are drawn, as SVG for the page or in the formats that users have.
    """
    from rayfl.report import drawing

    svg, formats = drawing.Drawing.__dict__["svg"], drawing.FORMATS
    picture = '<svg xmlns="http://www.w3.org/2000/svg" width="400pt" height="200pt" viewBox="0 0 400 200"></svg>'

    @contextmanager
    def drawn(every_format: bool = False) -> Iterator[None]:
        with (
            mock.patch.object(drawing.Drawing, "svg", svg),
            mock.patch.object(drawing, "FORMATS", formats if every_format else ("svg",)),
        ):
            yield

    with (
        mock.patch.object(drawing, "FORMATS", ("svg",)),
        mock.patch.object(drawing.Drawing, "svg", property(lambda self: picture)),
    ):
        yield drawn


@pytest.fixture(scope="module")
def drawn_figures(drawing_figures: Callable[..., AbstractContextManager[None]]) -> Iterator[None]:
    """For modules that look at the pictures of reports."""
    with drawing_figures():
        yield


def pytest_unconfigure() -> None:
    """Removes what tests have prepared; libraries that look for leaks at the end have their objects collected."""
    gc.unfreeze()
    if _DATA is not None:
        shutil.rmtree(_DATA, ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Gives one process all tests that start Ray, so that no two are at it, and the others file by file."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    @functools.cache
    def starts_ray(file: str) -> bool:
        text = (config.rootpath / file).read_text()
        return any(word in text for word in _STARTS_RAY)

    class OneRay(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return _RAY if file.startswith(_RAY) and starts_ray(file) else file

    return OneRay(config, log)
