"""Moves clients' inputs to the device and their results from it, and makes the errors that name a client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from actors.hosting.failures import too_little_memory
from actors.hosting.job import Job
from algorithms.base import Algorithm
from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.magnitudes import Extremes, NonFiniteError, extremes_of
from rayfl.diagnosis.device_errors import ran_out_of_memory
from rayfl.diagnosis.tracebacks import own_definition, own_frames
from rayfl.engine import transfers
from rayfl.engine.transfers import join, move_trees, start_copy_to_cpu
from rayfl.errors import ClientError, MethodError, text_of
from rayfl.models.pretrained.products import contribution
from rayfl.params import Tree, from_numpy, num_bytes, tensors
from rayfl.tasks.base import Task

_CPU = torch.device("cpu")


Inputs = tuple[dict[int, Tree], dict[int, Tree], dict[int, Tensor]]
"""States and payloads by client, and the payloads' tensors by the ``id`` of their array."""


StatesOnCpu = Callable[[], Iterable[tuple[int, Tree]]]
"""Waits until states are on the CPU, and yields them with their clients: by the next piece, the last may be gone."""


def load_inputs(device: torch.device, job: Job, ids: Sequence[int], state_of: Callable[[int], Tree]) -> Inputs:
    """Returns the states and payloads of some clients on the device, and the payloads' tensors by array.

    An array that several clients receive becomes one tensor; see :meth:`Job.common_to_several`.

    Args:
        device: device on which the clients' code runs.
        job: job with the payloads.
        ids: ids of the clients.
        state_of: returns a client's state.
    """
    made: dict[int, Tensor] = {}
    given = [from_numpy(job.payloads.get(id, {}), made=made) for id in ids]
    common = {str(key): tensor for key, tensor in made.items()}
    found = move_trees([*map(state_of, ids), *given, common], device)
    received = {int(key): tensor for key, tensor in found.pop().items()}
    return dict(zip(ids, found, strict=False)), dict(zip(ids, found[len(ids) :], strict=True)), received


def wait_for_inputs(device: torch.device, inputs: Inputs) -> Inputs:
    """Makes the device's next operations wait for prefetched inputs, and returns these."""
    states, payloads, received = inputs
    trees = [*states.values(), *payloads.values()]
    join(device, [*(leaf for tree in trees for leaf in tensors(tree)), *received.values()])
    return inputs


def update_of(algorithm: Algorithm, task: Task, job: Job, outcome: Any, received: Tree) -> Weighted | Exception | None:
    """Returns a client's part of the variance of updates and of the error of products; or the error of computing it.

    Returns None if the job does not ask for them.
    """
    if not (job.splits and job.counted):
        return None
    if job.kind == "map" and algorithm.averages_replies and isinstance(outcome, Mapping):
        products = contribution(task.network, outcome, 1)
        return Weighted({"products": products}, 1) if products else None
    if job.kind not in ("mean", "each") or not isinstance(outcome, Weighted):
        return None
    try:
        change = algorithm.update(outcome.tree, received, task)
    except Exception as error:
        return error
    found: Tree = {}
    try:
        if change is not None:
            change = change.detach().flatten().to(torch.float64)
            found = {"change": change, "squared_norm": change @ change}
        products = {} if outcome.group else contribution(task.network, outcome.tree, outcome.weight)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        return error
    found |= {"products": products} if products else {}
    return Weighted(found, 1) if found else None


