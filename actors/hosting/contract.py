"""Checks what a method's procedures take and return. Each error says what to write instead."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from actors.hosting.failures import MethodError
from algorithms.base import Algorithm, Clients
from algorithms.clients import NOT_ASYNCHRONOUS
from rayfl.diagnosis.tracebacks import own_definition
from rayfl.engine.client import Client
from rayfl.errors import as_error
from rayfl.naming.spelling import nearest
from rayfl.params import Tree, leaves
from rayfl.storage import treefile
from rayfl.tasks.base import Predictor


def start_procedure(procedure: Callable[..., Any], client: Any, given: Tree, bundled: bool) -> Coroutine[Any, Any, Any]:
    """Returns the coroutine of a client's procedure; none of it has run yet.

    Args:
        procedure: function of the method.
        client: first argument of the procedure.
        given: tree that the server has sent.
        bundled: whether the tree is passed as one argument; if not, each entry is a keyword argument.

    Raises:
        MethodError: when the procedure is not asynchronous, or does not take these arguments.
    """
    try:
        found: Coroutine[Any, Any, Any] = procedure(client, given) if bundled else procedure(client, **given)
    except TypeError as error:
        raise MethodError(f"what it is sent is not what it takes: {error}") from error
    if not inspect.iscoroutine(found):
        raise MethodError(NOT_ASYNCHRONOUS.format(getattr(procedure, "__name__", "a procedure")))
    return found


def run_round(algorithm: Algorithm, server: Tree, cohort: Sequence[int], clients: Clients) -> Any:
    """Runs a method's round on the server and returns its result; an attempt to end the process becomes an error."""
    try:
        return algorithm.round(server, cohort, clients)
    except Exception:
        raise
    except BaseException as error:
        raise as_error(error) from error


def check_changes(changed: Any, algorithm: Algorithm, server: Tree) -> None:
    """Checks that the result of a round can be merged into the server's tree, and be committed.

    Args:
        changed: the result.
        algorithm: the method.
        server: the tree.

    Raises:
        MethodError: naming the key or the value that cannot.
    """
    where = own_definition(algorithm.round)
    if not isinstance(changed, Mapping):
        raise MethodError(f"round must return the entries of the server's tree that change, got {changed!r:.80}{where}")
    try:
        treefile.check(changed)
    except TypeError as error:
        raise MethodError(f"what round returned cannot be kept: {error}{where}") from None
    for key in changed.keys() - server.keys():
        if meant := nearest(key, server.keys() - changed.keys()):
            raise MethodError(f"round returned {key!r}, which the server's tree does not have{meant}{where}")
    model, result = (dict(leaves(tree.get("model", {}))) for tree in (server, changed))
    if model and "model" in changed and (differing := sorted(model.keys() ^ result.keys())):
        lost = differing[0] in model
        raise MethodError(
            f"round returned a model {'without' if lost else 'with'} {differing[0]!r}, which the model before it "
            f"{'had' if lost else 'did not have'}{where}"
        )
    for path, leaf in result.items():
        if path in model and np.shape(leaf) != np.shape(model[path]):
            raise MethodError(
                f"round returned a model whose {path!r} has the shape {tuple(np.shape(leaf))}, and had "
                f"{tuple(np.shape(model[path]))} before{where}"
            )
        kinds = [getattr(value, "dtype", type(value)) for value in (leaf, model.get(path, leaf))]
        if kinds[0] != kinds[1]:
            raise MethodError(
                f"round returned a model whose {path!r} has the type {kinds[0]}, and had {kinds[1]} before; clients "
                f"return tensors of the types that they receive (.to({kinds[1]})){where}"
            )
        if not _is_finite(leaf) and _is_finite(model.get(path, 0.0)):
            raise MethodError(
                f"round returned a model with NaN or infinity in {path!r}: what clients sent was finite, so that the "
                f"server's step made it{where}"
            )


def _is_finite(leaf: Any) -> bool:
    return bool(torch.isfinite(torch.as_tensor(leaf)).all())


def check_noised(algorithm: Algorithm, client: Client) -> None:
    """Checks that a client's training has drawn no more mini-batches than epsilon of its samples counts.

    Raises:
        MethodError: saying how many.
    """
    drawn: Counter[int] = Counter()
    for steps, batches in client.noised:
        drawn[steps] += batches
    counted = algorithm.noised_batches(client.context.train, client.num_samples) if drawn else {}
    for steps, batches in drawn.items():
        if batches > counted.get(steps, 0):
            raise MethodError(
                f"privacy.example_clip_norm: a client has drawn {batches} mini-batches for {steps} steps on each, but "
                f"{type(algorithm).__name__}.noised_batches counts {counted.get(steps, 0)}: epsilon would be too small"
            )


def check_keepable(state: Tree) -> None:
    """Checks that a client's state can be committed.

    Raises:
        MethodError: naming the key or the value that cannot.
    """
    try:
        treefile.check(state)
    except TypeError as error:
        raise MethodError(f"client.state cannot be kept: {error}") from None


def check_sendable(tree: Any, procedure: str) -> None:
    """Checks that a procedure returned a tree: nested dicts whose keys are strings without ``/``.

    Raises:
        MethodError: naming the key, or the type that was returned instead.
    """
    if not isinstance(tree, Mapping):
        raise MethodError(f"{procedure} must return a dict of tensors and numbers, got {type(tree).__name__}")
    for key, value in tree.items():
        if not isinstance(key, str) or "/" in key:
            raise MethodError(f"{procedure} returned the key {key!r}: keys are strings without '/'")
        if isinstance(value, Mapping):
            check_sendable(value, procedure)


def check_predictors(found: Any, procedure: str) -> None:
    """Checks that a procedure returned predictors by name.

    Raises:
        MethodError: naming what it returned instead.
    """
    if not isinstance(found, Mapping):
        raise MethodError(f"{procedure} must return predictors by name, got {type(found).__name__}")
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, Predictor):
            raise MethodError(f"{procedure} must return a Predictor for each name, {name!r} has {type(value).__name__}")


def are_predictors(found: Any) -> bool:
    """Returns whether a result passes :func:`check_predictors`."""
    return isinstance(found, Mapping) and all(
        isinstance(name, str) and isinstance(value, Predictor) for name, value in found.items()
    )
