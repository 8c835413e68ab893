"""FLamby's scans and slides by hospital: writes a table of their files, which dataset=arrays and the presets read.

python flamby_scans.py ixi IXI_sample metadata_tiny.csv           # the CSV files are those of FLamby's folders metadata
python flamby_scans.py kits19 kits19/data thresholded_sites.csv
python flamby_scans.py lidc LIDC metadata.csv
python flamby_scans.py camelyon16 tiles metadata.csv [TILES]      # of each slide 10000 at random, the rest filled up
"""

import csv
import sys
from pathlib import Path

import numpy as np


def ixi(folder, row):
    """Brains of three hospitals of London (IXI Tiny)."""
    found = sorted(folder.glob(f"IXI{int(row['Patient ID']):03d}-*"))
    name = found[0].name if found else f"IXI{row['Patient ID']}"
    image, mask = folder / name / "T1" / f"{name}_image.nii.gz", folder / name / "label" / f"{name}_label.nii.gz"
    return image, mask, ("Guys", "HH", "IOP")[int(row["Manufacturer"])], row["Split"]


def kits19(folder, row):
    """Kidneys and their tumours, six sites."""
    case = folder / row["case_ids"]
    return case / "imaging.nii.gz", case / "segmentation.nii.gz", f"site_{row['site_ids']}", row["train_test_split"]


def lidc(folder, row):
    """Nodules of lungs, four makers of scanners."""
    scan, makers = folder / row["SeriesInstanceUID"], ("GE", "Philips", "Siemens", "Toshiba")
    return scan / "patient.nii.gz", scan / "mask_consensus.nii.gz", makers[int(row["Manufacturer"])], row["Split"]


def camelyon16(folder, row, tiles=10_000):
    """Slides of lymph nodes, two hospitals: features of a slide's tiles, and whether it has a tumour."""
    name = row["slide_name"]
    stored, bag = folder / f"{name}.npy", folder / "bags" / f"{name}.npy"
    if stored.is_file():
        features = np.load(stored)
        chosen = np.random.default_rng(42).permutation(len(features))[:tiles]
        filled = np.zeros((tiles, features.shape[1]), np.float32)
        filled[: len(chosen)] = features[chosen]
        bag.parent.mkdir(exist_ok=True)
        np.save(bag, filled)
    hospital = ("RUMC", "UMCU")[int(float(row["hospital_corrected"]))]
    return bag, int(row["label"]), hospital, "test" if name.startswith("test") else "train"


def main(kind, folder, metadata, *options):
    folder, find = Path(folder).absolute(), {"ixi": ixi, "kits19": kits19, "lidc": lidc, "camelyon16": camelyon16}[kind]
    with open(metadata, newline="") as file:
        rows = [find(folder, row, *map(int, options)) for row in csv.DictReader(file)]
    missing = [str(path) for row in rows for path in row[:2] if isinstance(path, Path) and not path.is_file()]
    if missing:
        raise SystemExit(f"{len(missing)} files of {metadata} are missing, the first is {missing[0]}")
    with open(folder / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([("image", "label" if kind == "camelyon16" else "mask", "client", "split"), *rows])
    print(f"{len(rows)} samples of {len({row[2] for row in rows})} clients -> {folder / 'table.csv'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
