"""A run as a job on a real head of this machine, with dashboard and token, from the command line."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import requests
import yaml

from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from tests.support.experiments import small_experiment

pytest.importorskip("aiohttp", reason="jobs need ray[default]")
pytestmark = pytest.mark.slow

ROUNDS = 700
"""So many that a command that stops the run comes in time on a busy machine."""


@dataclass(frozen=True)
class Head:
    """A Ray head of this machine.

    Attributes:
        url: of the dashboard.
        environment: of a client that may use it.
    """

    url: str
    environment: dict[str, str]

    def rayfl(self, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """Runs a command of rayfl's."""
        return subprocess.run(
            [sys.executable, "-m", "rayfl", *arguments, "--address", self.url],
            env=self.environment | changes,
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(server.getsockname()[1]) for server in sockets]
    for server in sockets:
        server.close()
    return ports


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with started(Path(sys.executable)) as found:
        yield found


@contextmanager
def started(python: Path) -> Iterator[Head]:
    """A head that this Python runs, until the block ends."""
    folder = Path(tempfile.mkdtemp(prefix="rayfl-", dir="/tmp"))  # short: Ray's sockets are in there
    gcs, dashboard, client, agent = free_ports(4)
    token = secrets.token_hex(32)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # stays on the loopback interface
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [
            str(python),
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--block",
            "--node-ip-address=127.0.0.1",
            f"--port={gcs}",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={client}",
            f"--dashboard-agent-listen-port={agent}",  # with 0, Ray 2.52 asks for the logs of jobs at another port
            f"--temp-dir={folder}",
            "--num-cpus=2",
            "--disable-usage-stats",
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{dashboard}"
    try:
        deadline = time.monotonic() + 120
        while not answers(url, token):
            assert process.poll() is None and time.monotonic() < deadline, "the head does not start"
            time.sleep(0.5)
        yield Head(url, environment)
    finally:
        for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            if one.is_running():
                one.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def answers(url: str, token: str) -> bool:
    try:
        return requests.get(f"{url}/api/version", headers={"Authorization": f"Bearer {token}"}, timeout=5).ok
    except requests.RequestException:
        return False


def test_a_token_is_required(head: Head) -> None:
    for wrong in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": secrets.token_hex(32)}):
        refused = head.rayfl("status", **wrong)
        assert refused.returncode == 2
        assert "RAY_AUTH_TOKEN" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.timeout(600)
def test_submit_stop_and_submit_again(head: Head, tmp_path: Path) -> None:
    content = small_experiment(tmp_path, "tiny", "scaffold", num_actors=1)
    content["train"] |= {"rounds": ROUNDS, "local_epochs": 40}
    # Without the signal there would be no commit before the end.
    content |= {"storage": {"commit_every": ROUNDS}, "evaluation": {"every": 5}}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))

    first = head.rayfl("submit", str(config))
    assert first.returncode == 0, first.stderr
    assert "job tiny submitted" in first.stdout
    assert "under way already" in head.rayfl("submit", str(config)).stdout
    log = tmp_path / "tiny" / "rayfl.log"
    deadline = time.monotonic() + 120
    while not (log.exists() and "round 5:" in log.read_text()):
        assert time.monotonic() < deadline, head.rayfl("logs", "tiny").stdout
        time.sleep(0.2)
    stopped = head.rayfl("stop", "tiny")
    assert stopped.returncode == 0, stopped.stderr
    printed = head.rayfl("logs", "tiny").stdout
    assert "tiny starts: scaffold on digits" in printed  # plain lines, no terminal
    assert "SIGTERM: stops after this round" in printed and "Traceback" not in printed
    assert "*** SIGTERM" not in printed
    assert "namespace rayfl-tiny-" in log.read_text()
    assert head.rayfl("status", "tiny").returncode == 143
    manifest = CommitStore(Storage(str(tmp_path / "tiny"))).latest()
    assert manifest is not None and 5 <= manifest.rounds_completed < ROUNDS

    again = head.rayfl("submit", str(config), "--wait")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "job tiny.attempt-2 submitted" in again.stdout
    assert f"continues after round {manifest.rounds_completed}" in again.stdout
    assert f"Test data after round {ROUNDS}" in again.stdout


def test_the_exit_status_is_the_runs(head: Head, tmp_path: Path) -> None:
    content = small_experiment(tmp_path, "wrong", "fedavg", num_actors=9)
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    failed = head.rayfl("submit", str(config), "--wait")
    assert failed.returncode == 2
    assert "9 actors with 1 CPUs and 0 GPUs each do not fit" in failed.stdout


METHOD = """
from algorithms.fedavg import FedAvg
from needed_by_a_method import NAME


class Needing(FedAvg):
    name: str = NAME
"""


def wheel_of(module: str, text: str, folder: Path) -> Path:
    """A wheel of one module, with no dependencies."""
    info, file = f"{module}-1.0.dist-info", folder / f"{module}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{module}.py", text)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return file


@pytest.mark.timeout(600)
def test_packages_that_uv_installs_are_there_for_the_run(tmp_path: Path) -> None:
    """A module of one's own needs a package that the nodes do not have: refused without --uv, run with it."""
    if importlib.util.find_spec("uv") is None:
        pytest.skip("uv is missing: pip install -e '.[dev]'")
    # Ray copies the environment that it runs in, with all packages: a small one stands for this test's.
    venv.create(tmp_path / "env")
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "here.pth").write_text("\n".join(here))
    (tmp_path / "here").mkdir()
    (tmp_path / "own").mkdir()
    text = "NAME = 'needing'\n"
    (tmp_path / "here" / "needed_by_a_method.py").write_text(text)  # the one who submits has it
    (tmp_path / "own" / "needing_method.py").write_text(METHOD)
    wheel = wheel_of("needed_by_a_method", text, tmp_path)
    content = small_experiment(tmp_path, "with-package", "fedavg", num_actors=1)
    content["algorithm"] = "needing_method:Needing"
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    path = os.pathsep.join([str(tmp_path / "here"), str(tmp_path / "own"), str(Path(__file__).parents[3])])
    with started(tmp_path / "env" / "bin" / "python") as head:
        without = head.rayfl("submit", str(config), "--wait", PYTHONPATH=path)
        assert without.returncode == 2, without.stdout + without.stderr
        assert "needed_by_a_method" in without.stdout
        done = head.rayfl("submit", str(config), "--wait", "--uv", str(wheel), PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "job with-package.attempt-2 submitted" in done.stdout
    assert "Test data after round 4" in done.stdout
