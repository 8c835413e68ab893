"""Assigns clients to hosts: longest processing time first, preferring the host that holds the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_SLACK = 1.1


def assign(costs: Mapping[int, float], slowness: Sequence[float], home: Mapping[int, int]) -> list[list[int]]:
    """Splits clients over hosts.

    Args:
        costs: expected work by client, positive.
        slowness: time per unit of work on each host, positive; only ratios matter.
        home: the host that holds a client's state, by client.

    Returns:
        Client ids by host. A client stays at home unless its host would then take 10 % longer than a perfect balance,
        and longer than another host.
    """
    hosts = range(len(slowness))
    shares: list[list[int]] = [[] for _ in hosts]
    end = [0.0] * len(hosts)
    fair = _SLACK * sum(costs.values()) / sum(1 / slow for slow in slowness)
    for client in sorted(costs, key=lambda client: (-costs[client], client)):
        ends = [end[host] + costs[client] * slowness[host] for host in hosts]
        first = min(hosts, key=lambda host: (ends[host], host))
        host = home.get(client, first)
        if ends[host] > max(fair, ends[first]):
            host = first
        shares[host].append(client)
        end[host] = ends[host]
    return shares