def collect(
    device: torch.device,
    job: Job,
    outcomes: dict[int, Any],
    updates: Mapping[int, Any],
    states: Mapping[int, Tree],
    later: bool = False,
) -> tuple[Extremes, StatesOnCpu]:
    """Inspects the results and states of all clients, and copies them to the CPU together.

    Together, because each transfer waits for the device.

    Args:
        device: device on which the clients' code ran.
        job: job that they ran.
        outcomes: results by client; those that travel one by one are replaced by their copies on the CPU.
        updates: results of :func:`update_of` by client.
        states: changed states by client.
        later: whether states are copied while the device works for the next clients.

    Returns:
        The extremes of all tensors that are sent or kept, and a function that yields the states on the CPU.
    """
    if device.type == "cpu" and len(outcomes) == 1:
        return {}, states.items
    sent = {id: found.added if isinstance(found, Weighted) else found for id, found in outcomes.items()}
    trees = {id: tree for id, tree in sent.items() if isinstance(tree, Mapping) and job.kind != "evaluate"}
    changes = [update.tree for update in updates.values() if isinstance(update, Weighted)]
    try:
        known = extremes_of([*trees.values(), *changes, *states.values()])
        if device.type == "cpu":
            return known, states.items
        leaving = [(piece, _leaving(piece, later)) for piece in _pieces(states)]
        _judge(outcomes)
        if job.kind in ("map", "each"):
            for id, moved in zip(trees, move_trees(list(trees.values()), _CPU), strict=True):
                found = outcomes[id]
                outcomes[id] = replace(found, tree=moved) if isinstance(found, Weighted) else moved
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        return {}, states.items  # the states are copied one by one
    return known, lambda: (one for piece, wait in leaving for one in _arrived(piece, wait))


def _judge(outcomes: dict[int, Any]) -> None:
    """Asks the device once which messages were within their bounds."""
    messages = {id: found for id, found in outcomes.items() if isinstance(found, Weighted)}
    within = {id: found.within for id, found in messages.items() if found.within is not None}
    if within:
        known = torch.stack(list(within.values())).cpu()
        outcomes |= {id: replace(messages[id], within=one) for id, one in zip(within, known, strict=True)}


def _pieces(states: Mapping[int, Tree]) -> list[dict[int, Tree]]:
    """Groups states into transfers of bounded size.

    The states that a piece replaces are freed before the next one is copied, which reuses their memory: all states
    twice would be memory that the kernel maps and clears again in every round.
    """
    pieces, room = list[dict[int, Tree]](), 0
    for id, state in states.items():
        size = num_bytes(state)
        if size > room or not pieces:
            pieces.append({})
            room = max(transfers.MOVE_BYTES, size)
        pieces[-1][id] = state
        room -= size
    return pieces


def _leaving(piece: Mapping[int, Tree], later: bool) -> Callable[[], list[Tree]]:
    """Starts to copy states to the CPU, or leaves them for when they are waited for."""
    trees = list(piece.values())
    return start_copy_to_cpu(trees) if later else lambda: move_trees(trees, _CPU)


def _arrived(piece: Mapping[int, Tree], wait: Callable[[], list[Tree]]) -> Iterable[tuple[int, Tree]]:
    try:
        return zip(piece, wait(), strict=True)
    except Exception as error:
        if not ran_out_of_memory(error):
            raise
        return piece.items()  # copied one by one


def client_error(error: Exception, client: int | str, job: Job, algorithm: Algorithm) -> ClientError:
    """Returns an error that names client, round and procedure, with the fix or the lines of the method's code.

    Args:
        error: error to explain.
        client: id of the client, or the words for something else that failed, such as ``the server``.
        job: job that was run.
        algorithm: method whose code was run.
    """
    who = client if isinstance(client, str) else f"client {client}"
    place = f"{who}, round {job.round + 1}, {job.procedure}"
    if isinstance(error, NonFiniteError):
        return ClientError(
            f"{place}: {error}; its training diverged, nothing of it entered the aggregate (lower train.lr, or set "
            "clients.on_error=skip?)"
        )
    if ran_out_of_memory(error):
        return ClientError(f"{place}: {too_little_memory(error)}")
    where = own_frames(error, [type(algorithm)])
    if not where and isinstance(error, MethodError):
        where = own_definition(getattr(algorithm, job.procedure))
    return ClientError(f"{place}: {type(error).__name__}: {text_of(error)}{where}")
