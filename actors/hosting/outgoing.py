"""What becomes of a procedure's result before it is sent: private layers stay, messages are clipped or compressed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from actors.hosting.equipment import Equipment
from actors.hosting.job import Job
from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.privacy import limited, noised, reference_of
from rayfl.diagnosis.device_errors import ran_out_of_memory
from rayfl.engine.client import Client
from rayfl.engine.gradients.counted_normals import keyed_normals
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
        self._residuals = {id: client.state.get(RESIDUAL) for id, client in clients.items()}

    def sent(self, client: Client, outcome: Any) -> Any:
        """Returns what a client sends of a procedure's result, or the error for which it cannot.

        Args:
            client: its state receives what is kept.
            outcome: the result, or the exception that the procedure raised.
        """
        try:
            return self._compressed(client, self._limited(client, self._kept_private(client, outcome)))
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            return error  # of fewer clients at a time the messages may fit

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
        if not isinstance(compressor, Compressor) or not self._is_message(outcome):
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

    def _limited(self, client: Client, outcome: Any) -> Any:
        """Clips a message (``privacy.clip_norm``), and adds the client's noise (``privacy.noise_at``)."""
        if self._bound is None or not self._is_message(outcome):
            return outcome
        try:
            found = limited(outcome, self._common, self._bound)
        except ValueError as error:
            return MethodError(f"privacy: {self._job.procedure} {error}")
        privacy, seed = client.context.privacy, client.context.streams.integer
        if not privacy.local:
            return found
        key = seed("privacy.local", self._job.round, client.id)

        def draw(count: int, device: torch.device) -> torch.Tensor:
            return keyed_normals(torch.tensor(key, device=device), count, torch.float64)

        return replace(found, tree=noised(found.tree, privacy.noise_multiplier * self._bound, draw))

    def _is_message(self, outcome: Any) -> bool:
        return self._job.kind in ("mean", "each") and isinstance(outcome, Weighted)
