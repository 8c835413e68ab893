"""What the linter of imports is told names every module."""

from __future__ import annotations

import pkgutil
import tomllib
from pathlib import Path
from typing import Any

import rayfl

PROJECT = Path(__file__).parents[1]


def test_every_module_is_on_a_floor() -> None:
    contracts: list[dict[str, Any]] = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    foundation = next(contract for contract in contracts if contract["name"].startswith("The foundation"))
    modules = {f"rayfl.{module.name}" for module in pkgutil.iter_modules(rayfl.__path__)} - {"rayfl.__main__"}
    commands = {module for module in modules if module.startswith("rayfl.cli.entry")}
    assert set(foundation["source_modules"]) == modules - commands
    assert set(foundation["forbidden_modules"]) == {"algorithms", "actors", "cluster", "ray"} | commands
