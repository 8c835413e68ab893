"""Methods have the names that papers print: each of rayfl's has one, which its docstring has too."""

from __future__ import annotations

import inspect
import re

import pytest

from algorithms.registry import METHODS
from rayfl.naming.printed import PRINTED


def plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.replace("+", "plus").lower())


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_a_printed_name(name: str) -> None:
    assert plain(PRINTED[name]) == plain(name)
    assert PRINTED[name] in (inspect.getdoc(METHODS[name]) or "")


def test_there_are_no_further_names() -> None:
    assert set(PRINTED) == set(METHODS)
