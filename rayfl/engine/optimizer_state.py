"""Loads and saves optimizers in a client's state, under ``optimizer``, for the next pass of the same stream."""

from __future__ import annotations

from collections.abc import Collection

from rayfl.engine.local_settings import LocalSettings
from rayfl.engine.optimizers import OptimizerState, Rule
from rayfl.engine.requests import TrainRequest
from rayfl.params import Tree


def load_optimizer(state: Tree, stream: str, rules: Collection[Rule]) -> OptimizerState:
    """Returns the optimizer's state after the stream's last pass; empty before the first.

    Args:
        state: the client's.
        stream: suffix of the pass's streams.
        rules: the update rules of the next pass.
    """
    stored = state.get("optimizer", {}).get(_pass_name(stream), {})
    return OptimizerState.of(stored, {name for rule in rules for name in rule.slots})


def save_optimizer(state: Tree, request: TrainRequest, settings: LocalSettings) -> None:
    """Saves the optimizer's state after an update in the client's state."""
    memory, keys = request.optimizer_state, settings.keep_optimizer
    if memory is not None and memory.slots and request.plan.steps:
        stored = memory.stored(None if isinstance(keys, bool) else keys)
        state["optimizer"] = {**state.get("optimizer", {}), _pass_name(settings.stream): stored}


def _pass_name(stream: str) -> str:
    """Returns the key under which a stream's optimizer is saved."""
    return stream.removeprefix(".") or "main"
