"""Stacked steps as matrices: one block of memory, and two or three batched products per step.

The block has the shape (N, rows, P): for each client the vectors of
:class:`rayfl.engine.stacks.step_matrices.StepMatrices`, as long as a model. Memory is double-buffered: a step reads one
block and writes the other, so that nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rayfl.engine.gradients.stacked_chain import compute_mlp_gradients
from rayfl.engine.gradients.stacked_gradients import StackedGradients
from rayfl.engine.stacks.step_matrices import StepMatrices
from rayfl.engine.steps.looped import step_keys
from rayfl.engine.updates.feed import of_step
from rayfl.engine.updates.flat import Layout
from rayfl.engine.updates.requests import TrainRequest
from rayfl.engine.updates.write_guard import WriteGuard
from rayfl.objectives import TRAINED
from rayfl.params import Tree, copies
from rayfl.tasks.base import Batch, Task
from rayfl.tasks.classification import Classification


class StackedTerms:
    """Steps of a stack on a sum of terms.

    Args:
        program: the matrices of the steps.
        ranked: the clients, those with most steps first.
        task: what is learned.
        device: where to compute.

    Attributes:
        phase: index of the block that holds the models.
    """

    def __init__(self, program: StepMatrices, ranked: Sequence[TrainRequest], task: Task, device: torch.device) -> None:
        self._program, self._ranked, self._task = program, ranked, task
        self.lent = WriteGuard({})  # no user code runs here
        first = _model(ranked[0].trainable, program.trained[0])
        self._layout = Layout.of(first)
        shape = (len(ranked), program.rows, self._layout.size)
        self._blocks = [torch.zeros(shape, dtype=self._layout.dtype, device=device) for _ in range(2)]
        self._fill()
        convert = partial(torch.as_tensor, dtype=self._layout.dtype, device=device)
        matrices, entering = program.matrices(ranked)
        self._only_adds = matrices.shape[-2:] == (1, 2) and bool((matrices[..., 0, 0] == 1).all())
        self._matrices = convert(matrices)
        self._entering = convert(entering) if program.measures else None
        along = program.along()
        self._weights = [convert((along @ m.weights).reshape(3, -1)) for m in program.measures]
        self._columns = self._segments()
        self._keys = step_keys(ranked, ranked[0].plan.steps, task, device)
        self._gradients = [
            StackedGradients(partial(_loss, task), task, first=not n) for n in range(len(program.points))
        ]
        self._views: dict[tuple[int, int, int], dict[str, Tensor]] = {}
        self.phase = 0
        mixed = slice(0, program.mixed)
        for read in [self._blocks[0]] if program.mixed else []:
            self._product(self._matrices[0, :, :, mixed], read, read, mixed)

    @torch.no_grad()
    def step(self, number: int | Tensor, active: int, x: Tensor, y: Tensor, mask: Tensor | None) -> None:
        """Updates the first ``active`` clients by a step on one mini-batch each."""
        program = self._program
        read, other = self._blocks[self.phase][:active], self._blocks[1 - self.phase][:active]
        key = None if self._keys is None else of_step(self._keys, number, active)
        for place, (point, row) in enumerate(zip(program.points, program.gradients, strict=True)):
            self._write_gradients(place, self._leaves(point, active), self._leaves(row, active), (key, x, y, mask))
        matrices = of_step(self._matrices[1:], number, active)
        if self._entering is not None:
            matrices = self._with_measured(matrices, of_step(self._entering[1:], number, active), read)
        self._product(matrices, read, other, slice(0, program.written))
        self.phase = 1 - self.phase

    def models_of(self, start: int, stop: int) -> list[Tree]:
        """Returns the trained trees of some clients, by rank, in new memory."""
        program, names = self._program, self._layout.paths
        stacks = [self._leaves(program.mixed + n, stop) for n in range(len(program.trained))]
        own = iter(copies([leaf for stack in stacks for name in names for leaf in stack[name][start:].unbind()]))
        columns = [[next(own) for _ in range(start, stop)] for _ in range(len(stacks) * len(names))]
        found: list[Tree] = []
        for client in zip(*columns, strict=True):
            leaf = iter(client)
            models = {key: {name: next(leaf) for name in names} for key in program.trained}
            found.append(models.get(TRAINED, models))
        return found

    def slots_of(self, rank: int) -> dict[str, dict[str, Tensor]]:
        """Returns one client's optimizer state by slot and path, in new memory."""
        kept = {
            f"{key}/{name}" if key else name: leaf.clone()
            for key, row in zip(self._program.trained, self._program.momenta, strict=True)
            if row is not None
            for name, leaf in self._client(rank, row).items()
        }
        return {"momentum": kept} if kept else {}

    def _fill(self) -> None:
        """Packs trained models, momenta and frozen models; the latter into both blocks, since no step writes them."""
        program = self._program
        for n, key in enumerate(program.trained):
            self._pack(self._blocks[0], program.mixed + n, [_model(one.trainable, key) for one in self._ranked])
            if (row := program.momenta[n]) is not None:
                for name, place in self._layout.places.items():
                    path = f"{key}/{name}" if key else name
                    for rank, one in enumerate(self._ranked):
                        stored = {} if one.optimizer_state is None else one.optimizer_state.slots.get("momentum", {})
                        if path in stored:
                            self._blocks[0][rank, row, place][: stored[path].numel()].copy_(stored[path].flatten())
        for name in program.frozen:
            for block in self._blocks:
                self._pack(block, program.row(name), [(one.frozen or {})[name] for one in self._ranked])

    def _pack(self, block: Tensor, row: int, models: Sequence[Mapping[str, Tensor]]) -> None:
        for name, place in self._layout.places.items():
            leaf = models[0][name]
            target = block[:, row, place.start : place.start + leaf.numel()]
            if all(model[name] is leaf for model in models):
                target.copy_(leaf.flatten())
            else:
                target.copy_(torch.stack([model[name].to(block.device).flatten() for model in models]))

    def _segments(self) -> list[slice]:
        """Returns the columns of each segment."""
        places = self._layout.places
        return [slice(places[names[0]].start, places[names[-1]].stop) for names in self._program.segments]

    def _product(self, matrices: Tensor, read: Tensor, write: Tensor, rows: slice) -> None:
        """Writes rows of one block as linear combinations of rows of the other (or of other rows of the same)."""
        for number, columns in enumerate(self._columns):
            if self._only_adds:
                # The library's product of one row takes twice as long.
                model, gradient = read[:, 0, columns], read[:, 1, columns]
                torch.addcmul(model, gradient, matrices[:, number, 0, 1:], out=write[:, 0, columns])
                continue
            torch.bmm(matrices[:, number], read[:, self._program.mixed :, columns], out=write[:, rows, columns])

    def _with_measured(self, matrices: Tensor, entering: Tensor, read: Tensor) -> Tensor:
        """Adds the effect of penalties whose slopes depend on inner products."""
        total: Any = 0
        for measure, weights in zip(self._program.measures, self._weights, strict=True):
            first, second = measure.rows
            pair = read[:, min(measure.rows) : max(measure.rows) + 1 : max(abs(second - first), 1)]
            products = torch.bmm(pair, pair.mT)
            one, two = (0, -1) if first < second else (-1, 0)
            slopes = measure.slopes(products[:, 0, -1], products[:, one, one], products[:, two, two])
            total = total + torch.stack(list(slopes), 1) @ weights
        change = total.view(len(read), 1, -1, read.shape[1] - self._program.mixed)
        found: Tensor = matrices + entering @ change
        return found

    def _write_gradients(
        self, place: int, model: dict[str, Tensor], buffers: dict[str, Tensor], batch: tuple[Any, ...]
    ) -> None:
        """Computes and writes the gradients of a loss; ``batch`` is the step's key, x, y and mask."""
        task, (_, x, y, mask) = self._task, batch
        layers = task.chain(model) if isinstance(task, Classification) else None
        if layers is not None and isinstance(task, Classification):
            compute_mlp_gradients(layers, task.chain(buffers) or [], x, y, mask)
            return
        with torch.enable_grad():
            made = self._gradients[place](model, list(buffers), *batch)
        torch._foreach_copy_(list(buffers.values()), made)

    def _leaves(self, row: int, active: int) -> dict[str, Tensor]:
        """Returns a row of the first clients as stacked models, by name."""
        key = (self.phase, row, active)
        if key not in self._views:
            flat = self._blocks[self.phase][:active, row]
            self._views[key] = {
                name: flat[:, start : start + shape.numel()].view(active, *shape)
                for name, shape, start in zip(
                    self._layout.paths, self._layout.shapes, self._layout.offsets, strict=True
                )
            }
        return self._views[key]

    def _client(self, rank: int, row: int) -> dict[str, Tensor]:
        return self._layout.leaves(self._blocks[self.phase][rank, row])


def _loss(task: Task, model: Tree, x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    return task.loss(model, Batch(x, y, mask))


def _model(tree: Mapping[str, Any], key: str) -> Mapping[str, Tensor]:
    found: Mapping[str, Tensor] = tree[key] if key != TRAINED else tree
    return found
