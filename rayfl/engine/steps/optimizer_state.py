"""Loads and saves optimizers in a client's state, under ``optimizer``, for the next pass of the same stream."""

from __future__ import annotations

from dataclasses import replace

from rayfl.engine.steps.looped import moved_paths
from rayfl.engine.updates.local_settings import LocalSettings
from rayfl.engine.updates.requests import TrainRequest
from rayfl.errors import MethodError
from rayfl.optimization.optimizers import OptimizerState, key_of, rule_of
from rayfl.params import Tree
from rayfl.tasks.base import Task


def with_optimizer(state: Tree, request: TrainRequest, stream: str, task: Task) -> TrainRequest:
    """Returns the request with the optimizer's state after the stream's last pass; empty before the first.

    Args:
        state: the client's.
        request: the next pass.
        stream: suffix of the pass's streams.
        task: what is learned.

    Raises:
        MethodError: when the stream's last pass has trained other tensors, whose optimizer would be lost, and whose
            number of steps Adam would go on with.
    """
    stored = state.get("optimizer", {}).get(_pass_name(stream), {})
    moved = moved_paths(request.trainable, task)
    rules = {path: rule_of(path, request.rule, request.groups) for path in moved}
    kept = OptimizerState.of(stored, {name for rule in set(rules.values()) for name in rule.slots})
    keeping = {path for path, rule in rules.items() if rule.slots}
    counted = {path for path in keeping if rules[path].optimizer != "sgd"}
    known = {path for slot in kept.slots.values() for path in slot}
    new = set(map(key_of, counted)) & set(map(key_of, known)) - set(map(key_of, counted & known))
    if new or (known and keeping and not keeping & known):
        raise MethodError(
            "a pass trains none of the tensors that the last pass of its stream has trained"
            f"{''.join(f' under {key!r}' for key in sorted(new)[:1] if key)}, and would drop what the optimizer has "
            "kept of them (and Adam would go on with their number of steps): give it a stream of its own, such as "
            "stream='.second'"
        )
    return replace(request, optimizer_state=kept)


def save_optimizer(state: Tree, request: TrainRequest, settings: LocalSettings) -> None:
    """Saves the optimizer's state after an update in the client's state."""
    memory, keys = request.optimizer_state, settings.keep_optimizer
    if memory is not None and memory.slots and request.plan.steps:
        stored = memory.stored(None if isinstance(keys, bool) else keys)
        state["optimizer"] = {**state.get("optimizer", {}), _pass_name(settings.stream): stored}


def _pass_name(stream: str) -> str:
    """Returns the key under which a stream's optimizer is saved."""
    return stream.removeprefix(".") or "main"
