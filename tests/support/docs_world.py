"""What the pages' commands find: tiny files and runs under the names that the pages use."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import safe_open
from torch import nn

from algorithms.registry import Experiment
from cluster.run import run_config
from rayfl.config.loading import load_config
from rayfl.data.sources.preparation.pooled_writing import write_pooled
from rayfl.data.sources.preparation.preparing import PREPARED
from rayfl.examples import InputSpec
from rayfl.models.networks.perceptron import TwoNN
from tests.data.sources.leaf.test_leaf_images import album, celebrity, photograph, vectors
from tests.data.sources.leaf.test_leaf_nist import nist
from tests.data.sources.leaf.test_leaf_plays import written
from tests.data.sources.leaf.test_leaf_words import NEXT, comments, tweets
from tests.data.sources.tables.test_adult import files as adult_files
from tests.support.bases import write_base
from tests.support.field_files import brca_files
from tests.support.leaf_sources import document, entry, write_source
from tests.support.tff_files import stack_overflow, write_sqlite

TINY = {
    "train.rounds": 2,
    "train.local_epochs": 1,
    "cluster.backend": "inline",
    "tracking.tensorboard": False,
}
"""What every run of a page is changed to."""

_METHOD = """
from algorithms.fedavg import FedAvg


class MyMethod(FedAvg):
    name: str = "mine"


def choose(known):
    return known.able[: known.size]
"""
_PARTS = {"train": 2000, "t10k": 2000}


def furnish(home: Path, folder: Path, text: str) -> None:
    """Makes what a page's text mentions.

    Args:
        home: the home folder.
        folder: the current folder, which is also the data root.
        text: of the page.
    """
    rounds = max([4, *map(int, re.findall(r"--round (\d+)", text))])
    for pattern, make in _RUNS.items():
        if re.search(pattern, text):
            make(home, folder, rounds)
    for pattern, make_files in _MAKERS.items():
        if re.search(pattern, text):
            make_files(home, folder)


def _run(folder: Path, name: str, **settings: object) -> None:
    chosen = {**TINY, "storage_path": str(folder), "name": name, "algorithm": "fedavg", **settings}
    run_config(load_config(Experiment, "quickstart", chosen))


def _named_runs(home: Path, folder: Path, rounds: int) -> None:
    results = home / "ray_results"
    _inspected(results / "my-run", rounds)
    for number, name in enumerate(("fedavg-digits-1", "superfed-digits-1", "run-a", "run-b")):
        # No two are the same experiment.
        _run(results, name, algorithm=name.split("-")[0] if "digits" in name else "fedavg", seed=number)


def _questions(home: Path, folder: Path, rounds: int) -> None:
    """A run of a language model that has been asked questions."""
    base = write_base("llama", home / "words", causal=True, vocabulary=258)
    chosen = {**TINY, "storage_path": str(home / "ray_results"), "name": "questions", "model.folder": str(base)}
    run_config(load_config(Experiment, "quickstart-lm", chosen))


def _inspected_runs(home: Path, folder: Path, rounds: int) -> None:
    _inspected(folder / "RUN", rounds)
    _run(folder, "RUN_A")
    _run(folder, "RUN_B", seed=1)
    (folder / "my.yaml").write_text((folder / "RUN_A" / "config.yaml").read_text())


def _inspected(run: Path, rounds: int) -> None:
    """A run in which everybody takes part, so that any round and client can be looked at."""
    long = {"train.rounds": rounds, "train.clients_per_round": "all", "train.batch_size": None, "algorithm": "superfed"}
    _run(run.parent, run.name, **long, **{"model.hidden": [8]})


def _mnist(home: Path, folder: Path) -> None:
    """Noise in MNIST's format, under all the names that the pages have for its folder."""
    generator = np.random.default_rng(0)
    for root in (folder, folder / "ROOT", home / "data"):
        raw = root / "MNIST" / "raw"
        raw.mkdir(parents=True)
        for part, count in _PARTS.items():
            images = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
            head = np.array([0x803, count, 28, 28], dtype=">i4").tobytes()
            (raw / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
            labels = (np.arange(count) % 10).astype(np.uint8)
            head = np.array([0x801, count], dtype=">i4").tobytes()
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


def _cifar10(home: Path, folder: Path) -> None:
    """Noise as a prepared file of CIFAR-10, with as many test images as twenty clients need."""
    generator, parts = np.random.default_rng(0), {}
    for part, count in (("train", 20), ("test", 2000)):
        parts[part] = generator.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8), np.arange(count) % 10
    write_pooled(folder / PREPARED / "cifar10.arrow", "cifar10", parts, 10, "noise")


def _tff(home: Path, folder: Path) -> None:
    write_sqlite(folder / "stackoverflow.sqlite", {"train": stack_overflow()["train"], "test": {}, "heldout": {}})


