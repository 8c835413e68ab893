"""TARGET: the server makes samples of what its model knew before a stage, and clients have that model teach them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from algorithms.base import Clients, setting
from algorithms.fedavg import FineTuned
from algorithms.parts.input_bounds import bounds_of
from algorithms.parts.inversion import Inversion, Lessons, MakesInputs
from algorithms.parts.places import from_digits, in_digits, passes
from algorithms.parts.prototypes import class_counts
from algorithms.parts.requirements import without_stages
from algorithms.parts.transfer import distillation, limited
from rayfl.aggregation.exact_sum import Weighted
from rayfl.engine.client import Client
from rayfl.engine.round_context import RoundContext
from rayfl.engine.server import Server
from rayfl.objectives import Sum, function
from rayfl.params import Tree
from rayfl.tasks.base import Batch, Predictor, Task, Trait

_OFF = {"distillation_weight": (0,)}
_NO_STUDENT = {**_OFF, "boundary_weight": (0,)}


class TARGET(MakesInputs, FineTuned):
    """TARGET (exemplar-free distillation): a generator makes samples on which the model of before the stage teaches.

    For data that change over rounds (the section ``stages``). As a stage ends, the server trains a generator G that
    begins at random, for the model v that it has then. R times it draws noise z and labels y of the classes so far, B
    of each, and goes down, with Adam over z and the parameters of G,

        a CE(v(G(z)), y) + b BN(v, G(z)) - c mean omega KL(v(G(z)) || s(G(z)))

    BN is how far means and variances of what v's batch normalizations read are from their running ones. The student s
    begins at random, too, and omega is 1 where s and v choose the same class, else 0. After each draw but the first R_0
    s learns T^2 KL(softmax(v / T) || softmax(s / T)) on all samples that there are; before, c is 0. The R B samples
    G(z), with what v says of them, are D^s in the next stage, in which clients train the received model w on

        CE(w(x), y) + alpha KL(softmax(v(x') / tau) || softmax(w(x') / tau))

    on mini-batches of their own samples x and of x' of D^s. Under ``outputs: separate`` KL compares the classes alone
    that v knew, and CE all others, and those that the client has samples of. In the first stage, and without stages, it
    is federated averaging. With ``finetune_epochs`` each client fine-tunes the final model on CE.

    Server: model w, the classes so far, D^s. Client: nothing. Down: w and D^s. Up: w_k and n_k, which classes it has,
    and at the end of a stage the least and the largest value of its inputs, by channel. Evaluated: w (``global``).

    References:
        Zhang, Chen, Zhuang, Lyu: TARGET: Federated Class-Continual Learning via Exemplar-Free Distillation, ICCV 2023
        (arXiv 2303.06937); formulas of the authors' code.
    """

    name: Literal["target"] = "target"
    citation: ClassVar[str] = "Zhang et al., ICCV 2023"
    no_privacy: ClassVar[str] = "its clients send which classes they have, too"
    needs: ClassVar[Mapping[Trait, str]] = {"classes": "it makes samples of the classes of earlier stages"}
    no_private_norm: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("statistics", "all"), "the server makes samples for the whole model, and needs all of its layers for that"
    )
    server_keeps: ClassVar[str] = "w, classes, D^s"

    distillation_weight: float = setting(
        25.0, "alpha", "weight of the distillation on made samples; 0 is federated averaging", ge=0
    )
    temperature: float = setting(2.0, "tau", "temperature of that distillation", gt=0, unless=_OFF)
    outputs: Literal["all", "separate"] = setting(
        "all",
        "",
        "classes whose logits are compared: all; or in KL those of earlier stages, in CE all others and those present",
        unless=_OFF,
    )
    made_batch_size: int | None = setting(
        None,
        "",
        "made samples in a client's mini-batch; null: train.batch_size, or where that is null, too, as many as its own",
        ge=1,
        unless=_OFF,
    )
    draws: int = setting(40, "R", "how often noise is drawn as a stage ends", ge=1, unless=_OFF)
    made_per_draw: int = setting(256, "B", "samples that are made of a draw", ge=2, unless=_OFF)
    generator_steps: int = setting(10, "", "steps of G and z for each draw", ge=1, unless=_OFF)
    generator_lr: float = setting(2e-3, "", "learning rate of G", ge=0, unless=_OFF)
    noise_lr: float = setting(1e-2, "", "learning rate of z", ge=0, unless=_OFF)
    noise_dim: int = setting(256, "m", "numbers of noise for a sample", ge=1, unless=_OFF)
    generator_width: int = setting(64, "f", "maps of G's last layer but one; twice as many before", ge=1, unless=_OFF)
    label_weight: float = setting(0.5, "a", "weight of the cross-entropy of made samples", ge=0, unless=_OFF)
    statistics_weight: float = setting(
        10.0, "b", "weight of BN; without batch normalization it is 0", ge=0, unless=_OFF
    )
    boundary_weight: float = setting(
        1.0,
        "c",
        "weight of what the student does not know yet; 0: there is no student",
        ge=0,
        unless=_OFF,
    )
    first_draws: int = setting(20, "R_0", "draws before the student learns", ge=0, unless=_NO_STUDENT)
    student_steps: int = setting(400, "", "steps of the student after each later draw", ge=0, unless=_NO_STUDENT)
    student_lr: float = setting(0.2, "", "its learning rate", ge=0, unless={**_NO_STUDENT, "student_steps": (0,)})
    student_temperature: float = setting(
        20.0, "T", "temperature of its distillation", gt=0, unless={**_NO_STUDENT, "student_steps": (0,)}
    )

    @property
    def instead(self) -> str:
        return "flwf or fedewc"

    def remarks(self, context: RoundContext) -> Sequence[str]:
        return without_stages(context, "federated averaging")

    def init(self, task: Task, context: RoundContext) -> Tree:
        server = super().init(task, context)
        if not context.stages.active:
            return server
        return {**server, "classes": torch.zeros(task.network.head_shape[0])}

    def round(self, server: Tree, cohort: Sequence[int], clients: Clients) -> Tree:
        context, sent = clients.context, self.sent(server)
        held: Tree = {"model": server["model"]}
        if context.stages.active:
            held["classes"] = torch.zeros_like(server["classes"])
        found = clients.mean(self.guided_update, cohort, sent, also=self.remainder(held, cohort, clients))
        if not context.stages.active:
            return found
        found["classes"] = ((found["classes"] > 0) | (server["classes"] > 0)).to(server["classes"])
        if self.distillation_weight and context.stages.ends_after(context.round + 1):
            bounds = list(clients.map(self.bounds, cohort, {}).values())
            given = {
                **found,
                "low": torch.stack([one["low"] for one in bounds]).amin(0),
                "high": torch.stack([one["high"] for one in bounds]).amax(0),
            }
            found["made"] = clients.on_server(self.synthesized, given)
        return found

    def sent(self, server: Tree) -> Tree:
        return {name: server[name] for name in ("model", "made") if name in server}

    async def guided_update(self, client: Client, model: Tree, made: Tree | None = None) -> Weighted:
        """Trains the received model, on made samples as well if there are any.

        Args:
            client: k.
            model: w.
            made: ``x`` and ``logits`` of D^s, and which ``classes`` v knew.
        """
        present = class_counts(client.examples().y, client.task.network.head_shape[0]) > 0
        if made is None or not self.distillation_weight:
            trained = await client.train(model, self.objective)
        else:
            frozen: Tree = {"x": made["x"], "logits": made["logits"]}
            if self.outputs == "separate":
                known = made["classes"] > 0
                frozen |= {"known": known, "open": present | ~known}
            size = self.made_batch_size or client.context.train.batch_size or client.num_samples

            def draw(generator: np.random.Generator, steps: int) -> Tree:
                return {"places": in_digits(passes(generator, len(made["x"]), steps, size))}

            trained = await client.train(model, self.taught, frozen=frozen, draw=draw)
        client.publish(local=Predictor.of(trained))
        if not client.context.stages.active:
            return self.weighted(client, {"model": trained})
        return self.weighted(client, {"model": trained, "classes": present.float()})

    @property
    def taught(self) -> Sum:
        """What clients go down after the first stage."""
        return function(self._taught)

    def _taught(self, model: Any, batch: Batch, task: Task, frozen: Any, draw: Any) -> Tensor:
        found: Tensor = task.loss_of(limited(task.logits(model, batch), frozen.get("open")), batch)
        places = from_digits(draw["places"])
        # all of them are samples, which layers must know where the client's own are filled up
        whole = None if batch.mask is None else torch.ones_like(places, dtype=batch.mask.dtype)
        made = Batch(frozen["x"][places], frozen["logits"][places], whole)
        student, teacher = (limited(one, frozen.get("known")) for one in (task.logits(model, made), made.y))
        apart = distillation(student, teacher, made, self.temperature) / self.temperature**2
        return found + self.distillation_weight * apart

    async def bounds(self, client: Client) -> Tree:
        """The least and the largest value of the client's inputs, of images by channel, each in the shape of one."""
        low, high = bounds_of(client.examples().x)
        return {"low": low, "high": high}

    async def synthesized(self, server: Server, model: Tree, classes: Tensor, low: Tensor, high: Tensor) -> Tree:
        """D^s: ``x`` and ``logits`` of samples that are made for a model, and which ``classes`` they are of.

        Args:
            server: the server.
            model: v.
            classes: which there have been so far, 0 or 1, shape (C,).
            low: least value of each number of an input.
            high: the largest.
        """
        drawn = server.context.streams.generator("synthesis", server.round, server.id)
        known, inversion, lessons = classes.nonzero()[:, 0].tolist(), self._inversion, self._lessons
        teacher: Tree = {"models": {"0": model}, "weights": torch.ones_like(low.flatten()[:1])}
        generator = inversion.network(low, drawn)
        made: Tree = {"x": low.new_zeros(0, *low.shape)}
        student: Tree = {}
        for number in range(self.draws):
            judges = {**teacher, "student": student, "low": low, "high": high}
            generator, new = await inversion.made(server, generator, judges, known, drawn, number)
            x = torch.cat([made["x"], new])
            made = {"x": x, "logits": await server.outputs(_logits_of(model), x)}
            if self.boundary_weight and self.first_draws <= number < self.draws - 1:
                student = student or server.fresh_model()
                student = await lessons.learned(server, student, made, number, steps=self.student_steps)
        return {**made, "classes": classes}

    @property
    def _inversion(self) -> Inversion:
        return Inversion(
            size=self.made_per_draw,
            steps=self.generator_steps,
            generator_lr=self.generator_lr,
            noise_lr=self.noise_lr,
            noise_dim=self.noise_dim,
            width=self.generator_width,
            label_weight=self.label_weight,
            statistics_weight=self.statistics_weight,
            boundary_weight=self.boundary_weight,
            agreeing=True,
        )

    @property
    def _lessons(self) -> Lessons:
        return Lessons(self.student_lr, self.made_per_draw, self.student_temperature, weight_decay=1e-4)

    def served(self, server: Tree, context: RoundContext) -> tuple[Tree, Mapping[int, Tree]]:
        return {"model": server["model"]}, {}

    def update(self, trained: Tree, received: Tree, task: Task) -> Tensor | None:
        return super().update(trained["model"], received, task)


def _logits_of(model: Tree) -> Any:
    return lambda x, task: task.network.logits(model, x, training=False)
