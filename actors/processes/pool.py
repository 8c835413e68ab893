"""Hosts behind one interface: in this process (for tests and debugging) or as Ray actors."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, Protocol

from actors.hosting.host import ClientHost
from rayfl.errors import DeviceLostError
from rayfl.params import Tree


class HostDiedError(Exception):
    """A host's process, node or network connection is lost, with its states since the last commit.

    Attributes:
        host: position of the host.
        reason: how it ended.
        clients: clients that may be the cause: those that ran if it reported them, else all without a result yet.
        hung: whether its process lived, but did not finish in time.
        certain: whether the host itself reported that these clients ran.
        suspicious: whether clients' code may be the cause; False if a node or an answer was lost.
        printed: lines that clients had printed, if they could still be read.
        investigated: whether the round is repeated to find the client that is the cause.
    """

    def __init__(
        self,
        host: int,
        reason: str,
        clients: tuple[int, ...] = (),
        hung: bool = False,
        certain: bool = False,
        suspicious: bool = False,
        printed: tuple[str, ...] = (),
    ) -> None:
        super().__init__(f"host {host} died: {reason}")
        self.host = host
        self.reason = reason
        self.clients = clients
        self.hung = hung
        self.certain = certain
        self.suspicious = suspicious
        self.printed = printed
        self.investigated = False


class HostPool(Protocol):
    """The hosts of a federation, in this process or in actors."""

    @property
    def size(self) -> int:
        """Number of hosts."""
        ...

    def put(self, tree: Tree) -> Any:
        """Makes a tree available to all hosts; returns the argument to pass for it."""
        ...

    def submit(self, host: int, method: str, *args: Any) -> Any:
        """Starts a method of a host; returns a handle for :meth:`collect` and for other hosts' arguments."""
        ...

    @property
    def home(self) -> str | None:
        """The machine of this process."""
        ...

    def machine(self, host: int) -> str | None:
        """Returns the machine of a host; None if its results are in this process's memory anyway."""
        ...

    def submit_apart(self, host: int, method: str, *args: Any) -> tuple[Any, Any]:
        """Starts a method with two results.

        Returns:
            A handle of the first, for :meth:`collect`, and one of the second, which stays on its machine: an argument
            for other hosts' methods, or for :meth:`fetch` once the first result is there.
        """
        ...

    def fetch(self, host: int, handle: Any) -> Any:
        """Returns the second result of a host's method.

        Raises:
            HostDiedError: when it is gone.
        """
        ...

    def collect(
        self, handles: MutableMapping[Any, int], deadline_s: float | None = None, of_clients: bool = False
    ) -> Iterator[tuple[int, Any]]:
        """Yields (host, result) as results arrive.

        Args:
            handles: handles and the hosts they belong to. Each is taken out with its result, which may free memory;
                those that are added between two results are waited for, too.
            deadline_s: seconds after which a host without a new result is ended and counts as dead; None: no limit.
            of_clients: whether hosts run clients' procedures: the time then restarts with every client.

        Raises:
            HostDiedError: when a host is dead.
        """
        ...

    def revive(self) -> list[int]:
        """Replaces dead hosts by new, empty ones, as far as there is room; returns their positions.

        Hosts get new numbers: living ones come first. They give up the jobs that they run, until their rewind.
        """
        ...

    def grow(self) -> list[int]:
        """Adds hosts if the cluster has grown, without waiting for them; returns the positions of new ones."""
        ...

    def close(self) -> None:
        """Ends the hosts."""
        ...


class InlinePool:
    """Hosts in this process, called one after the other.

    Args:
        hosts: the hosts.
    """

    def __init__(self, hosts: list[ClientHost]) -> None:
        self.hosts = hosts

    @property
    def size(self) -> int:
        return len(self.hosts)

    def put(self, tree: Tree) -> Any:
        return tree

    def submit(self, host: int, method: str, *args: Any) -> Any:
        given = [arg.value if isinstance(arg, _Done) else arg for arg in args]
        try:
            return _Done(getattr(self.hosts[host], method)(*given))
        except DeviceLostError as error:
            raise DeviceLostError(f"{error}; run the same command to continue from the last commit") from error

    @property
    def home(self) -> str | None:
        return None

    def machine(self, host: int) -> str | None:
        return None

    def submit_apart(self, host: int, method: str, *args: Any) -> tuple[Any, Any]:
        first, second = self.submit(host, method, *args).value
        return _Done(first), _Done(second)

    def fetch(self, host: int, handle: Any) -> Any:
        return handle.value

    def collect(
        self, handles: MutableMapping[Any, int], deadline_s: float | None = None, of_clients: bool = False
    ) -> Iterator[tuple[int, Any]]:
        while handles:
            handle = next(iter(handles))
            yield handles.pop(handle), handle.value

    def revive(self) -> list[int]:
        return []

    def grow(self) -> list[int]:
        return []

    def close(self) -> None:
        self.hosts.clear()


class _Done:
    """A finished call's result."""

    def __init__(self, value: Any) -> None:
        self.value = value
