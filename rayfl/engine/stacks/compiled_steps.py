"""Stacked steps compiled by Inductor: the objective's gradient and the optimizer's update in one program."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rayfl.diagnosis.device_errors import ran_out_of_memory
from rayfl.engine.gradients.stacked_gradients import StackedGradients
from rayfl.engine.updates.requests import Objective
from rayfl.errors import ConfigError, ResourceError, text_of
from rayfl.optimization.optimizers import Rule, clipped
from rayfl.params import Tree, from_leaves, leaves
from rayfl.tasks.base import Task

_log = logging.getLogger(__name__)
MAX_FORMS = 32
"""Forms of steps that are tried; a method whose objectives differ from round to round would compile without end."""
_OPTIONS = {"compile_threads": 1}
"""Of Inductor: it starts no processes, an actor has its share of the machine."""

Program = Callable[..., Any]


def check_compilable(task: Task) -> None:
    """Raises an error, before any process starts, if steps cannot be compiled.

    Args:
        task: what is learned.

    Raises:
        ConfigError: clients with this network cannot be stacked, or it has a pretrained base.
        ResourceError: this machine has no C++ compiler.
    """
    for candidate in task.candidates:
        if not candidate.network.vectorizable:
            raise ConfigError(
                f"engine.compile: stacked clients alone are compiled, but {candidate.network.why_not_vectorizable}: "
                "leave engine.compile out, or choose another model"
            )
        if candidate.network.rows_per_sample:
            raise ConfigError(
                "engine.compile: steps over a pretrained base cannot be compiled, since its tensors are in no tree "
                "that a trace reads (and model.checkpointing=auto may change the steps later): leave it out"
            )
    check_tools(torch.device("cpu"))


def check_tools(device: torch.device) -> None:
    """Checks that the compilers Inductor needs are installed.

    Raises:
        ResourceError: naming what is missing.
    """
    from torch._inductor import config  # slow to import, and of no use without the option

    names = [str(name) for name in config.cpp.cxx if name is not None]
    if not any(shutil.which(name) for name in names):
        raise ResourceError(
            f"engine.compile needs a C++ compiler, and {os.uname().nodename} has no {' nor '.join(names)} on its PATH: "
            "install one (such as g++), name it in the environment variable CXX, or leave engine.compile out"
        )
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ResourceError("engine.compile needs Triton on GPUs: install triton, or leave engine.compile out")


class Compiler:
    """Compiles one program per form of a step, and caches it.

    Args:
        device: where the steps are taken.

    Raises:
        ResourceError: naming what is missing on this machine.
    """

    def __init__(self, device: torch.device) -> None:
        check_tools(device)
        self._programs: dict[Hashable, Program | None] = {}
        self._said: set[str] = set()

    def program(self, key: Hashable, runs: Sequence[Program], tensors: Sequence[Tensor], name: str) -> Program | None:
        """Returns the compiled program; None if compilation fails, with each reason logged once.

        Args:
            key: cache key: identifies the functions and the shapes they read.
            runs: functions of tensors to trace; each is tried if Inductor fails on the ones before.
            tensors: example inputs; not modified.
            name: of the function, for the log.
        """
        if key not in self._programs:
            if len(self._programs) >= MAX_FORMS:
                self._refuse(f"{MAX_FORMS} forms were tried: shapes, objectives or constants vary too much")
                return None
            found = None
            for place, run in enumerate(runs):
                found = found or self._made(run, tensors, name, more=place < len(runs) - 1)
            self._programs[key] = found
        return self._programs[key]

    def _made(self, run: Program, tensors: Sequence[Tensor], name: str, more: bool) -> Program | None:
        from torch._inductor import compile as compile_graph

        begun, traced = time.perf_counter(), 0.0
        try:
            # Run once eagerly: what a network creates lazily and caches would otherwise be a tensor of the trace.
            run(*(tensor.clone() for tensor in tensors))
            graph = make_fx(run, tracing_mode="fake")(*tensors)
            traced = time.perf_counter()
            with torch.no_grad():
                program: Program = compile_graph(graph, list(tensors), options=_OPTIONS)
        except Exception as error:
            if ran_out_of_memory(error):
                raise
            if not (more and traced):
                self._refuse((text_of(error).strip().splitlines() or [type(error).__name__])[0])
            return None
        seconds = time.perf_counter() - traced
        # A warning: lower levels of an actor's log do not reach the run's log.
        _log.warning("engine.compile: %s: traced in %.1f s, compiled in %.1f s", name, traced - begun, seconds)
        return program

    def _refuse(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            _log.warning("engine.compile: stacked steps are taken uncompiled: %s", reason)


class CompiledStep:
    """Takes the compiled steps of one stack.

    Plain SGD is part of the program. For other optimizers, for which PyTorch has fused kernels, the program returns
    gradients; so it does if Inductor fails on the whole step.

    Args:
        compiler: compiles and caches the programs.
        objective: the stack's objective.
        task: what the objective is given.
        gradients: computes the gradients of the objective.
        moved: paths of the tensors that steps update.
        rules: the update rules of these tensors, in the same order.
        max_grad_norm: largest norm of a step's gradient; None sets no limit.
        fixed_dims: which tensors of ``frozen`` are stacked; equal for all stacks of a form.
        device: where the learning rates are stored.
    """

    def __init__(
        self,
        compiler: Compiler,
        objective: Objective,
        task: Task,
        gradients: StackedGradients,
        moved: Sequence[str],
        rules: Sequence[Rule],
        max_grad_norm: float | None,
        fixed_dims: Tree | None,
        device: torch.device,
    ) -> None:
        self._compiler, self._objective, self._task = compiler, objective, task
        self._gradients, self._moved, self._max_norm = gradients, moved, max_grad_norm
        self._whole = all(rule.optimizer == "sgd" and not rule.dampening for rule in rules)
        # Learning rates change from round to round, so they are inputs; all else is a constant of the program.
        self._rules = [replace(rule, lr=0.0) for rule in rules] if self._whole else []
        rates = dict.fromkeys(rule.lr for rule in rules) if self._whole else {}
        self._rate_of = [list(rates).index(rule.lr) for rule in rules] if self._whole else []
        self._rates = {str(n): torch.tensor(rate, dtype=torch.float64, device=device) for n, rate in enumerate(rates)}
        self._dims = None if fixed_dims is None else tuple(leaves(fixed_dims))
        self._form = objective, task, tuple(moved), tuple(self._rules), tuple(self._rate_of), max_grad_norm, self._dims
        self._found: dict[Any, Program | None] = {}

    def __call__(self, given: Mapping[str, Any], slots: Sequence[Mapping[str, Tensor]]) -> list[Tensor] | None:
        """Takes a step.

        Args:
            given: ``model``, ``x``, ``y``; and ``mask``, ``key``, ``frozen`` and ``draw`` where there are such.
            slots: by moved path, the optimizer's state.

        Returns:
            An empty list if the program has updated the parameters; else the gradients, for the caller to apply. None
            if there is no program, and nothing was done.
        """
        tree: Tree = {"given": dict(given), "rates": self._rates}
        if self._whole:
            tree["slots"] = {str(place): dict(own) for place, own in enumerate(slots)}
        pairs = list(leaves(tree))
        tensors = [leaf for _, leaf in pairs if isinstance(leaf, Tensor)]
        shapes = given["x"].shape, given["y"].shape
        if shapes not in self._found:
            self._found[shapes] = self._program(pairs, tensors, shapes[0])
        program = self._found[shapes]
        if program is None:
            return None
        with torch.no_grad():
            return list(program(*tensors) or ())

    def _program(
        self, pairs: Sequence[tuple[str, Any]], tensors: Sequence[Tensor], inputs: torch.Size
    ) -> Program | None:
        """Returns the program for the inputs of a step."""
        paths = [path for path, leaf in pairs if isinstance(leaf, Tensor)]
        constants = {path: leaf for path, leaf in pairs if not isinstance(leaf, Tensor)}
        forms = tuple((path, t.shape, t.stride(), t.dtype, t.device) for path, t in zip(paths, tensors, strict=True))
        key = (self._form, forms, tuple((path, type(leaf), leaf) for path, leaf in constants.items()))
        of = getattr(self._objective, "__qualname__", type(self._objective).__name__)
        name = f"a step of {inputs[0]} stacked clients with mini-batches of {inputs[1]} ({of})"
        runs = [self._function(paths, constants, whole) for whole in ((True, False) if self._whole else (False,))]
        return self._compiler.program(key, runs, tensors, name)

    def _function(self, paths: Sequence[str], constants: Mapping[str, Any], whole: bool) -> Program:
        """Returns the step (or, unless ``whole``, its gradients alone) as a function of tensors."""

        def run(*tensors: Tensor) -> list[Tensor]:
            versions = {path: tensor._version for path, tensor in zip(paths, tensors, strict=True)}
            tree = from_leaves({**dict(zip(paths, tensors, strict=True)), **constants})
            given = tree["given"]
            model, frozen = dict(leaves(given["model"])), given.get("frozen", None if self._dims is None else {})
            batch = given["x"], given["y"], given.get("mask")
            try:
                found = self._gradients(model, self._moved, given.get("key"), *batch, frozen, given.get("draw"))
            finally:
                for candidate in self._task.candidates:
                    candidate.network.release()  # traced tensors must not be cached for others
            for path, tensor in zip(paths, tensors, strict=True):
                if not path.startswith("given/model/") and tensor._version != versions[path]:
                    raise ValueError(f"the objective writes to {path.removeprefix('given/')!r} in place")
            if not whole:
                return found
            with torch.no_grad():
                self._move(found, model, tree)
            return []

        return run

    def _move(self, gradients: Sequence[Tensor], model: Mapping[str, Tensor], tree: Mapping[str, Any]) -> None:
        """Updates the parameters by plain SGD, like :meth:`Rule.step`."""
        if self._max_norm is not None:
            gradients = clipped(gradients, self._max_norm, stacked=True)
        for place, (path, rule, gradient) in enumerate(zip(self._moved, self._rules, gradients, strict=True)):
            leaf, rate = model[path], tree["rates"][str(self._rate_of[place])]
            if rule.weight_decay:
                gradient = gradient + rule.weight_decay * leaf
            if rule.momentum:
                momentum = tree["slots"][str(place)]["momentum"]
                kept = rule.momentum * momentum + gradient
                momentum.copy_(kept)
                gradient = gradient + rule.momentum * kept if rule.nesterov else kept
            moved = leaf - rate * gradient
            leaf.copy_(moved if rule.bounds is None else moved.clamp(*rule.bounds))
