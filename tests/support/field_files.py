"""Small files in the official layouts of data sets of several domains or hospitals."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

RANDOM = np.random.default_rng(1)
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def png(value: int, width: int = 32, height: int = 32) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (value, value, value)).save(buffer, "PNG")
    return buffer.getvalue()


def cinic_files() -> dict[str, bytes]:
    """A training, a validation and a test image of each class, whose brightness tells them apart."""
    return {
        f"{part}/{label}/{part}-{number}.png": png(20 * number + offset)
        for offset, part in enumerate(("train", "valid", "test"))
        for number, label in enumerate(CLASSES)
    }


THINGS = ("back_pack", "bike", "calculator", "headphones", "keyboard", "laptop_computer", "monitor", "mouse", "mug")
DOMAINS = ("amazon", "caltech", "dslr", "webcam")


def office_files() -> dict[str, bytes]:
    """Images of many sizes, two of each class and domain, whose brightness says both."""
    return {
        f"{domain}/{label}/frame_{copy}.png": png(60 * place + 2 * number + copy, 20 + number, 30)
        for place, domain in enumerate(DOMAINS)
        for number, label in enumerate((*THINGS, "projector"))
        for copy in range(2)
    }


def digit_files(folder: Path) -> dict[str, np.ndarray]:
    """Four training and two test digits of each domain, as their authors' files hold them; returns the pixels."""
    folder.mkdir()
    grey = RANDOM.integers(0, 256, (6, 28, 28), dtype=np.uint8)
    small, large = RANDOM.integers(0, 256, (6, 28, 28, 3), dtype=np.uint8), np.full((6, 32, 32, 3), 77, dtype=np.uint8)
    labels, hot = np.array([3, 0, 9, 1, 2, 5]), np.eye(10)[[3, 0, 9, 1, 2, 5]]
    parts = {"train": slice(0, 4), "test": slice(4, 6)}
    savemat(
        folder / "mnist_data.mat",
        {f"{part}_28": grey[rows, ..., np.newaxis].astype(np.float32) for part, rows in parts.items()}
        | {f"label_{part}": hot[rows] for part, rows in parts.items()},
    )
    savemat(
        folder / "mnistm_with_label.mat",
        {part: small[rows] for part, rows in parts.items()}
        | {f"label_{part}": hot[rows] for part, rows in parts.items()},
    )
    ten = np.where(labels == 0, 10, labels)[:, np.newaxis]
    for part, rows in parts.items():
        savemat(folder / f"svhn_{part}_32x32.mat", {"X": large[rows].transpose(1, 2, 3, 0), "y": ten[rows]})
    savemat(
        folder / "syn_number.mat",
        {f"{part}_data": large[rows] for part, rows in parts.items()}
        | {f"{part}_label": labels[rows, np.newaxis] for part, rows in parts.items()},
    )
    cells = np.empty((2, 2), dtype=object)
    for place, rows in enumerate(parts.values()):
        cells[place, 0], cells[place, 1] = grey[rows, np.newaxis] / 255, labels[rows, np.newaxis]
    savemat(folder / "usps_28x28.mat", {"dataset": cells})
    return {"grey": grey, "small": small}


PATIENT = "63.0,1.0,{cp},145.0,233.0,1.0,{ecg},150.0,0.0,2.3,?,?,?,{num}"


def heart_files(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number, hospital in enumerate(("cleveland", "hungarian", "switzerland", "va")):
        lines = [
            PATIENT.format(cp=1 + row % 4, ecg=row % 3, num=row % 5).replace("63.0", str(40 + number + row))
            for row in range(10)
        ]
        lines[4] = lines[4].replace("233.0", "?")
        (folder / f"processed.{hospital}.data").write_text("\n".join(lines) + "\n")
    return folder


def brca_files(folder: Path, patients: int = 180) -> Path:
    """Files of the layout of FLamby's fed_tcga_brca: the age decides on the risk; the second file has its own order."""
    generator, lines, split = np.random.default_rng(0), ["pid,age_at_index,race_white,E,T"], list[str]()
    for number in range(patients):
        age, fold = generator.integers(30, 90), "test" if number % 5 == 0 else "train"
        death, end = generator.exponential(300 * np.exp((60 - age) / 10)), generator.uniform(0, 2000)
        lines.append(f"TCGA-{number},{age},{number % 2},{float(death < end)},{np.ceil(min(death, end))}")
        split.insert(0, f"TCGA-{number},{fold},{fold}_{number % 6}")
    (folder / "dataset_creation_scripts").mkdir(parents=True)
    (folder / "brca.csv").write_text("\n".join(lines) + "\n")
    text = "\n".join(["pid,fold,fold2", *split]) + "\n"
    (folder / "dataset_creation_scripts" / "train_test_split.csv").write_text(text)
    return folder
