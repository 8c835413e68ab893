"""Hosts with a network of their own on this machine: one network namespace each, and a cable between the two."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

RAY = str(Path(sys.executable).parent / "ray")
_START_S = 180
_END_S = 20


class NoNamespacesError(Exception):
    """This machine has no ``ip``, or does not let this user make namespaces."""


@dataclass(frozen=True)
class Host:
    """A network namespace.

    Attributes:
        namespace: its name.
        link: its end of the cable.
        address: its IPv4 address.
        folder: for Ray's temporary files.
    """

    namespace: str
    link: str
    address: str
    folder: Path

    @property
    def within(self) -> list[str]:
        """What to write before a command, for it to run on this host."""
        return ["ip", "netns", "exec", self.namespace]

    def set_link(self, state: str) -> None:
        """Plugs the cable in (``up``) or pulls it out (``down``)."""
        _ip("-n", self.namespace, "link", "set", self.link, state)

    def start_ray(self, *options: str) -> None:
        """Starts a node of Ray, with these options of ``ray start``."""
        own = [f"--node-ip-address={self.address}", f"--temp-dir={self.folder}", "--object-store-memory=100000000"]
        output = self.folder / "start.txt"
        with output.open("w") as file:
            done = subprocess.run(
                [*self.within, RAY, "start", *own, "--disable-usage-stats", *options],
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=_START_S,
                check=False,
            )
        assert done.returncode == 0, output.read_text()

    def pids(self) -> list[int]:
        """The processes on this host."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other and nobody else; all their processes end with the block.

    Raises:
        NoNamespacesError: where that is not possible.
    """
    folder = Path(tempfile.mkdtemp(prefix="rf-", dir="/tmp"))  # short: Ray's sockets are in there
    # Names of links have 15 characters at most.
    hosts = [Host(f"rayfl-{os.getpid()}-{i}", f"rf{os.getpid()}-{i}", f"10.231.0.{i}", folder / str(i)) for i in (1, 2)]
    made: list[Host] = []
    try:
        try:
            for host in hosts:
                host.folder.mkdir()
                _ip("netns", "add", host.namespace)
                made.append(host)
            _connect(*hosts)
        except (OSError, subprocess.CalledProcessError) as error:
            raise NoNamespacesError((getattr(error, "stderr", "") or str(error)).strip()) from error
        yield hosts[0], hosts[1]
    finally:
        for host in made:
            _end_all(host)
            _ip("netns", "delete", host.namespace)  # and its link with it
        shutil.rmtree(folder, ignore_errors=True)


def _connect(left: Host, right: Host) -> None:
    _ip("link", "add", left.link, "netns", left.namespace, "type", "veth", "peer", right.link, "netns", right.namespace)
    for host in (left, right):
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.link)
        _ip("-n", host.namespace, "link", "set", "lo", "up")
        host.set_link("up")


def _end_all(host: Host) -> None:
    """Nothing but what was started on this host is in its namespace."""
    ends = time.monotonic() + _END_S
    while (pids := host.pids()) and time.monotonic() < ends:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=True).stdout
