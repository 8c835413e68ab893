"""What is fed in: values, damaged files, typed words; and how an answer is judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.errors import RayflError

Result = TypeVar("Result")
QUICK = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
THOROUGH = settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "all", "floco", "digits", "a:b", "os:system", "../x", "1e3", "nan", "4GiB", "\0"]),
    st.binary(max_size=4),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=6,
)
BASE: dict[str, Any] = load_config(Experiment, "quickstart", []).model_dump(mode="json")


def paths(content: Any, before: tuple[str, ...] = ()) -> list[str]:
    """The dotted paths of all sections and values."""
    if not isinstance(content, dict):
        return [".".join(before)]
    inner = [path for key, value in content.items() for path in paths(value, (*before, key))]
    return inner if not before else [".".join(before), *inner]


PATHS = paths(BASE)


def tried(kind: type[RayflError], call: Callable[[], Result]) -> tuple[Result | None, str]:
    """What a call returns, or the message of its error; any other error passes."""
    try:
        return call(), ""
    except kind as error:
        return None, str(error)


TYPED = st.one_of(
    st.text(max_size=30),
    st.tuples(st.sampled_from(PATHS), st.text(max_size=20)).map("=".join),
)


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """Cut, with changed bytes, with a part doubled, or something else altogether."""
    places = st.integers(0, max(len(content) - 1, 0))
    flipped = st.lists(st.tuples(places, st.integers(1, 255)), min_size=1, max_size=4)

    def flip(changes: list[tuple[int, int]]) -> bytes:
        data = bytearray(content)
        for place, mask in changes:
            data[place] ^= mask
        return bytes(data)

    return st.one_of(
        places.map(lambda end: content[:end]),
        flipped.map(flip),
        st.tuples(places, places).map(lambda cut: content[: cut[0]] + content[cut[1] :]),
        st.binary(max_size=40),
    )
