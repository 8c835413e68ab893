"""The server's own work on one host: a procedure of the method that has the host's device and the public samples."""

from __future__ import annotations

from dataclasses import replace

from actors.hosting.at_work import AtWork
from actors.hosting.contract import begun, check_sendable
from actors.hosting.job import Job
from actors.hosting.outcomes import blamed
from actors.hosting.samples import Samples
from algorithms.base import Algorithm
from rayfl.aggregation.magnitudes import NonFiniteError, check_finite
from rayfl.diagnosis.device_errors import ran_out_of_memory
from rayfl.engine.engine import Engine
from rayfl.engine.requests import SERVER
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.engine.tasks import recorded_names
from rayfl.engine.trampoline import run_procedures
from rayfl.engine.write_guard import WriteGuard
from rayfl.errors import ClientError, MethodError, as_error
from rayfl.params import Tree


def served(
    algorithm: Algorithm,
    engine: Engine,
    samples: Samples,
    context: RoundContext,
    at_work: AtWork,
    job: Job,
    given: Tree,
) -> Tree:
    """Returns what the server's procedure of a job returns.

    Args:
        algorithm: the method.
        engine: task and device.
        samples: has the public ones.
        context: of the experiment.
        at_work: is told who works.
        job: which procedure, in which round.
        given: its keyword arguments, on the device.

    Raises:
        ClientError: naming the server and the procedure, when that raises or returns what no tree can hold.
    """
    server = Server(engine.task, replace(context, round=job.round), engine.device, samples.public)
    lent = WriteGuard(given, recorded_names(engine.task))

    def unharmed(_: int) -> None:
        if (leaf := lent.written() or samples.written(SERVER)) is not None:
            raise MethodError(f"writes to {leaf!r} in place: work on a copy (rayfl.params.copy, Tensor.clone)")

    try:
        procedure = begun(getattr(algorithm, job.procedure), server, given, bundled=False)
        at_work.begin([SERVER])
        found = run_procedures({SERVER: procedure}, engine, at_work.turn_to, unharmed)[SERVER]
        if isinstance(found, Exception):
            raise found
        check_sendable(found, job.procedure)
        check_finite(found)
    except BaseException as error:
        raise _blame(as_error(error), algorithm, job) from error
    finally:
        at_work.turn_to(())
    tree: Tree = found
    return tree


def _blame(error: Exception, algorithm: Algorithm, job: Job) -> Exception:
    """The error with the server's name; what hosts do something about themselves stays what it is."""
    if ran_out_of_memory(error):
        return error
    if isinstance(error, NonFiniteError):
        place = f"the server, round {job.round}, {job.procedure}"
        return ClientError(f"{place}: {error}; its training diverged (lower the rate of its training?)")
    return blamed(error, "the server", job, algorithm)
