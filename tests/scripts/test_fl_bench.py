"""How FL-bench is started and timed, with a stub of its layout: FL-bench itself is not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
CONTENDERS = ROOT / "scripts" / "race" / "contenders"
STUB = """
import json, pickle, sys, time
from pathlib import Path
import torchvision
from data.utils import known

given = dict(option.lstrip("+").split("=") for option in sys.argv[1:])
folder = Path("data") / given["dataset.name"]
assert not Path("data/cifar10").exists() and not Path(".git").exists() and known
parts = [torchvision.datasets.MNIST(folder, train, download=False) for train in (True, False)]
partition = pickle.loads((folder / "partition.pkl").read_bytes())
first = partition["data_indices"][1]
json.loads((folder / "args.json").read_text())
labels = [*parts[0].targets.tolist(), *parts[1].targets.tolist()]
found = {
    "options": given, "sizes": [len(part) for part in parts], "separation": partition["separation"],
    "labels": [labels[at] for at in first["train"]], "test": [labels[at] for at in first["test"]],
    "pixels": [int(parts[0].data.min()), int(parts[0].data.max()), list(parts[0].data.shape)],
}
Path(sys.path[0], "..", "..", "found.json").resolve().write_text(json.dumps(found))
for number in range(int(given["common.global_epoch"]) - {less}):
    print("-" * 28, f"TRAINING EPOCH: {number + 1}", "-" * 28)
    time.sleep(0.2)
print("FedAvg's average time taken by each global epoch: 0 min 0.20 sec.")
"""


def ran(folder: Path, less: int = 0, method: str = "fedavg") -> subprocess.CompletedProcess[str]:
    """Runs the contender on a small work with a stub, whose rounds are fewer than asked for by ``less``."""
    checkout = folder / "checkout"
    for place in ("data/utils", "data/cifar10", ".git"):
        (checkout / place).mkdir(parents=True, exist_ok=True)
    (checkout / "data" / "utils" / "__init__.py").write_text("known = True\n")
    (checkout / "main.py").write_text(STUB.replace("{less}", str(less)))
    code = (
        "import sys, time; from dataclasses import replace; from pathlib import Path; import data;"
        "from work import WORKS, Task; folder = Path(sys.argv[1]);"
        f"work = replace(WORKS['W1'], clients=3, cohort=2, samples=6, test_samples=2, rounds=4, method={method!r});"
        "data.write(work, folder / 'samples'); (folder / 'run').mkdir(exist_ok=True);"
        "Task(work, str(folder / 'samples'), time.time(), str(folder / 'run')).write(folder / 'task.json')"
    )
    environment = {**os.environ, "PYTHONPATH": str(CONTENDERS), "FL_BENCH": str(checkout), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, env=environment)
    command = [sys.executable, str(CONTENDERS / "with_flbench.py"), str(folder / "task.json")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_work_s_samples_are_its_data_and_rounds_are_timed(tmp_path: Path) -> None:
    done = ran(tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RACE "))[5:])
    assert len(told["rounds"]) == 2 and all(seconds > 0.15 for seconds in told["rounds"])
    assert told["loss"] is None and told["accuracy"] is None
    found = json.loads((tmp_path / "found.json").read_text())
    y, y_test = (np.load(tmp_path / "samples" / name) for name in ("y.npy", "y_test.npy"))
    assert found["labels"] == y[1].tolist() and found["test"] == y_test[1].tolist()
    assert found["sizes"] == [18, 6] and found["pixels"] == [0, 255, [18, 28, 28]]
    assert found["separation"] == {"train": [0, 1, 2], "val": [0, 1, 2], "test": [0, 1, 2], "total": 3}
    options = found["options"]
    assert int(3 * float(options["common.join_ratio"])) == 2  # as FL-bench rounds it
    assert (options["model.name"], options["optimizer.momentum"], options["common.batch_size"]) == ("2nn", "0.9", "10")
    assert (tmp_path / "checkout" / "data" / "cifar10").exists()  # the checkout is left as it was


@pytest.mark.slow
@pytest.mark.parametrize(
    ("less", "method", "why"),
    [(1, "fedavg", "3 of 4 rounds were seen to end"), (0, "ditto", "takes part with FedAvg and TwoNN alone")],
)
def test_what_cannot_be_timed_is_an_error(tmp_path: Path, less: int, method: str, why: str) -> None:
    done = ran(tmp_path, less, method)
    assert done.returncode == 1 and why in done.stderr and "RACE" not in done.stdout


@pytest.mark.slow
def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "gpu" / "campaign.py")
    command = [sys.executable, script, "--part", "f", "--device", "cpu", "--out", str(tmp_path / "out")]
    command += ["--fl-bench", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "is no checkout of FL-bench" in done.stderr
