"""A data set of Hugging Face of your own: pictures of several hospitals, in a folder that save_to_disk wrote. Seconds.

python own_huggingface.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import datasets  # pip install 'rayfl[hf]'
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import rayfl

HOSPITALS = ("Aachen", "Bonn", "Cologne", "Dresden")


def pictures(folder: Path) -> None:
    """Saves scikit-learn's digits, of which every hospital takes darker or lighter pictures than the others."""
    digits, generator = load_digits(), np.random.default_rng(0)
    where = generator.integers(len(HOSPITALS), size=len(digits.target))
    shades = (digits.images * (6 + 3 * where[:, None, None])).astype(np.uint8)
    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(num_classes=10),
        "hospital": datasets.ClassLabel(names=list(HOSPITALS)),
    }
    rows = {"image": list(map(Image.fromarray, shades)), "label": digits.target, "hospital": where}
    made = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    made.save_to_disk(str(folder))


def main(folder: Path) -> None:
    """Trains a perceptron with a head of each hospital's own, and prints how often it is right."""
    folder.mkdir(parents=True, exist_ok=True)
    datasets.disable_progress_bars()
    pictures(folder / "pictures")
    result = rayfl.run(
        {
            "dataset": {
                "name": "huggingface", "path": str(folder / "pictures"), "root": str(folder), "client": "hospital",
            },
            "transform": {"normalize": "dataset"},
            "model": {"name": "two_nn", "hidden": [64]},
            "algorithm": "fedper",
            "train": {"rounds": 10, "clients_per_round": 4, "lr": 0.1, "batch_size": 20},
        },
        **{"cluster.backend": "inline", "storage_path": str(folder), "name": "hospitals"},
    )  # fmt: skip
    row = [r for r in result.rounds.to_pylist() if (r["cohort"], r["split"]) == ("all", "test")][-1]
    print(f"{row['clients']} hospitals, {row['model']}: {row['top1']:.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "~/ray_results/examples").expanduser())
