"""The test's side of ``many_nodes_run.py``: starts it, waits for what it says, lets it go on, ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

ROOT = Path(__file__).parents[2]
SCRIPT = "tests/support/many_nodes_run.py"
PATIENCE_S = 200


@contextmanager
def logical_gpus() -> Iterator[None]:
    """Nodes that are started in the body may have GPUs for Ray; tests hide those of the machine from everybody."""
    with mock.patch.dict(os.environ):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        yield


class Running:
    """A run in a process of its own.

    Args:
        folder: of the run and the messages.
        address: of the cluster.
        config: of the run.
        gpus: see ``many_nodes_run.py``.
        within: command that the run's own is appended to.
    """

    def __init__(
        self, folder: Path, address: str, config: dict[str, Any], gpus: str = "none", within: Sequence[str] = ()
    ) -> None:
        self.log = folder / config["name"] / "rayfl.log"
        self._messages = folder / f"messages-{config['name']}"
        self._messages.mkdir()
        self._rounds = config["train"]["rounds"]
        file = folder / f"{config['name']}.yaml"
        file.write_text(yaml.safe_dump(config))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": address}
        self.process = subprocess.Popen(
            [*within, sys.executable, SCRIPT, str(file), str(self._messages), gpus],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def has_said(self, name: str) -> bool:
        """Whether the run has come to this point."""
        return (self._messages / name).exists()

    def wait_for(self, name: str) -> Any:
        """What the run says at this point."""
        ends = time.monotonic() + PATIENCE_S
        while not self.has_said(name):
            assert self.process.poll() is None, self.process.stdout and self.process.stdout.read()
            assert time.monotonic() < ends, f"no {name} within {PATIENCE_S} s"
            time.sleep(0.05)
        return json.loads((self._messages / name).read_text())

    def go(self, round: int, actors: int = 0) -> None:
        """Lets the run go on after a round, as soon as it has a number of actors."""
        new = self._messages / "new"
        new.write_text(str(actors))
        new.rename(self._messages / f"go-{round}")

    def finish(self) -> None:
        """Lets the run go on to its end."""
        for round in range(1, self._rounds + 1):
            if not (self._messages / f"go-{round}").exists():
                self.go(round)
        output, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, output

    def end(self) -> None:
        """Ends the process, if it is still there: a test that fails leaves none behind."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def long_rounds(config: dict[str, Any], local_epochs: int = 800) -> dict[str, Any]:
    """Rounds of seconds: a node that goes after one is missed in the next."""
    return config | {"train": config["train"] | {"local_epochs": local_epochs}}
