"""Features of images by CLIP, made once: a Parquet file that model=pretrained reads in the place of images. Seconds.

python clip_features.py [BASE [FOLDER]]           # BASE: a folder with a CLIPModel; rayfl model make tiny-clip
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from sklearn.datasets import load_digits
from transformers import CLIPModel


def write_features(base: Path, images: torch.Tensor, labels: np.ndarray, path: Path) -> None:
    """Writes one row for each image; images are as the base reads them: resized, normalised, (n, channels, h, w)."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = CLIPModel.from_pretrained(base, local_files_only=True).eval().to(device)
    with torch.no_grad():
        parts = [model.get_image_features(pixel_values=part.to(device)).pooler_output for part in images.split(256)]
    features = torch.cat(parts).float().cpu().numpy()
    rows = pa.FixedSizeListArray.from_arrays(features.ravel(), features.shape[1])
    pq.write_table(pa.table({"x": rows, "y": labels}), path)


def main(base: Path, folder: Path) -> None:
    """Writes the features of scikit-learn's digits, and prints the run that trains on them."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    write_features(base, images, digits.target, folder / "features.parquet")
    print(f"rayfl run quickstart-clip 'dataset={{name: parquet, path: {folder / 'features.parquet'}}}'")


if __name__ == "__main__":
    named = dict(enumerate(sys.argv))
    base, place = named.get(1, "~/models/tiny-clip"), named.get(2, "~/ray_results/examples")
    main(Path(base).expanduser(), Path(place).expanduser())
