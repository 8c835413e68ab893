"""What becomes of a procedure's result before it is sent: private layers stay, messages are clipped or compressed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from actors.hosting.equipment import Equipment
from actors.hosting.job import Job
from rayfl.aggregation.compression import on_device
from rayfl.aggregation.discrete_sums import in_tree
from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.privacy import limited, noised, reference_of
from rayfl.aggregation.secure_sum import summed_bytes
from rayfl.diagnosis.device_errors import ran_out_of_memory
from rayfl.engine.client import Client
from rayfl.engine.gradients.counted_normals import keyed_normals
from rayfl.engine.noised_sum import NoisedSum
from rayfl.engine.transfers import MOVE_BYTES
from rayfl.errors import MethodError
from rayfl.messages.compressors import Compressor
from rayfl.params import Tree, from_leaves, leaves, num_bytes

RESIDUAL = "compression"
"""Where a client's state keeps, by path of a tensor, what the last message with it lacked."""


class Outgoing:
    """Prepares the results of some clients for sending.

    Args:
        own: the host's equipment.
        job: job that the clients run.
        common: what all clients received.
        clients: the clients, before their procedures run.
        bound: the norm that messages are clipped to; None without ``privacy``.
    """

    def __init__(
        self, own: Equipment, job: Job, common: Tree, clients: Mapping[int, Client], bound: float | None
    ) -> None:
        self._own, self._job, self._common, self._bound = own, job, common, bound
        self._clients = clients
        self._noised_sum = NoisedSum.of(own.context, job.round) if own.context.secure_sum else None
        self._residuals = {id: client.state.get(RESIDUAL) for id, client in clients.items()}

    def sent(self, outcomes: Mapping[int, Any]) -> dict[int, Any]:
        """Returns what clients send of a procedure's results, or the errors for which they cannot.

        Args:
            outcomes: by client, the result, or the exception that the procedure raised. Clients' states receive what
                is kept.
        """
        try:
            kept = {id: self._kept_private(self._clients[id], outcome) for id, outcome in outcomes.items()}
            return {id: self._compressed(self._clients[id], found) for id, found in self._limited(kept).items()}
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            return dict.fromkeys(outcomes, error)  # of fewer clients at a time the messages may fit

    def _kept_private(self, client: Client, outcome: Any) -> Any:
        """Moves private tensors (``train.private_norm``) into the client's state."""
        job = self._job
        if not self._own.norm.names or job.kind == "evaluate" or not isinstance(outcome, Weighted | Mapping):
            return outcome
        try:
            if isinstance(outcome, Weighted):
                return replace(outcome, tree=self._own.norm.kept_back(outcome.tree, client.state))
            return self._own.norm.kept_back(outcome, client.state)
        except ValueError as error:
            return MethodError(f"{job.procedure} {error}")

    def _compressed(self, client: Client, outcome: Any) -> Any:
        """Compresses the parameters of a message (``compression``); running statistics are sent as they are."""
        compressor = self._own.context.compression
        if not isinstance(compressor, Compressor) or not self._is_message(outcome) or self._noised_sum is not None:
            return outcome
        try:
            received = reference_of(outcome.tree, self._common)
        except ValueError as error:
            return MethodError(f"compression: {self._job.procedure} {error}")
        if self._own.context.secure_sum and not float(outcome.weight).is_integer():
            return MethodError(
                f"compression=secure_aggregation: {self._job.procedure} returns a weight of {outcome.weight}, and sums "
                "are of integers: return whole numbers"
            )
        found = dict(leaves(outcome.tree))
        paths = [path for path in found if path.rpartition("/")[2] not in self._own.engine.task.network.buffer_names]
        sizes = [found[path].numel() for path in paths]
        if not sum(sizes):
            return outcome
        change = torch.cat([(found[path] - received[path]).detach().flatten() for path in paths])
        lacking = self._lacking(client.id, dict(zip(paths, sizes, strict=True))) if compressor.error_feedback else {}
        if lacking:
            none = change.new_zeros
            own = zip(paths, sizes, strict=True)
            change = change + torch.cat([lacking.get(path, none(size)).flatten() for path, size in own])
        generator = client.context.streams.generator("compression", self._job.round, client.id)
        decoded, size = compressor.encoded(change, sizes, generator)
        if compressor.error_feedback:
            rest = torch.split(change - decoded, sizes)
            shaped = {path: part.view_as(found[path]) for path, part in zip(paths, rest, strict=True)}
            client.state[RESIDUAL] = from_leaves({**lacking, **shaped})
        for path, part in zip(paths, torch.split(decoded, sizes), strict=True):
            found[path] = (received[path] + part.view_as(received[path])).to(received[path].dtype)
        others = num_bytes({path: leaf for path, leaf in found.items() if path not in set(paths)})
        size += others + compressor.beside(self._own.context.cohort_size)
        return replace(outcome, tree=from_leaves(found), size=size, within=compressor.within(change))

    def _lacking(self, client: int, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Returns what a client's earlier messages lacked, by path: a round may send other tensors than the last one.

        Args:
            client: its id.
            sizes: of the tensors that are sent now; one of another size than before has lacked nothing.
        """
        before = self._residuals[client]
        if before is None:
            return {}
        if isinstance(before, torch.Tensor):  # of an older release: the tensors of the last message in a row
            whole = before.numel() == sum(sizes.values())
            return dict(zip(sizes, torch.split(before, list(sizes.values())), strict=True)) if whole else {}
        return {path: leaf for path, leaf in leaves(before) if leaf.numel() == sizes.get(path, leaf.numel())}

    def _limited(self, outcomes: dict[int, Any]) -> dict[int, Any]:
        """Clips messages (``privacy.clip_norm``), and adds clients' noise to them (``privacy.noise_at``).

        Together, because each operation on a GPU takes the host some microseconds.
        """
        if self._bound is None:
            return outcomes
        alike: dict[tuple[str, ...], dict[int, Weighted]] = {}
        for id, outcome in outcomes.items():
            if self._is_message(outcome):
                try:
                    names = tuple(reference_of(outcome.tree, self._common))
                    if outcome.weight != 1:
                        raise ValueError(f"returns a weight of {outcome.weight}: under privacy all weights are 1")
                    alike.setdefault(names, {})[id] = outcome
                except ValueError as error:
                    outcomes[id] = MethodError(f"privacy: {self._job.procedure} {error}")
        for messages in alike.values():
            received = reference_of(next(iter(messages.values())).tree, self._common)
            size = sum(leaf.numel() for leaf in received.values())
            ids_of_all, most = list(messages), max(MOVE_BYTES // (8 * max(size, 1)), 1)
            for first in range(0, len(ids_of_all), most):
                ids = ids_of_all[first : first + most]
                found = limited([messages[id] for id in ids], received, self._bound)
                outcomes |= zip(ids, self._noised(ids, found, self._bound, size), strict=True)
        return outcomes

    def _noised(self, ids: Sequence[int], messages: list[Weighted], bound: float, size: int) -> list[Weighted]:
        privacy, streams = self._own.context.privacy, self._own.context.streams
        if self._noised_sum is not None:
            return self._in_the_sum(self._noised_sum, ids, messages)
        if not privacy.local:
            return messages
        keys = np.array([streams.integer("privacy.local", self._job.round, id) for id in ids])
        noise = keyed_normals(on_device(keys, self._own.engine.device), size, torch.float64)
        trees = noised([message.tree for message in messages], privacy.noise_multiplier * bound, noise)
        return [replace(message, tree=tree) for message, tree in zip(messages, trees, strict=True)]

    def _in_the_sum(self, noised: NoisedSum, ids: Sequence[int], messages: list[Weighted]) -> list[Weighted]:
        """Turns messages into integers with noise (``privacy.mechanism``); trees are what these stand for alone."""
        received = dict(sorted(reference_of(messages[0].tree, self._common).items()))
        trees = [dict(leaves(message.tree)) for message in messages]
        rows = {path: torch.stack([tree[path] for tree in trees]) for path in received}
        changes = [(rows[path].double() - received[path].double()).reshape(len(ids), -1) for path in received]
        integers, within = noised.encoded(torch.cat(changes, 1).detach(), ids)
        sizes = [change.shape[1] for change in changes]
        parts = zip(received, torch.split(noised.alone(integers, sum(sizes)), sizes, dim=1), strict=True)
        alone = {path: (received[path] + part.view_as(rows[path])).to(received[path].dtype) for path, part in parts}
        size = summed_bytes(integers.shape[1], noised.rule.modulus_bits)
        size += noised.rule.beside(self._own.context.cohort_size)
        shapes = {path: leaf.shape for path, leaf in received.items()}
        return [
            replace(
                message,
                tree=from_leaves({path: leaf[place] for path, leaf in alone.items()}),
                size=size,
                within=within[place],
                summand=in_tree(integers[place], shapes),
            )
            for place, message in enumerate(messages)
        ]

    def _is_message(self, outcome: Any) -> bool:
        return self._job.kind in ("mean", "each") and isinstance(outcome, Weighted)
