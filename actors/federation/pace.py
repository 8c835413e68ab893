"""Estimates clients' times from measured ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from math import exp, log

_HOST, _CLIENT = 0.3, 0.5
"""Weights of a new measurement in the moving averages of logarithms: for a host's whole share, and for one client."""

_HOSTS_ALIKE, _CLIENTS_ALIKE = 1.25, 1.3
"""Factors by which hosts may differ from their mean, and clients from what their costs say, and still count as alike.

With 1.1 for hosts, chance alone moved clients between equal hosts: 5 to 8 % of the time."""


class Pace:
    """Seconds of procedures, as the product of a client's work and a host's slowness.

    Only ratios matter. A client's work is its measured time; before the first measurement, its cost times the average
    rate. A host's first share of each procedure is not counted: it includes warm-up, such as memory allocation and
    kernel selection.
    """

    def __init__(self) -> None:
        self._slowness: dict[int, float] = {}
        self._rate: dict[str, float] = {}
        self._work: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._begun: set[tuple[str, int]] = set()

    def work(self, procedure: str, costs: Mapping[int, float]) -> dict[int, float]:
        """Returns the time that each client is expected to take on a host of slowness 1.

        Args:
            procedure: the algorithm's method that they will run.
            costs: estimates for clients without measurements, up to a common factor.
        """
        rate = self._rate.get(procedure)
        if rate is None:
            return dict(costs)
        known = self._work[procedure]
        return {k: _unless_alike(known.get(k, rate * cost), rate * cost, _CLIENTS_ALIKE) for k, cost in costs.items()}

    def slowness(self, hosts: int) -> list[float]:
        """Returns each host's slowness; 1 if unknown."""
        return [_unless_alike(self._slowness.get(host, 1.0), 1.0, _HOSTS_ALIKE) for host in range(hosts)]

    def observe(self, procedure: str, host: int, costs: Mapping[int, float], seconds: Mapping[int, float]) -> None:
        """Records the times of a host's share.

        Args:
            procedure: the procedure.
            host: the host that ran it.
            costs: as given to :meth:`work`, for these clients at least.
            seconds: measured times by client.
        """
        if (procedure, host) not in self._begun:
            self._begun.add((procedure, host))
            return
        taken, cost = sum(seconds.values()), sum(costs[client] for client in seconds)
        if taken <= 0 or cost <= 0:
            return
        rate = self._rate.get(procedure)
        if rate is None:
            self._rate[procedure] = rate = taken / self._slowness.get(host, 1.0) / cost
        expected = self.work(procedure, {client: costs[client] for client in seconds})
        # Split the deviation from the expected time between the host's slowness and the clients' work.
        surprise = log(taken / (sum(expected.values()) * self._slowness.get(host, 1.0)))
        self._slowness[host] = self._slowness.get(host, 1.0) * exp(_HOST * surprise)
        self._rescale()
        slowness, known = self._slowness[host], self._work[procedure]
        self._rate[procedure] = rate * exp(_HOST * log(taken / slowness / (rate * cost)))
        for client, second in seconds.items():
            found = max(second / slowness, 1e-9)
            known[client] = exp(_CLIENT * log(found) + (1 - _CLIENT) * log(known[client])) if client in known else found

    def forget_hosts(self) -> None:
        """Resets hosts' slowness, since numbers change when hosts are replaced; keeps the clients' work."""
        self._slowness.clear()
        self._begun.clear()

    def _rescale(self) -> None:
        """Rescales the mean slowness to 1: otherwise slowness and work could drift apart."""
        mean = exp(sum(map(log, self._slowness.values())) / len(self._slowness))
        self._slowness = {host: slowness / mean for host, slowness in self._slowness.items()}


def _unless_alike(found: float, usual: float, factor: float) -> float:
    """Returns the found value, or the usual one if both are within a factor, so that noise does not matter."""
    return usual if usual / factor < found < usual * factor else found
