"""The file for SLURM: linted, and run with stand-ins for SLURM's commands, for Ray and for the run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.jobs.templating import TemplateOptions, render, template_options
from rayfl.cli.entry import app
from rayfl.errors import ConfigError
from tests.support.linters import lint

GPUS = {"name": "femnist", "nodes": 3, "gpus_per_node": 2, "cpus_per_node": 16, "memory_per_node": 100}
CHOSEN = GPUS | {"environment": "/opt/rayfl", "time": "2-00:00:00", "partition": "gpu", "account": "group-1"}


def linted(text: str, folder: Path) -> str:
    """The text, of which neither bash nor shellcheck complains."""
    script = folder / "run.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", str(script)], check=True)
    lint("shellcheck", str(script))
    return text


def test_slurm(tmp_path: Path) -> None:
    run = ["femnist", "partition={name: natural, min_samples: 10}", "storage_path=/scratch/my runs"]
    text = linted(render("slurm", template_options(CHOSEN), run), tmp_path)
    for expected in (
        "#SBATCH --nodes=3",
        "#SBATCH --gpus-per-node=2",
        "#SBATCH --time=2-00:00:00",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=group-1",
        "cpus=${SLURM_CPUS_PER_TASK:-16}",
        "gpus=${SLURM_GPUS_ON_NODE:-2}",
        "source /opt/rayfl/bin/activate",
        "rayfl run femnist 'partition={name: natural, min_samples: 10}' 'storage_path=/scratch/my runs' name=femnist &",
    ):
        assert expected in text
    # Directives after the first command are not read.
    lines = text.splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]
    # It would end the Rays of other jobs, or refuse a node that has one.
    assert not re.search(r"^[^#]*\bray (stop|symmetric-run)", text, re.MULTILINE)
    plain = render("slurm", TemplateOptions())
    assert not re.search("--gpus-per-node|--partition|--account|--array|--exclusive", plain)


def test_nodes_are_taken_whole_by_choice(tmp_path: Path) -> None:
    whole = linted(render("slurm", template_options({"exclusive": True})), tmp_path)
    shared = render("slurm", TemplateOptions())
    assert "#SBATCH --exclusive\n" in whole and "memory_monitor" not in whole
    assert "--exclusive" not in shared and "export RAY_memory_monitor_refresh_ms=0\n" in shared


def test_an_array_of_seeds(tmp_path: Path) -> None:
    text = linted(
        render("slurm", template_options({"name": "many", "array": 5}), ["quickstart", "train.rounds=3"]), tmp_path
    )
    assert "#SBATCH --array=0-4" in text and "#SBATCH --output=many-%a.log" in text
    assert '"seed=$SLURM_ARRAY_TASK_ID" "name=many-$SLURM_ARRAY_TASK_ID" &' in text
    with pytest.raises(ConfigError, match="--array gives each job a seed and a name of its own"):
        render("slurm", template_options({"array": 2}), ["quickstart", "seed=1"])


def test_an_array_of_a_sweep(tmp_path: Path) -> None:
    run = ["quickstart", "train.rounds=3", "algorithm=fedavg,ditto", "seed=0:2", "model.hidden=[12],[8, 8]"]
    text = linted(render("slurm", template_options({"name": "many", "sweep": True}), run), tmp_path)
    assert "#SBATCH --array=0-7" in text and "#SBATCH --output=many-%a.log" in text
    assert 'rayfl run quickstart train.rounds=3 storage_path=/shared/runs/many "${experiment[@]}" &' in text
    chosen = text[text.index("case $SLURM_ARRAY_TASK_ID") : text.index("esac") + 4]
    said = subprocess.run(
        ["bash", "-c", f"SLURM_ARRAY_TASK_ID=5\n{chosen}\nprintf '%s|' \"${{experiment[@]}}\""],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "algorithm=ditto|seed=0|model.hidden=[8, 8]|"
    for words, wrong in (
        (["train.lr=log(0.1, 1)"], "train.lr is drawn at random"),
        (["seed=0"], "these are 1 experiments"),
        (["seed=0:1001"], "these are 1001 experiments"),
        (["seed=0:2", "name=x"], "leave name and storage_path out"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            render("slurm", template_options({"sweep": True}), ["quickstart", *words])
    with pytest.raises(ConfigError, match="give seed=0:N to --sweep alone"):
        render("slurm", template_options({"sweep": True, "array": 2}), ["quickstart", "seed=0:2"])
    # Each experiment is validated before the file is written.
    wanted = [
        "cluster",
        "template",
        "slurm",
        "quickstart",
        "algorithm=fedavg,ditt",
        "--sweep",
        "--out",
        str(tmp_path / "a"),
    ]
    with pytest.raises(ConfigError, match="ditto"):
        CliRunner().invoke(app, wanted, catch_exceptions=False)
    assert not (tmp_path / "a").exists()


SRUN = """#!/usr/bin/env bash
echo "srun $*" >> "$LOG"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
GETENT = """#!/usr/bin/env bash
echo "127.0.1.1 STREAM a"; echo "0.0.0.0 STREAM a"; echo "0.0.0.0 DGRAM"
"""
"""The second address stands for the machine's own, which a test cannot count on."""
RAY = """#!/usr/bin/env python3
import os, signal, socket, sys
with open(os.environ["LOG"], "a") as log:
    print("ray", *sys.argv[1:], file=log)
if "FAILS" in os.environ:
    sys.exit("no ports")
options = dict(word.split("=", 1) for word in sys.argv if "=" in word)
if "--head" in sys.argv:
    ports = [int(options[name]) for name in ("--port", "--ray-client-server-port", "--dashboard-port")]
    servers = [socket.create_server(("", port)) for port in ports]
signal.pause()
"""
RAY_MODULE = """
tried = []
def init(**options):
    tried.append(options)
    if len(tried) < 2:
        raise ConnectionError("no node info found")
def nodes(): return [{"Alive": True}] * 2
"""
"""The port of Ray is open before its first node is there."""
RAYFL = """#!/usr/bin/env python3
import os, signal, stat, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
token = os.stat(os.environ["RAY_AUTH_TOKEN_PATH"])
there = os.path.isdir(os.environ["RAY_TMPDIR"])
print("rayfl", *sys.argv[1:], oct(token.st_mode)[-3:], token.st_size, there, flush=True)
open(sys.argv[-1].partition("=")[2], "w").close()
while True:
    signal.pause()
"""


