"""What a local update moves: views of flat buffers, and the rule by which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch import Tensor

from rayfl.engine.fused import FusedSGD, is_exact
from rayfl.engine.sgd import SGD
from rayfl.engine.workspace import Workspace
from rayfl.params import Layout, leaves


@dataclass(frozen=True)
class Moved:
    """What a local update moves, and by which rule.

    Attributes:
        sgd: the rule.
        layout: where the tensors lie in the buffers.
        paths: which of them are moved, in the order in which ``sgd`` knows them.
        flat: the parameters.
        velocity: the momentum buffers; None where nothing has momentum.
        workspace: memory for gradients.
    """

    sgd: SGD
    layout: Layout
    paths: Sequence[str]
    flat: Tensor
    velocity: Tensor | None
    workspace: Workspace

    @cached_property
    def values(self) -> list[Tensor]:
        """Views that autograd knows nothing of, so that they may be changed in place."""
        return self._views(self.flat)

    @cached_property
    def momentum(self) -> list[Tensor]:
        """The same of the momentum buffers."""
        return [] if self.velocity is None else self._views(self.velocity)

    def _views(self, flat: Tensor) -> list[Tensor]:
        found = dict(leaves(self.layout.views(flat)))
        return [found[path] for path in self.paths]

    def entry(self, key: str) -> Moved:
        """What lies under one entry of the tree, in the same buffers."""
        places = [i for i, path in enumerate(self.paths) if path.startswith(f"{key}/")]
        return replace(self, sgd=self.sgd.of(places), paths=[self.paths[i] for i in places])

    def rule(self) -> tuple[Callable[[list[Tensor]], None], Callable[[], list[Tensor]] | None]:
        """What a step does with the gradients, and where it would best find them; the bits are the same everywhere."""
        if is_exact(self.layout.dtype, self.flat.device):
            fused = FusedSGD(self.sgd, self.layout, self.paths, self.flat, self.velocity, self.workspace)
            return fused.step, lambda: fused.room
        return partial(self.sgd.step, self.values, velocity=self.momentum), None
