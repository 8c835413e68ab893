"""Which host runs which clients: longest processing time first, preferring the host that holds the state."""

from __future__ import annotations

from collections.abc import Mapping

_SLACK = 1.1


def assign(costs: Mapping[int, float], hosts: int, home: Mapping[int, int]) -> list[list[int]]:
    """Splits clients over hosts.

    Args:
        costs: expected work by client (samples x epochs).
        hosts: number of hosts.
        home: the host that holds a client's state, for those that have one.

    Returns:
        Client ids by host. A client stays at home unless that makes its host a tenth busier than the mean.
    """
    shares: list[list[int]] = [[] for _ in range(hosts)]
    load = [0.0] * hosts
    fair = _SLACK * sum(costs.values()) / hosts
    for client in sorted(costs, key=lambda client: (-costs[client], client)):
        lightest = min(range(hosts), key=lambda host: (load[host], host))
        host = home.get(client, lightest)
        if load[host] + costs[client] > max(fair, load[lightest] + costs[client]):
            host = lightest
        shares[host].append(client)
        load[host] += costs[client]
    return shares
