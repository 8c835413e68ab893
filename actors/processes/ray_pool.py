"""Hosts as Ray actors: started, replaced when they die, more when nodes join, fewer when nodes leave."""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group

from actors.processes import placement
from actors.processes.client_actor import RemoteClientActor, host_name
from actors.processes.gpu_bundles import GpuBundles
from actors.processes.gpus import ActorGpu, check_gpus, own_gpu
from actors.processes.placement import ActorOptions, Node, free_nodes, most_together, room, whole_nodes
from actors.processes.pool import HostDiedError
from actors.processes.ray_host import RayHost, abandon_work
from actors.processes.transport import Sender
from actors.processes.versions import check_releases, warn_of_builds
from actors.processes.waiting import collected
from actors.processes.working_folder import working_folder
from rayfl.errors import RayflError, ResourceError
from rayfl.params import Tree

_log = logging.getLogger("rayfl")
_ASK_EVERY_S = 1.0
_LOOK_EVERY_S = 2.0


class RayPool:
    """Hosts as Ray actors.

    Args:
        config: the configuration as plain data.
        options: number of actors and their resources.
        run: name of the run. Its actors are ``rayfl-host-00``, ... in a namespace of their own, so that several runs
            can use a cluster. The replacement of a dead one is ``rayfl-host-00-life-2``.
        admit: called before actors are started on nodes that have joined; returns False as long as it is not known
            whether these can be used, and raises a ``RayflError`` if they cannot.
        content: SHA-256 of the samples; None where it is not known.

    Raises:
        ResourceError: when too few actors start in time, or not on the GPUs reserved for them, with other releases than
            the driver's, or they end meanwhile.
    """

    def __init__(
        self,
        config: dict[str, Any],
        options: ActorOptions,
        run: str,
        admit: Callable[[], bool] = lambda: True,
        content: str | None = None,
    ) -> None:
        self._config, self._content = config, content
        self._options = options
        self._admit = admit
        self.namespace = f"rayfl-{run}-{uuid.uuid4().hex[:8]}"
        self._sender = Sender(options.shared_memory)
        self._lives: Counter[int] = Counter()
        self._numbers = itertools.count()
        # Inside a given placement group (an experiment of a sweep) the actors stay in it.
        self._given = get_current_placement_group() is not None
        self._bundles = GpuBundles(options) if options.per_gpu and not self._given else None
        self._hosts: list[RayHost] = []
        self._joining: list[RayHost] = []
        self._joining_since = self._looked_at = time.monotonic()
        self._unfit, self._unfit_until = frozenset[str](), 0.0
        try:
            self._start([next(self._numbers) for _ in range(options.count)], self._hosts)
            self._await(list(self._hosts), options.begins_with or options.count, options.timeout_s)
        except HostDiedError as death:
            self.close()
            raise ResourceError(
                f"an actor ended while it started ({death.reason}): its node may have left the cluster or be short of "
                "memory, or code that the configuration names ends its process; the same command tries again"
            ) from None
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return len(self._hosts)

    @property
    def descriptions(self) -> list[dict[str, Any]]:
        """Descriptions of the hosts."""
        return [host.description for host in self._hosts]

    def put(self, tree: Tree) -> Any:
        return self._sender.put(tree)

    def submit(self, host: int, method: str, *args: Any) -> Any:
        return self._hosts[host].submit(method, *args)

    @property
    def home(self) -> str | None:
        return str(ray.get_runtime_context().get_node_id())

    def machine(self, host: int) -> str | None:
        return str(self._hosts[host].description["node_id"])

    def submit_apart(self, host: int, method: str, *args: Any) -> tuple[Any, Any]:
        return self._hosts[host].submit_apart(method, *args)

    def fetch(self, host: int, handle: Any) -> Any:
        return self._hosts[host].result(handle, host)

    def collect(
        self, handles: MutableMapping[Any, int], deadline_s: float | None = None, of_clients: bool = False
    ) -> Iterator[tuple[int, Any]]:
        return collected(self._hosts, handles, deadline_s, of_clients)

    def revive(self) -> list[int]:
        # What living ones still run is read by nobody, and a rewind would wait for its end.
        # A hanging actor counts as dead, and must not continue later and write. So does one of which nothing is known,
        # because another one ended while it started.
        living = [host for host in abandon_work(self._hosts) if host.description]
        dead = [host for host in self._hosts if host not in living]
        for host in dead:
            self._end(host)
        self._hosts = living
        for host in self._hosts:
            host.forget()
        before = len(self._hosts)
        self._start([host.number for host in dead], self._hosts)
        timeout_s = max(self._options.timeout_s, self._options.nodes_timeout_s)
        self._await(self._hosts[before:], self._options.at_least, timeout_s)
        return list(range(before, len(self._hosts)))

    def grow(self) -> list[int]:
        now = time.monotonic()
        if self._joining:
            return self._take_in(now)
        if now - self._looked_at < _LOOK_EVERY_S or self._given or self.size >= self._options.at_most:
            return []
        self._looked_at = now
        nodes = frozenset(node.id for node in whole_nodes(self._options.labels))
        more = min(self._room(free_nodes(self._options.labels)), self._options.at_most - self.size)
        if more < 1 or (nodes == self._unfit and now < self._unfit_until):
            return []
        try:
            if not self._admit():
                return []
        except RayflError as error:
            _log.warning("nodes that have joined are not used: %s", error)
            self._stop_growing(now)
            return []
        self._joining_since = now
        self._start([next(self._numbers) for _ in range(more)], self._joining)
        return []

    def _take_in(self, now: float) -> list[int]:
        """Adds the hosts that have started, once all of them have or the time is over."""
        late = ray.wait([host.started for host in self._joining], num_returns=len(self._joining), timeout=0)[1]
        if late and now - self._joining_since < self._options.timeout_s:
            return []
        joined = [host for host in self._joining if host.started not in late]
        failed = [host for host in self._joining if host.started in late]
        reason = f"not started within {self._options.timeout_s:g} s"
        for host in list(joined):
            try:
                host.finish_start(host.number, self._sender)
                check_releases([host.description])
                self._check([*self._hosts, *(other for other in joined if other.description)])
            except (HostDiedError, ResourceError) as error:
                joined.remove(host)
                failed.append(host)
                reason = str(error)
        self._joining = []
        if failed:
            _log.warning("%d actors could not join the run: %s", len(failed), reason)
            self._stop_growing(now)
            for host in failed:
                self._end(host)
        warn_of_builds(host.description for host in joined)
        first = self.size
        self._hosts += joined
        if joined:
            _log.info("%d actors joined the run, %d now: there is room for them", len(joined), self.size)
        return list(range(first, self.size))

    def _stop_growing(self, now: float) -> None:
        """Starts no more actors on the present nodes for as long as actors may take to start."""
        self._unfit = frozenset(node.id for node in whole_nodes(self._options.labels))
        self._unfit_until = now + self._options.timeout_s

    def close(self) -> None:
        for host in [*self._hosts, *self._joining]:
            ray.kill(host.actor)
        self._hosts, self._joining = [], []
        self._sender.close()
        if self._bundles is not None:
            self._bundles.close()

    def _room(self, nodes: Sequence[Node]) -> int:
        return room(nodes, self._options.num_cpus, self._options.per_gpu, self._options.at_most)

    def _start(self, numbers: Sequence[int], hosts: list[RayHost]) -> None:
        """Starts actors, and adds them to ``hosts``; does not wait for them."""
        options = self._options
        if self._bundles is not None:
            self._bundles.reserve(len(numbers))
        count = self.size + len(numbers)
        neighbours = most_together(whole_nodes(options.labels), options.num_cpus, options.per_gpu, count)
        for number in numbers:
            self._lives[number] += 1
            life = f"-life-{self._lives[number]}" if self._lives[number] > 1 else ""
            actor = RemoteClientActor.options(
                name=host_name(number) + life,
                namespace=self.namespace,
                num_cpus=options.num_cpus,
                num_gpus=options.num_gpus,
                **self._seat(number),
            ).remote(self._config, number, options.device, neighbours, own_gpu, working_folder(), self._content)
            hosts.append(RayHost(number, actor))

    def _seat(self, number: int) -> dict[str, Any]:
        """Ray's options for the place of an actor."""
        if self._bundles is not None:
            return self._bundles.assign(number)
        labels = {} if self._given else dict(self._options.labels)
        return {"label_selector": labels} if labels else {}  # older Rays do not know the option

    def _await(self, new: Sequence[RayHost], at_least: int, timeout_s: float) -> None:
        """Waits for new hosts, except for those that do not fit, because nodes have left or others use them.

        Args:
            new: hosts that were started.
            at_least: minimum number of hosts of the run.
            timeout_s: seconds in which they must start.
        """
        waiting, given_up = list(new), list[RayHost]()
        ends = time.monotonic() + timeout_s
        while waiting:
            timeout = min(max(ends - time.monotonic(), 0.0), _ASK_EVERY_S)
            late = ray.wait([host.started for host in waiting], num_returns=len(waiting), timeout=timeout)[1]
            waiting = [host for host in waiting if host.started in late]
            if not waiting:
                break
            placement.check_own_node()
            too_many = self.size - max(self._room(whole_nodes(self._options.labels)), at_least)
            if time.monotonic() >= ends:
                if self.size - len(waiting) < at_least:
                    raise ResourceError(self._too_late(len(waiting), len(new), timeout_s))
                too_many = len(waiting)
            for _ in range(min(too_many, len(waiting))):
                host = waiting.pop()
                given_up.append(host)
                self._hosts.remove(host)
                self._end(host)
        if given_up:
            asked = self.size + len(given_up)
            _log.warning("goes on with %d actors instead of %d: the others found no room in time", self.size, asked)
        started = [host for host in self._hosts if host in new]
        for host in started:
            host.finish_start(self._hosts.index(host), self._sender)
        check_releases(host.description for host in started)
        warn_of_builds(host.description for host in started)
        self._check(self._hosts)

    def _check(self, hosts: Sequence[RayHost]) -> None:
        if not self._options.per_gpu:
            return
        bundles = self._bundles
        seated = [
            ActorGpu(host_name(host.number), bundles.of(host.number) if bundles else None, host.description["gpu"])
            for host in hosts
        ]
        check_gpus(seated, self._options.per_gpu)

    def _end(self, host: RayHost) -> None:
        ray.kill(host.actor)
        if self._bundles is not None:
            self._bundles.release(host.number)

    def _too_late(self, count: int, asked: int, timeout_s: float) -> str:
        options = self._options
        return (
            f"{count} of {asked} actors did not start within {timeout_s:g} s: each needs "
            f"{options.num_cpus:g} CPUs and {options.num_gpus:g} GPUs, {count * options.num_cpus:g} CPUs and "
            f"{count * options.num_gpus:g} GPUs together, the cluster has {placement.free_in_words()} free (others may "
            "hold the rest, or these actors, where their processes have only begun: `ray "
            f"status`){placement.busy_in_words()}; lower "
            "cluster.num_actors or cluster.cpus_per_actor, or raise cluster.startup_timeout_s and wait"
        )
