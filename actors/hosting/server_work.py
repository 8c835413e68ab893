"""Runs a procedure of the server on a host, with the host's device and the public samples."""

from __future__ import annotations

from dataclasses import replace

from actors.hosting.contract import check_sendable, start_procedure
from actors.hosting.job import Job
from actors.hosting.outcomes import client_error
from actors.hosting.running_clients import RunningClients
from actors.hosting.samples import Samples
from algorithms.base import Algorithm
from rayfl.aggregation.magnitudes import NonFiniteError, check_finite
from rayfl.diagnosis.device_errors import ran_out_of_memory
from rayfl.engine.engine import Engine
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.engine.updates.requests import SERVER
from rayfl.engine.updates.trampoline import run_procedures
from rayfl.engine.updates.write_guard import WriteGuard
from rayfl.errors import ClientError, MethodError, as_error
from rayfl.params import Tree
from rayfl.tasks.base import recorded_names


def run_on_server(
    algorithm: Algorithm,
    engine: Engine,
    samples: Samples,
    context: RoundContext,
    running: RunningClients,
    job: Job,
    given: Tree,
) -> Tree:
    """Runs the server's procedure of a job and returns its result.

    Args:
        algorithm: method of the experiment.
        engine: task and device.
        samples: samples of the host; the public ones are passed to the procedure.
        context: round context of the experiment.
        running: is notified that the server's code runs.
        job: names the procedure and the round.
        given: keyword arguments of the procedure, on the device.

    Raises:
        ClientError: naming the server and the procedure, when it raises or returns something that is no tree.
    """
    context = replace(context, round=job.round)
    server = Server(engine.task, context, engine.device, samples.public, samples.labelled_public)
    guard = WriteGuard(given, recorded_names(engine.task))

    def check_inputs(_: int) -> None:
        if (leaf := guard.written() or samples.written(SERVER)) is not None:
            raise MethodError(f"writes to {leaf!r} in place: work on a copy (rayfl.params.copy, Tensor.clone)")

    try:
        procedure = start_procedure(getattr(algorithm, job.procedure), server, given, bundled=False)
        running.begin([SERVER])
        found = run_procedures({SERVER: procedure}, engine, running.switch_to, check_inputs)[SERVER]
        if isinstance(found, Exception):
            raise found
        check_sendable(found, job.procedure)
        check_finite(found)
    except BaseException as error:
        raise _blame(as_error(error), algorithm, job) from error
    finally:
        running.switch_to(())
    tree: Tree = found
    return tree


def _blame(error: Exception, algorithm: Algorithm, job: Job) -> Exception:
    """Returns the error with the server's name. Out-of-memory errors stay as they are: hosts recover from them."""
    if ran_out_of_memory(error):
        return error
    if isinstance(error, NonFiniteError):
        place = f"the server, round {job.round + 1}, {job.procedure}"
        return ClientError(f"{place}: {error}; its training diverged (lower the rate of its training?)")
    return client_error(error, "the server", job, algorithm)
