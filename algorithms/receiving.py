"""What messages one by one become on the server, by attacks and robust rules; and which calls sections refuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rayfl.aggregation import privacy as private
from rayfl.aggregation.attacks import a_little, against_mean, gaussian, most_deviations, scaled, within_the_spread
from rayfl.aggregation.exact_sum import Weighted
from rayfl.aggregation.memory import key_of
from rayfl.aggregation.secure_sum import step_of
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ClientError, MethodError
from rayfl.messages.aggregation_rule import Known
from rayfl.messages.aggregators import Mean
from rayfl.messages.compressors import SecureAggregation
from rayfl.params import Tree, from_leaves, leaves

_SINGLE = "aggregator, attack.message, contribution, and selections that go by updates"
"""What needs the messages of a mean one by one."""


def check_messages(context: RoundContext, kind: str, alone: bool, calls: int) -> None:
    """Refuses a call to which ``privacy``, ``compression``, ``aggregator``, ``attack`` or ``selection`` do not apply.

    Args:
        context: of the round.
        kind: name of the call.
        alone: whether it asks for messages of clients alone.
        calls: how many calls the round has had, with this one.

    Raises:
        MethodError: naming the section and the call.
    """
    asked = f"Clients.{kind}" if alone else "Clients.mean(also=...)"
    if context.privacy.on and (kind != "mean" or not alone or calls > 1):
        why = "privacy: one mean a round over clients (Clients.mean) is private, and nothing else that they send"
        raise MethodError(f"{why}; this is {asked}, call {calls} of the round")
    if kind == "each" and not isinstance(context.aggregator, Mean):
        raise MethodError(f"aggregator={context.aggregator.name}: {asked} gives messages that the method weighs itself")
    if context.one_by_one and (kind not in ("mean", "each") or not alone):
        why = f"{_SINGLE} are for means over clients (Clients.mean), and for nothing else they send"
        raise MethodError(f"{why}; this is {asked}")
    if (context.keeps_changes and (kind != "mean" or calls > 1)) or (context.repeats is not None and kind == "map"):
        why = "this selection is about one mean a round over clients (Clients.mean), and nothing else that they send"
        raise MethodError(f"{why}; this is {asked}, call {calls} of the round")
    if context.keeps_messages and (kind != "mean" or calls > 1):
        why = "contribution is about one mean a round over clients (Clients.mean), and nothing else that they send"
        raise MethodError(f"{why}; this is {asked}, call {calls} of the round")
    if context.compressed and (kind == "map" or calls > 1):
        why = "compression is for one mean a round over clients (Clients.mean), and for nothing else that they send"
        raise MethodError(f"{why}; this is {asked}, call {calls} of the round")
    if context.secure_sum and kind != "mean":
        why = "compression=secure_aggregation is for one sum over all clients of a round (Clients.mean), not for groups"
        raise MethodError(f"{why}; this is {asked}")


def check_cohort(context: RoundContext, cohort: Sequence[int], procedure: str) -> None:
    """Refuses a private mean over clients that are not of the round's cohort: epsilon counts who was sampled.

    Args:
        context: of the round.
        cohort: who is asked.
        procedure: for errors.

    Raises:
        MethodError: naming one of them.
    """
    if not context.privacy.on or not context.asked:
        return
    if others := sorted(set(cohort) - set(context.asked)):
        raise MethodError(
            f"privacy: {procedure} is asked of client {others[0]}, who is not of the round's cohort: epsilon "
            "is that of clients that were sampled"
        )


def combined(
    context: RoundContext,
    messages: Mapping[int, Weighted],
    received: Mapping[str, Tensor],
    procedure: str,
    call: int,
    remembered: Tree,
) -> Tree:
    """Returns what the server takes for the mean of messages.

    Args:
        context: of the round, with ``aggregator``.
        messages: as the server receives them, see :func:`as_sent`.
        received: by path, what they are changes of.
        procedure: for errors.
        call: which call of the round this is.
        remembered: what the rule needs of earlier rounds, by call; that of this one is put in its place.

    Raises:
        ClientError: they have no mean together.
    """
    where, rule = _where(context, procedure), context.aggregator
    key, all_sent = key_of(rule.name, call), list(messages.values())
    seed = context.streams.integer(f"aggregator.{call}", context.round)
    known = Known(list(messages), remembered.pop(key, {}), seed)
    try:
        found = rule.combine(all_sent, received, known)
    except (OverflowError, ValueError) as error:
        attacked_by = "; or lower attack.strength" if context.attack.on_messages else ""
        raise ClientError(f"{where}: {error}{attacked_by}") from error
    if memory := rule.memory_after(all_sent, received, known, found):
        remembered[key] = memory
    return found


def as_sent(
    context: RoundContext, sent: Mapping[int, Any], broadcast: Tree, procedure: str, least: int = 1
) -> tuple[dict[int, Weighted], dict[str, Tensor]]:
    """Returns the messages as the server receives them, by client, ascending; and by path what they are changes of.

    Args:
        context: of the round, with ``attack``.
        sent: ``tree`` and ``weight`` by client.
        broadcast: what all clients received.
        procedure: for errors.
        least: how many messages the rule of the section ``aggregator`` needs.

    Raises:
        ClientError: there are too few messages, or they are no changes of the same tensors, or not finite.
    """
    messages = {client: Weighted(sent[client]["tree"], sent[client]["weight"]) for client in sorted(sent)}
    where, rule = _where(context, procedure), context.aggregator
    if len(messages) < least:
        fewer = "lower aggregator.malicious, " if getattr(rule, "malicious", 0) else ""
        raise ClientError(
            f"{where}: aggregator={rule.name} needs {least} messages, and {len(messages)} have come: {fewer}raise "
            "train.clients_per_round, or let fewer clients drop out"
        )
    first, *others = messages
    try:
        received = private.reference_of(messages[first].tree, broadcast)
    except ValueError as error:
        raise MethodError(f"{_SINGLE}: {procedure} {error}") from error
    form = _form(messages[first].tree)
    if unlike := [client for client in others if _form(messages[client].tree) != form]:
        raise ClientError(f"{where}: client {unlike[0]} sends other tensors than client {first}")
    attacked = _attacked(context, messages, received)
    for client in context.attackers & set(attacked):
        if not all(bool(leaf.isfinite().all()) for _, leaf in leaves(attacked[client].tree)):
            raise ClientError(f"{where}: what client {client} sends is not finite any more: lower attack.strength")
    if context.secure_sum and context.attack.on_messages:
        attacked = _in_the_sum(context.secure_sum, context.attackers, attacked, received, where)
    return attacked, received


def _where(context: RoundContext, procedure: str) -> str:
    return f"the clients, round {context.round + 1}, {procedure}"


def _form(tree: Tree) -> list[tuple[str, Any]]:
    return sorted((path, getattr(leaf, "shape", None)) for path, leaf in leaves(tree))


def _attacked(
    context: RoundContext, messages: dict[int, Weighted], received: Mapping[str, Tensor]
) -> dict[int, Weighted]:
    """Returns the messages with those of malicious clients replaced, each with its weight."""
    malicious = [client for client in messages if client in context.attackers]
    if not context.attack.on_messages or not malicious:
        return messages
    if context.attack.message in _COLLUDING:
        honest = [message.tree for client, message in messages.items() if client not in context.attackers]
        if not honest:  # nothing to hide among
            return messages
        instead = dict.fromkeys(malicious, _agreed(context, honest, received, len(malicious)))
    else:
        instead = {client: _alone(context, client, messages[client].tree, received) for client in malicious}
    return {**messages, **{client: replace(messages[client], tree=tree) for client, tree in instead.items()}}


def _in_the_sum(
    rule: SecureAggregation,
    attackers: AbstractSet[int],
    messages: Mapping[int, Weighted],
    received: Mapping[str, Tensor],
    where: str,
) -> dict[int, Weighted]:
    """Returns the messages with those of malicious clients on the levels of all, but not clipped.

    Nobody sees whether an attacker clips. Only the modulus bounds what it can do to the sum.

    Raises:
        ClientError: the sum wraps around the modulus.
    """
    step, found = step_of(rule.clip, rule.bits), dict(messages)
    for client in attackers & set(messages):
        tree = {}
        for path, leaf in leaves(messages[client].tree):
            change = ((leaf.double() - received[path].double()) / step).round() * step
            tree[path] = (received[path] + change).to(leaf.dtype)
        found[client] = replace(messages[client], tree=from_leaves(tree))
    totals = {path: torch.zeros_like(leaf, dtype=torch.float64) for path, leaf in received.items()}
    for message in found.values():
        for path, leaf in leaves(message.tree):
            totals[path] += float(message.weight) * ((leaf.double() - received[path].double()) / step).round()
    for path, total in totals.items():
        if total.numel() and float(total.abs().max()) >= 2.0 ** (rule.modulus_bits - 1):
            raise ClientError(
                f"{where}: with what malicious clients send, the sum of {path} leaves the range modulo "
                f"2^{rule.modulus_bits} and would wrap: lower attack.strength, or raise compression.modulus_bits"
            )
    return found


_COLLUDING = ("alie", "ipm", "min_max", "min_sum")
"""Attacks in which all malicious clients send one message, made of what the honest ones send."""


def _alone(context: RoundContext, client: int, own: Tree, received: Mapping[str, Tensor]) -> Tree:
    """Returns what a malicious client makes of its own message."""
    kind, strength = context.attack.message, context.attack.strength
    if kind == "gaussian":
        return gaussian(own, received, strength or 0, context.streams.generator("attack", context.round, client))
    if kind == "scaled":
        return scaled(own, received, strength or 0)
    return scaled(own, received, -(1 if strength is None else strength))


def _agreed(context: RoundContext, honest: Sequence[Tree], received: Mapping[str, Tensor], malicious: int) -> Tree:
    """Returns the message of all malicious clients; ``malicious`` is how many of them there are in the round."""
    kind, strength = context.attack.message, context.attack.strength
    if kind == "min_max" or kind == "min_sum":
        return within_the_spread(honest, received, kind, context.attack.perturbation or "deviation")
    if kind == "ipm":
        return against_mean(honest, received, strength or 0)
    return a_little(honest, most_deviations(len(honest) + malicious, malicious) if strength is None else strength)
