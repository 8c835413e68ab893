"""Made-up news in the layout of AG News's official files."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

WORDS = ("world", "ball", "shares", "chip")
"""One for each class, which all of its texts have."""


def write_news(root: Path, training: int = 240, testing: int = 40) -> Path:
    """Writes ``ag_news_csv`` with made-up train.csv, test.csv and classes.txt; returns the folder."""
    folder = root / "ag_news_csv"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, count in (("train.csv", training), ("test.csv", testing)):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL)
            for row in range(count):
                others = " ".join(f"word{k}" for k in generator.integers(0, 30, int(generator.integers(1, 12))))
                only = " unseen" if name == "test.csv" else ""
                writer.writerow([row % 4 + 1, f'The "{WORDS[row % 4]}" (AP)', f"It's {others}.{only}"])
    (folder / "classes.txt").write_text("World\nSports\nBusiness\nSci/Tech\n")
    return folder
