"""Files as LEAF writes them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

LEAF_ROOT = Path(os.environ.get("RAYFL_TEST_DATA") or Path(__file__).parents[3] / "shared" / "data") / "leaf"
"""Folder of LEAF's own files."""

needs_leaf = pytest.mark.skipif(
    not LEAF_ROOT.is_dir(), reason=f"no LEAF data in {LEAF_ROOT}; set RAYFL_TEST_DATA to the folder that has leaf/"
)


def image(level: int) -> list[float]:
    """An image of grey levels, each level another one."""
    return [((level + pixel) % 256) / 255 for pixel in range(784)]


def entry(*labels: int, first: int = 0) -> dict[str, list[Any]]:
    """A FEMNIST user with one image per label."""
    return {"x": [image(first + sample) for sample in range(len(labels))], "y": list(labels)}


def document(**users: dict[str, list[Any]]) -> dict[str, Any]:
    return {"users": list(users), "num_samples": [len(user["y"]) for user in users.values()], "user_data": users}


def write_source(root: Path, train: dict[str, Any] | str, test: dict[str, Any] | str | None = None) -> Path:
    """A LEAF folder with one file per split: train/a.json and test/b.json."""
    for split, name, content in (("train", "a", train), ("test", "b", document() if test is None else test)):
        (root / split).mkdir(parents=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (root / split / f"{name}.json").write_text(text)
    return root
