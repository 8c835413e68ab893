"""Texts of your own: a column of text in a Parquet file, whose words become tokens. Seconds.

python own_text.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import rayfl

GOOD, BAD = ("good", "fine", "lovely", "fresh"), ("bad", "stale", "cold", "slow")
SHOPS, EACH = 6, 60


def reviews(path: Path) -> None:
    """Writes made-up reviews of shops; at every shop other words are frequent."""
    generator = np.random.default_rng(0)
    rows = []
    for shop in range(SHOPS):
        taste = generator.dirichlet(np.ones(4), size=2)
        for _ in range(EACH):
            liked = int(generator.integers(2))
            words = generator.choice(GOOD if liked else BAD, size=2, p=taste[liked])
            rows.append({"shop": f"shop-{shop}", "text": f"The bread was {words[0]}, {words[1]}!", "label": liked})
    pq.write_table(pa.Table.from_pylist(rows), path)


def main(folder: Path) -> None:
    """Trains fastText on the reviews, and prints how often it is right."""
    folder.mkdir(parents=True, exist_ok=True)
    reviews(folder / "reviews.parquet")
    result = rayfl.run(
        {
            "dataset": {
                "name": "parquet", "path": str(folder / "reviews.parquet"), "root": str(folder), "client": "shop",
                "x": "text", "tokenizer": "words", "length": 10,
            },
            "model": {"name": "fasttext", "embedding": 8},
            "algorithm": "fedavg",
            "train": {"rounds": 15, "clients_per_round": 3, "lr": 1.0, "batch_size": 10},
        },
        **{"cluster.backend": "inline", "storage_path": str(folder), "name": "reviews"},
    )  # fmt: skip
    row = [r for r in result.rounds.to_pylist() if (r["cohort"], r["split"]) == ("all", "test")][-1]
    print(f"{row['model']}: {row['top1']:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "~/ray_results/examples").expanduser())
