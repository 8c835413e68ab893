"""Hyper-parameters of methods as fields, and which of them have no effect beside others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field

from rayfl.engine.updates.settings import TrainConfig

TOGETHER = " and "
"""Between the names of options that have an effect on another one together only."""


def setting(
    default: Any,
    symbol: str,
    description: str,
    only: Mapping[str, Sequence[Any]] | None = None,
    unless: Mapping[str, Sequence[Any]] | None = None,
    kept: bool | str = False,
    **bounds: Any,
) -> Any:
    """A hyper-parameter: its default, the paper's symbol (empty for our own options), meaning and range.

    Args:
        default: its value where none is given.
        symbol: in the paper.
        description: of what it does.
        only: other options, and with which of their values it does that; see :func:`idle_settings`.
        unless: other options, and with which of their values it has no effect; options that matter only together are
            one key, joined by `` and ``, whose values are tuples.
        kept: whether what server or clients keep from round to round depends on it, so that a fork cannot change it; an
            option that names a round (0-indexed), if that is so from its start on.
        bounds: as of ``pydantic.Field``.
    """
    extra: dict[str, Any] = {"symbol": symbol}
    extra |= {key: dict(given) for key, given in (("only", only), ("unless", unless)) if given is not None}
    if kept:
        extra["kept"] = kept
    return Field(default, description=description, json_schema_extra=extra, **bounds)


def kept_settings(old: BaseModel, new: BaseModel, rounds_completed: int) -> list[str]:
    """Returns in which settings a method may not differ from another of its class whose rounds it continues.

    Args:
        old: the method of these rounds.
        new: the method that is to continue.
        rounds_completed: how many rounds there are.
    """
    found = []
    for name, field in type(old).model_fields.items():
        extra: Any = field.json_schema_extra or {}
        since = extra.get("kept", False)
        if isinstance(since, str):
            since = rounds_completed > min(getattr(old, since), getattr(new, since))
        if since and getattr(old, name) != getattr(new, name):
            found.append(name)
    return found


def idle_settings(method: BaseModel) -> list[str]:
    """Says of settings that differ from their defaults and have no effect beside the others, a sentence each."""
    found = []
    for name, field in type(method).model_fields.items():
        if getattr(method, name) == field.default:
            continue
        extra: Any = field.json_schema_extra or {}
        for other, values in extra.get("only", {}).items():
            if (there := getattr(method, other)) not in values:
                needed = " or ".join(map(_shown, values))
                found.append(
                    f"algorithm.{name} has no effect: it is for algorithm.{other}={needed}, and that is {_shown(there)}"
                )
        for others, values in extra.get("unless", {}).items():
            there = {other: getattr(method, other) for other in others.split(TOGETHER)}
            if (tuple(there.values()) if len(there) > 1 else there[others]) in values:
                listed = TOGETHER.join(f"algorithm.{other} is {_shown(value)}" for other, value in there.items())
                found.append(f"algorithm.{name} has no effect: {listed}")
    return found


def limits_without_effect(option: str, value: int | None, train: TrainConfig) -> tuple[str, ...]:
    """Says of options for numbers of local steps that they have no effect, if one of the method tells it; or nothing.

    Args:
        option: its name.
        value: the number of local steps; None where the training section tells them.
        train: the training section.
    """
    limits = ("local_epochs", "min_local_steps", "max_local_steps", "stragglers")
    given = [name for name in limits if getattr(train, name) != type(train).model_fields[name].default]
    if value is None or not given:
        return ()
    return tuple(
        f"train.{name} has no effect: algorithm.{option} says how many local steps there are" for name in given
    )


def epochs_without_effect(method: BaseModel, options: Sequence[str], train: TrainConfig) -> tuple[str, ...]:
    """Says that the section's local epochs have no effect in rounds, if the method's own options tell them; or nothing.

    Newcomers join with the section's epochs, and stragglers' work is a part of them.

    Args:
        method: the method.
        options: names of its options for the epochs of all its passes.
        train: the training section.
    """
    usual = type(train).model_fields["local_epochs"].default
    told = [getattr(method, option) for option in options]
    if None in told or train.local_epochs == usual or train.stragglers:
        return ()
    listed = " and ".join(f"algorithm.{option}={value}" for option, value in zip(options, told, strict=True))
    return (f"train.local_epochs={train.local_epochs} has no effect in rounds: {listed} say how many epochs there are",)


def _shown(value: Any) -> str:
    """A value as it is written in a configuration."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
