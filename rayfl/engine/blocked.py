"""SGD along gradients that are sums of tensors, in batches that stay in the processor's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayfl.engine.fused import fused_step
from rayfl.engine.requests import ParameterGroup
from rayfl.engine.sgd import SGD
from rayfl.tape import Terms, in_batches


@dataclass(frozen=True)
class _Form:
    """What sums have in common that are made together.

    Attributes:
        rule: how their tensors are moved.
        own: the factor of the tensor itself in its gradient: further weight decay.
        factors: those of the other terms, in order.
        safe: whether no term is a tensor that the step moves.
    """

    rule: ParameterGroup
    own: float
    factors: tuple[float, ...]
    safe: bool


class BlockedSGD:
    """The update rule of one request; sums of tensors are made batch by batch, where they are used.

    A step of a large model is bound by memory: whatever is read or written as a whole takes about as long as a matrix
    product of a small mini-batch.

    Args:
        sgd: the rule.
        moved: the tensors, contiguous and unknown to autograd; changed in place by every step.
        leaves: the same tensors as terms know them.
        velocity: their momentum buffers; empty where no group has momentum.
    """

    def __init__(self, sgd: SGD, moved: Sequence[Tensor], leaves: Sequence[Tensor], velocity: Sequence[Tensor]) -> None:
        self._rules = {i: rule for rule, members in sgd.members.items() for i in members}
        self._moved = [tensor.view(-1) for tensor in moved]
        self._velocity = [tensor.view(-1) for tensor in velocity]
        self._places = {id(leaf): i for i, leaf in enumerate(leaves)}

    def step(self, gradients: Sequence[Terms]) -> None:
        """One step."""
        groups: dict[tuple[_Form, ...], list[list[int]]] = {}
        for bundle in self._bundles(gradients):
            groups.setdefault(tuple(self._form(i, gradients[i]) for i in bundle), []).append(bundle)
        for forms, bundles in groups.items():
            self._move_together(forms, bundles, gradients)

    def _bundles(self, gradients: Sequence[Terms]) -> list[list[int]]:
        """Places that belong together, as one's gradient reads the other, or both read one tensor."""
        bundle = {i: [i] for i in range(len(gradients))}
        readers: dict[int, int] = {}
        for i, terms in enumerate(gradients):
            for _, tensor in terms:
                other = self._places.get(id(tensor), readers.setdefault(id(tensor), i))
                if bundle[other] is not bundle[i]:
                    bundle[i] += bundle[other]
                    bundle |= dict.fromkeys(bundle[i], bundle[i])
        return list({id(members): members for members in bundle.values()}.values())

    def _form(self, place: int, terms: Terms) -> _Form:
        factors = [(factor, self._places.get(id(tensor))) for factor, tensor in terms]
        return _Form(
            self._rules[place],
            sum(factor for factor, of in factors if of == place),
            tuple(factor for factor, of in factors if of != place),
            all(of is None for _, of in factors if of != place),
        )

    def _move_together(
        self, forms: Sequence[_Form], bundles: Sequence[Sequence[int]], gradients: Sequence[Terms]
    ) -> None:
        """Steps bundles of equal forms: of each batch all sums first, then all tensors."""
        columns: list[list[Tensor]] = []
        for rank, form in enumerate(forms):
            places = [bundle[rank] for bundle in bundles]
            columns.append([self._moved[i] for i in places])
            columns.append([self._velocity[i] for i in places] if form.rule.momentum else columns[-1])
            others = [[self._value(t) for _, t in gradients[i] if self._places.get(id(t)) != i] for i in places]
            columns += [list(column) for column in zip(*others, strict=True)]
        for batch in in_batches(*columns):
            rows = iter(batch)
            ready = []
            for form in forms:
                parameters, velocity = next(rows), next(rows)
                ready.append((form, parameters, velocity, _sum(form, [next(rows) for _ in form.factors], parameters)))
            for form, parameters, velocity, sums in ready:
                fused_step(form.rule, parameters, sums, velocity, form.own)
                if form.rule.bounds is not None:
                    for parameter in parameters:
                        parameter.clamp_(*form.rule.bounds)

    def _value(self, tensor: Tensor) -> Tensor:
        place = self._places.get(id(tensor))
        return tensor if place is None else self._moved[place]


def _sum(form: _Form, terms: Sequence[list[Tensor]], like: list[Tensor]) -> list[Tensor]:
    """The sums of one batch; copies, unless each is one tensor that no step moves."""
    if not terms:
        return [torch.zeros_like(tensor) for tensor in like]
    if form.factors == (1,) and form.safe:
        return terms[0]
    if form.factors[0] == 1 and len(terms) > 1:
        sums, done = list(torch._foreach_add(terms[0], terms[1], alpha=form.factors[1])), 2
    else:
        sums, done = list(torch._foreach_mul(terms[0], form.factors[0])), 1
    for factor, column in zip(form.factors[done:], terms[done:], strict=True):
        torch._foreach_add_(sums, column, alpha=factor)
    return sums