class Job:
    """A job whose SLURM, Ray and run are stand-ins; bash, Python and the ports are real."""

    def __init__(self, folder: Path, number: int, options: dict[str, object], **environment: str) -> None:
        self.number, self.log, self.shared = number, folder / f"log-{number}", folder / "all"
        self.started = folder / f"started-{number}"
        programs = {"srun": SRUN, "ray": RAY, "rayfl": RAYFL, "getent": GETENT, "scontrol": "#!/bin/sh\necho a\n"}
        for name, content in programs.items():
            if not (folder / name).exists():  # another job of the folder may be running it
                (folder / name).write_text(content)
                (folder / name).chmod(0o755)
        (folder / "modules").mkdir(exist_ok=True)
        (folder / "modules" / "ray.py").write_text(RAY_MODULE)
        script = folder / f"run-{number}.sh"
        chosen = template_options({"shared_volume": str(self.shared), **options})
        script.write_text(render("slurm", chosen, ["name=x", f"storage_path={self.started}"]))
        self.process = subprocess.Popen(
            ["bash", str(script)],
            env={
                "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(folder / "modules"),
                "LOG": str(self.log),
                "SLURM_JOB_ID": str(number),
                "SLURM_JOB_NODELIST": "a",
                "SLURM_JOB_NUM_NODES": "1",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_the_run(self) -> None:
        """Returns when the run has begun."""
        while not self.started.exists():
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)

    @property
    def ports(self) -> list[int]:
        """Those of this job's Ray: of the head, its clients and the dashboard."""
        line = next(line for line in self.log.read_text().splitlines() if line.startswith("ray start"))
        return [int(port) for port in re.findall(r"port=(\d{5})", line)]

    @property
    def left(self) -> list[Path]:
        """Files of the job outside its results."""
        return [path for path in (self.shared / ".ray-tokens" / str(self.number), self.folder) if path.exists()]

    @property
    def folder(self) -> Path:
        """Of this job's Ray, on each node."""
        return Path(f"/tmp/rayfl-{self.number}")


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs, which end with the test."""
    begun: list[Job] = []
    yield begun
    for job in begun:
        job.process.send_signal(signal.SIGTERM)
        job.process.communicate(timeout=60)


def test_the_run_gets_its_signal_and_nothing_is_left_behind(tmp_path: Path, jobs: list[Job]) -> None:
    given = {"SLURM_CPUS_PER_TASK": "24", "SLURM_MEM_PER_NODE": "1000", "SLURM_GPUS_ON_NODE": "2"}
    jobs.append(job := Job(tmp_path, 123456789, {}, **given))
    job.wait_for_the_run()
    assert len(job.left) == 2
    job.process.terminate()
    output, errors = job.process.communicate(timeout=60)
    assert job.process.returncode == 143, errors
    # The token is for its owner only, 64 characters; Ray's folder was there.
    assert output == f"rayfl run name=x storage_path={job.started} 600 64 True\n"
    log = job.log.read_text()
    assert "--num-cpus=23 --num-gpus=2 --object-store-memory=314572800 --min-worker-port=0 --max-worker-port=0 " in log
    assert re.search(
        r"^srun --overlap --cpus-per-task=24 --nodes=1 --ntasks=1 --nodelist=a ray start ", log, re.MULTILINE
    )
    # Of three ports none is the system's to give away, and the job's number says where to look first.
    first = 20000 + 123456789 % 4000 * 3
    assert job.ports == [first, first + 1, first + 2]
    assert job.left == []


def test_two_jobs_on_one_node_do_not_meet(tmp_path: Path, jobs: list[Job]) -> None:
    """Also if they begin to look for ports at the same place; the end of one leaves the other alone."""
    jobs += [Job(tmp_path, 700, {}), Job(tmp_path, 4700, {})]
    first, second = jobs
    for job in jobs:
        job.wait_for_the_run()
    assert len({*first.ports, *second.ports}) == 6
    assert not {*first.left} & {*second.left}
    first.process.terminate()
    first.process.communicate(timeout=60)
    assert first.left == [] and len(second.left) == 2 and second.process.poll() is None
    with socket.create_connection(("127.0.0.1", second.ports[0]), timeout=5):
        pass


def test_other_nodes_join_the_first(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(tmp_path, 42, {"nodes": 2}, SLURM_JOB_NUM_NODES="2", SLURM_MEM_PER_NODE="0"))
    job.wait_for_the_run()
    log = job.log.read_text()
    joined = (
        "srun --overlap --cpus-per-task=8 --nodes=1 --ntasks=1 --exclude=a ray start --block --num-cpus=7 --num-gpus=0 "
    )
    [line] = [line for line in log.splitlines() if line.startswith(joined)]
    assert line.endswith(f" --address=0.0.0.0:{job.ports[0]}")
    # A job that has all memory of its nodes leaves it to Ray how much objects may take.
    assert "--object-store-memory" not in log


@pytest.mark.parametrize(("cpus", "given"), [(9, 8), *(pytest.param(n, n, marks=pytest.mark.slow) for n in (8, 4))])
def test_no_gpu_is_idle_for_want_of_a_cpu(cpus: int, given: int, tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := Job(tmp_path, 43, {}, SLURM_CPUS_PER_TASK=str(cpus), SLURM_GPUS_ON_NODE="8"))
    job.wait_for_the_run()
    assert f"--num-cpus={given} --num-gpus=8 " in job.log.read_text()


def test_a_ray_that_does_not_start_is_said(tmp_path: Path) -> None:
    job = Job(tmp_path, 43, {}, FAILS="1")
    _, errors = job.process.communicate(timeout=60)
    assert job.process.returncode == 1
    assert "no ports" in errors and "Ray has not started on a" in errors
    assert job.left == [] and not job.started.exists()
