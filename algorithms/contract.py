"""What a class must be to be run as a method; found out before any process is started for it."""

from __future__ import annotations

import inspect

from algorithms.base import Algorithm
from algorithms.clients import is_plain
from rayfl.diagnosis.tracebacks import own_definition
from rayfl.errors import MethodError


def check_method(method: type[Algorithm]) -> None:
    """Makes sure that a class has a round, and that its coroutines are those of its base classes.

    Raises:
        MethodError: naming the function, where it is, and what to write.
    """
    if method.round is Algorithm.round:
        raise MethodError(
            f"{method.__name__} defines no round(server, cohort, clients): write one, or derive the class from "
            "rayfl.Averaging"
        )
    for name, function in inspect.getmembers(method, inspect.isfunction):
        inherited = [vars(base)[name] for base in method.__mro__ if name in vars(base)]
        contract = inherited[-1]
        if contract is function or not (inspect.isfunction(contract) or isinstance(contract, property)):
            continue
        if inspect.iscoroutinefunction(contract) and is_plain(function, name):
            problem = f"is a client's procedure: define it with `async def {name}`"
        elif inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(contract):
            problem = f"is no client's procedure: define it with `def {name}`, without async"
        else:
            continue
        raise MethodError(f"{method.__name__}.{name} {problem}{own_definition(function)}")
