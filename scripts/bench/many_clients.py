"""One Parquet file with many clients of encoded images: how long it takes to open, and what reading a client costs.

    python scripts/bench/many_clients.py FOLDER [--clients 10000] [--gib 20] [--read 20] [--data-memory 64]
    python scripts/bench/many_clients.py FOLDER --train 64 --format JPEG --side 128 [--model superfed_cnn]

Writes ``FOLDER/many.parquet`` where it is missing: made-up PNG images of 64 x 64 pixels, a group of rows for each
client and split, of about ``--gib`` GiB in all (before Parquet leaves out what repeats). Then, in this process: seconds
to open it as a data set, seconds and bytes for the samples of ``--read`` clients, one after the other, and the growth
of memory, which the process has for itself. Seconds of the processor, in brackets, do not depend on other work. Last,
what an actor with ``--data-memory`` MiB does: it takes the training samples of a tenth of the clients, while those of
the next one are read ahead; the most bytes of samples that it held, and the growth of memory.

With ``--train N`` it measures what reading ahead brings instead: FedAvg trains N clients a round, one after the other,
on images that are brought to 64 x 64 pixels, with ``cluster.read_ahead`` and without it in turn, in this process. With
``--data-memory`` below what a round needs, all is read again in every round. It prints the seconds of a round, and the
seconds of the processor that the thread which trains took: the others are those of the thread that reads. Where every
thread has a core, a round takes the latter; other work on the machine changes them little. Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import io
import resource
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

import rayfl
from actors.hosting.samples import Samples
from rayfl.data.files.natural_file import NaturalHeader, write_natural
from rayfl.data.sources.natural import NaturalDataset
from rayfl.randomness import RandomStreams
from rayfl.tracking.callback import Callback

_POOL, _TEST_SHARE = 500, 5


def main() -> None:
    """Writes the file if need be, and prints what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--gib", type=float, default=20)
    parser.add_argument("--read", type=int, default=20)
    parser.add_argument("--data-memory", type=int, default=64)
    parser.add_argument("--train", type=int, default=0, help="clients that train with and without reading ahead")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--model", default="superfed_cnn", help="what trains")
    parser.add_argument("--format", choices=("PNG", "JPEG"), default="PNG")
    parser.add_argument("--side", type=int, default=64)
    chosen = parser.parse_args()
    path = chosen.folder / "many.parquet"
    if not path.exists():
        write(path, chosen.clients, int(chosen.gib * 2**30), chosen.side, chosen.format)
    print(f"{path}: {path.stat().st_size / 2**30:.2f} GiB")
    if chosen.train:
        with TemporaryDirectory(dir=chosen.folder) as runs:
            compare_reading(path, chosen.model, chosen.train, chosen.repetitions, chosen.data_memory << 20, runs)
        return
    before, memory, own = time.perf_counter(), own_memory(), time.process_time()
    data = NaturalDataset(path, 0.0, RandomStreams(0))
    seconds, own = time.perf_counter() - before, time.process_time() - own
    print(f"opened: {data.num_clients:,} clients in {seconds:.2f} s ({own:.2f} s), {own_memory() - memory} MiB")
    before, memory, read, own = time.perf_counter(), own_memory(), bytes_read(), time.process_time()
    samples = 0
    for client in np.linspace(0, data.num_clients - 1, chosen.read).astype(int).tolist():
        splits = data.load(client)
        samples += sum(len(splits[split]) for split in ("train", "test"))
    seconds, read, own = time.perf_counter() - before, bytes_read() - read, time.process_time() - own
    print(
        f"{chosen.read} clients with {samples:,} samples: {seconds / chosen.read * 1e3:.0f} ms "
        f"({own / chosen.read * 1e3:.0f} ms) and "
        f"{read / chosen.read / 2**20:.2f} MiB read for each, memory grew by {own_memory() - memory} MiB"
    )
    before, memory = time.perf_counter(), own_memory()
    most, taken = within(data, chosen.data_memory << 20, range(0, data.num_clients, 10))
    print(
        f"{taken:,} clients with {chosen.data_memory} MiB for samples: held at most {most / 2**20:.1f} MiB, "
        f"memory grew by {own_memory() - memory} MiB, {(time.perf_counter() - before) / taken * 1e3:.1f} ms each"
    )
    print(f"largest memory of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


def within(data: NaturalDataset, limit: int, clients: Sequence[int]) -> tuple[int, int]:
    """Takes clients' training samples as an actor does; returns the most bytes held, and how many clients it took."""
    samples, most = Samples(data, torch.device("cpu"), limit), 0
    for client, following in zip(clients, [*clients[1:], None], strict=True):
        samples.expect([client], [] if following is None else [following])
        samples.of(client)["train"]
        most = max(most, samples.held_bytes)
    return most, len(clients)


class Seconds(Callback):
    """Keeps how long the rounds took, and what this thread had computed when they ended."""

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.ends: list[float] = []

    def on_round(self, rounds_completed: int, cohort: Sequence[int], seconds: float) -> None:
        """Notes a round."""
        self.rounds.append(seconds)
        self.ends.append(time.thread_time())


def compare_reading(path: Path, model: str, clients: int, repetitions: int, memory: int, runs: str) -> None:
    """Prints the seconds of a round of some clients, with reading ahead and without, in turn."""
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for repetition in range(repetitions):
        for ahead in (True, False) if repetition % 2 else (False, True):
            watch = Seconds()
            rayfl.run(
                {
                    "dataset": {"name": "leaf", "path": str(path.absolute())},
                    "partition": "natural",
                    "holdout": {"validation": 0.0},
                    "transform": {"resize": 64},
                    "model": model,
                    "algorithm": "fedavg",
                    "train": {"rounds": 2, "clients_per_round": clients, "local_epochs": 1, "batch_size": 16},
                    "evaluation": {"every": 2},
                    "cluster": {"backend": "inline", "read_ahead": ahead, "data_memory": memory},
                    "seed": repetition,
                },
                [watch],
                storage_path=runs,
                name=f"{'ahead' if ahead else 'in-turn'}-{repetition}",
            )
            # The second round: the first one starts everything.
            found[ahead].append((watch.rounds[1], watch.ends[1] - watch.ends[0]))
    for place, what in enumerate(("seconds", "seconds of the processor, in the thread that trains")):
        seconds = {ahead: [pair[place] for pair in pairs] for ahead, pairs in found.items()}
        ratios = [ahead / in_turn for ahead, in_turn in zip(seconds[True], seconds[False], strict=True)]
        for name, values in (("read ahead", seconds[True]), ("in turn", seconds[False]), ("ratio", ratios)):
            each = ", ".join(f"{value:.2f}" for value in values)
            print(f"{what}, {name}: {each}; median {np.median(values):.2f}")


def write(path: Path, clients: int, size: int, side: int = 64, kind: str = "PNG") -> None:
    """Writes the file."""
    generator = np.random.default_rng(0)
    pool = [_image(generator, side, kind) for _ in range(_POOL)]
    rows = max(2, round(size / clients / (sum(map(len, pool)) / len(pool))))
    test = max(1, rows // _TEST_SHARE)
    header = NaturalHeader(
        version=2, kind="made_up", input="image", shape=(3, side, side), num_classes=10, storage="encoded"
    )
    schema = header.arrow_schema()

    def groups() -> Iterator[pa.Table]:
        for client in range(clients):
            for split, count in (("train", rows - test), ("test", test)):
                images = [pool[place] for place in generator.integers(0, len(pool), count)]
                labels = generator.integers(0, 10, count).astype(np.int16)
                columns = [pa.array([f"client_{client:06d}"] * count), pa.array([split] * count), pa.array(images)]
                yield pa.Table.from_arrays([*columns, pa.array(labels)], schema=schema)

    path.parent.mkdir(parents=True, exist_ok=True)
    write_natural(path, schema, groups())


def own_memory() -> int:
    """MiB that the process has for itself (RssAnon)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) // 1024


def bytes_read() -> int:
    """Bytes that the process has asked for so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def _image(generator: np.random.Generator, side: int, kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(generator.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(buffer, kind)
    return buffer.getvalue()


if __name__ == "__main__":
    main()