def _leaf(home: Path, folder: Path) -> None:
    place = folder / "leaf" / "data"
    writers = {name: entry(*range(20), first=first) for first, name in enumerate(("ann", "bob", "eve", "zoe", "tom"))}
    write_source(place / "femnist" / "data", document(**writers), document(**writers))
    window = {"x": ["to be or not to be, that is the question: whether 'tis nobler in the mind to suf"], "y": ["f"]}
    write_source(place / "shakespeare" / "data", document(PLAY_HE=window))
    write_source(place / "sent140" / "data", document(ann=tweets("a b a", "b")))
    write_source(place / "celeba" / "data", document(ann=celebrity("a", "b")))
    (place / "celeba" / "data" / "raw").mkdir()
    album(place / "celeba" / "data" / "raw" / "img_align_celeba", a=photograph(1), b=photograph(2))
    write_source(place / "synthetic" / "data", document(ann=vectors([1.0] * 60, [2.0] * 60)))
    write_source(place / "reddit" / "data", document(ann=comments((NEXT, NEXT))))
    (folder / "LEAF").symlink_to(folder / "leaf")


def _sources(home: Path, folder: Path) -> None:
    writers = {f"f{number:04d}_{number:02d}": "3A3zA3z3A3z3" for number in range(6)}
    nist(folder / "nist", writers)
    (folder / "FOLDER").symlink_to(folder / "nist")
    (folder / "100.txt").write_text(written(dict.fromkeys(("HE", "SHE"), "to be or not " * 40)))


def _patients(home: Path, folder: Path) -> None:
    brca_files(folder / "fed_tcga_brca", patients=60)


def _people(home: Path, folder: Path) -> None:
    adult_files(folder / "adult", people=400)


def _modules(home: Path, folder: Path) -> None:
    (folder / "my_module.py").write_text(_METHOD)


def _parquet(home: Path, folder: Path) -> None:
    table = pa.table({"x": [[0.0, 1.0]] * 40, "y": [0, 1] * 20, "client": ["a", "b"] * 20})
    pq.write_table(table, folder / "mine.parquet")


def _reviews(home: Path, folder: Path) -> None:
    import datasets

    rows = {"text": ["a good loaf", "a bad loaf"] * 20, "label": [1, 0] * 20, "shop": list("abcdefgh") * 5}
    datasets.Dataset.from_dict(rows).save_to_disk(str(folder / "reviews"))


def _of_pfllib(home: Path, folder: Path) -> None:
    """Samples of eight clients as PFLlib's scripts of data leave them."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        (folder / "dataset" / "MNIST" / split).mkdir(parents=True)
        for client in range(8):
            x = generator.uniform(-1, 1, (count, 1, 28, 28)).astype(np.float32)
            samples = {"x": x, "y": np.arange(count) % 10}
            np.savez_compressed(folder / "dataset" / "MNIST" / split / f"{client}.npz", data=samples)


def _of_fl_bench(home: Path, folder: Path) -> None:
    """A partition of training and test images as FL-bench leaves it."""
    places = np.random.default_rng(0).permutation(sum(_PARTS.values())).reshape(8, -1)
    clients = [{"train": own[:300], "val": np.array([], dtype=np.int64), "test": own[300:]} for own in places]
    (folder / "data" / "mnist").mkdir(parents=True)
    with (folder / "data" / "mnist" / "partition.pkl").open("wb") as file:
        pickle.dump({"separation": {}, "data_indices": clients}, file)


def _devices(home: Path, folder: Path) -> None:
    with (folder / "client_device_capacity").open("wb") as file:
        pickle.dump({1: {"computation": 30.0, "communication": 5000.0}}, file)


_RUNS: dict[str, Callable[[Path, Path, int], None]] = {
    r"ray_results/(my-run|fedavg-\*|run-a)": _named_runs,
    r"\bRUN(_A)?\b": _inspected_runs,
    r"ray_results/questions": _questions,
}
"""By what a page mentions, the runs that it needs, the first with the number of rounds that it mentions."""

_MAKERS: dict[str, Callable[[Path, Path], None]] = {
    r"rayfl run tcga-brca": _patients,
    r"dataset=adult": _people,
    r"mnist": _mnist,
    r"pfllib-cifar10": _cifar10,
    r"leaf/data|LEAF/data": _leaf,
    r"import-\w+-raw": _sources,
    r"stackoverflow\.sqlite": _tff,
    r"my_module": _modules,
    r"mine\.parquet": _parquet,
    r"path=reviews": _reviews,
    r"dataset/MNIST": _of_pfllib,
    r"partition\.pkl": _of_fl_bench,
    r"client_device_capacity": _devices,
}
"""By what a page mentions, the files that it needs."""


def model_of(exported: Path) -> nn.Module:
    """A module that an exported model of these runs fits."""
    with safe_open(exported, "pt") as file:
        about = json.loads(file.metadata()["rayfl"])
    return TwoNN(**about["model"]).build(InputSpec(kind="image", shape=(1, 8, 8), num_classes=10))
