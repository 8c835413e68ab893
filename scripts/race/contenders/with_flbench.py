"""The race's work in FL-bench, which has no package: a checkout of yours is started as its README says.

``FL_BENCH`` names the checkout. The Python of its ``.venv`` starts it, if there is one, else this one. It works on a
copy without data, in which the samples of the work are the files of MNIST. Rounds are timed by what the program prints.
Nothing of FL-bench, which is under GPL-3.0, is imported or contained here.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
from collections import deque
from pathlib import Path

import numpy as np
from work import LR, MOMENTUM, Task, Work, now

_LEFT_OUT = {".git", ".venv", "out", "temp"}
_ROUND, _END = "TRAINING EPOCH:", "average time taken by each global epoch"
_FILES = {"": "train", "_test": "t10k"}
"""What torchvision calls MNIST's files."""
_WORKERS = {"cpu": 2, "cuda": 8}
"""As many as Flower has."""


def copied(checkout: Path, folder: Path) -> None:
    """Copies a checkout without its data and results."""

    def left_out(place: str, names: list[str]) -> set[str]:
        if Path(place) == checkout / "data":
            return {name for name in names if name != "utils" and (checkout / "data" / name).is_dir()}
        return _LEFT_OUT & set(names)

    shutil.copytree(checkout, folder, ignore=left_out)


def write_mnist(task: Task, folder: Path) -> None:
    """Writes the samples as files of MNIST, and who has which, in the form that FL-bench's ``generate_data.py`` writes.

    Args:
        task: its samples; pixels are rounded to bytes.
        folder: ``data/mnist`` of a checkout.
    """
    work, raw = task.work, folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    low, high = (float(end(task.array("x"))) for end in (np.min, np.max))
    for suffix, name in _FILES.items():
        x, y = task.array("x" + suffix), task.array("y" + suffix)
        pixels = np.clip(np.rint((x - low) / (high - low) * 255), 0, 255).astype(np.uint8).reshape(-1, *work.shape[1:])
        _write_idx(raw / f"{name}-images-idx3-ubyte", pixels)
        _write_idx(raw / f"{name}-labels-idx1-ubyte", y.reshape(-1).astype(np.uint8))
    clients, first = list(range(work.clients)), work.clients * work.samples
    indices = [
        {
            "train": np.arange(client * work.samples, (client + 1) * work.samples),
            "val": np.array([], dtype=np.int64),
            "test": first + np.arange(client * work.test_samples, (client + 1) * work.test_samples),
        }
        for client in clients
    ]
    separation = {"train": clients, "val": clients, "test": clients, "total": work.clients}
    (folder / "partition.pkl").write_bytes(pickle.dumps({"separation": separation, "data_indices": indices}))
    (folder / "args.json").write_text("{}")


def _write_idx(path: Path, values: np.ndarray) -> None:
    """Writes bytes in the format of MNIST's files: a magic number with the dimensions, their sizes, the values."""
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(bytes([0, 0, 8, values.ndim]) + sizes + values.tobytes())


def options(work: Work, device: str) -> list[str]:
    """The arguments of ``main.py``. Those with ++ are new or old names: a checkout takes the one that it knows."""
    return [
        "method=fedavg",
        "dataset.name=mnist",
        "model.name=2nn",
        "model.use_torchvision_pretrained_weights=false",
        f"optimizer.lr={LR}",
        f"optimizer.momentum={MOMENTUM}",
        "mode=parallel",
        f"parallel.num_workers={_WORKERS[device]}",
        f"parallel.num_cpus={_WORKERS[device]}",
        f"parallel.num_gpus={int(device == 'cuda')}",
        f"common.join_ratio={work.cohort / work.clients}",
        f"common.global_epoch={work.rounds}",
        f"common.local_epoch={work.epochs}",
        f"common.batch_size={work.batch}",
        f"common.use_cuda={str(device == 'cuda').lower()}",
        "common.verbose_gap=1",
        "common.save_log=false",
        "common.save_metrics=false",
        *("++common.save_learning_curve_plot=false", "++common.save_fig=false"),
        *("++common.client_side_evaluation=false", "++common.eval_test=false"),
        *(f"++common.test.client.{name}={value}" for name, value in (("interval", -1), ("test", "false"))),
    ]


def main() -> None:
    """Runs the work, and prints what it took; the accuracy is not asked for."""
    task, checkout = Task.read(sys.argv[-1]), Path(os.environ["FL_BENCH"]).resolve()
    if (task.work.model, task.work.method, task.work.evaluate) != ("two_nn", "fedavg", False):
        raise SystemExit(f"{task.work.name}: FL-bench takes part with FedAvg and TwoNN alone")
    folder, own = Path(task.scratch) / "FL-bench", checkout / ".venv" / "bin" / "python"
    copied(checkout, folder)
    write_mnist(task, folder / "data" / "mnist")
    command = [str(own) if own.exists() else sys.executable, "main.py", *options(task.work, task.device)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    environment.pop("PYTHONPATH", None)  # the race's module ``data`` would hide FL-bench's folder of that name
    seen, last = list[float](), deque[str](maxlen=40)
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            last.append(line)
            if _ROUND in line or _END in re.sub(r"\s+", " ", line):
                seen.append(now())
    # A round ends where the next one, or the summary, is printed.
    ends = seen[1:]
    if process.returncode or len(ends) != task.work.rounds:
        raise SystemExit(f"{len(ends)} of {task.work.rounds} rounds were seen to end:\n{''.join(last)}")
    task.report(ends, None, None)


if __name__ == "__main__":
    main()
