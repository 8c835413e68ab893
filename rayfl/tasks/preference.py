"""The task preference: language models are aligned with pairs of answers, of which one is preferred."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.func import vmap

from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.metrics import Metric
from rayfl.metrics.language import IGNORED
from rayfl.metrics.preference import BETAS, Alignment, PreferenceLoss, PreferenceMeasures
from rayfl.models.base import Network
from rayfl.models.pretrained.language import LanguageNetwork
from rayfl.tasks.base import Batch, Model, NetworkTask, Predictor
from rayfl.tasks.section import TaskSection


class Preference(NetworkTask):
    """Alignment with pairs of answers; the loss is the mean of the pairs' (:class:`PreferenceLoss`).

    A sample is two texts, the preferred one first: ``x`` of shape (2, T), with the next tokens of the answers in ``y``,
    of the same shape. The network reads one text at a time, so that a sample is two of its inputs.

    Losses with a reference model ask the network with the tensors that the run begins with
    (``LanguageNetwork.beginning``): a pass without gradients over the same texts, one for a mini-batch, however many
    losses a function takes of it.

    Outputs are logits of shape (b, 2, T, V), predictions log-probabilities of that shape; both are made only where a
    method asks for them. Several models predict the mean of their probabilities.
    """

    name = "preference"
    target = "preference"
    inputs_per_sample = 2
    scored_by_predictions = False

    def __init__(
        self,
        network: Network,
        candidates: Sequence[Preference] = (),
        spec: InputSpec | None = None,
        objective: PreferenceLoss | None = None,
    ) -> None:
        super().__init__(network, candidates, spec)
        self._objective = PreferenceLoss() if objective is None else objective
        self._beginnings: dict[tuple[torch.device, torch.dtype], Mapping[str, Tensor]] = {}
        self._latest: tuple[weakref.ref[Batch], Tensor] | None = None

    @cached_property
    def measures(self) -> PreferenceMeasures:
        """Returns how pairs are scored."""
        return PreferenceMeasures()

    @property
    def by_sample(self) -> PreferenceMeasures | None:
        """Returns the measures, unless a subclass scores in its own way."""
        return self.measures if type(self).statistics is Preference.statistics else None

    def loss(self, model: Model, batch: Batch, training: bool = True) -> Tensor:
        """Returns the mean of the pairs' losses; at most ``output_rows`` rows of logits exist at a time."""
        if type(self).loss_of is not Preference.loss_of or type(self).logits is not Preference.logits:
            return super().loss(model, batch, training)
        dtype = next(iter(model.values())).dtype
        reference = self._of_reference(batch, dtype)  # before the pass whose tensors stay bound
        return self._mean(self._tokens(model, batch.x, batch.y, training), reference, batch)

    def loss_of(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the mean of the pairs' losses for given outputs, shape (b, 2, T, V)."""
        reference = self._of_reference(batch, outputs.dtype)
        return self._mean(_chosen(outputs.log_softmax(-1), batch.y), reference, batch)

    def logits(self, model: Model, batch: Batch, training: bool = True) -> Tensor:
        """Returns the network's outputs, shape (b, 2, T, V)."""
        return _in_pairs(self.network.logits(model, _texts(batch.x), training=training))

    def predicted(self, outputs: Tensor) -> Tensor:
        """Returns log-probabilities."""
        return outputs.log_softmax(-1)

    def mixed(self, predictions: Sequence[Tensor]) -> Tensor:
        """Returns the logarithm of the mean probability."""
        count = torch.tensor(float(len(predictions)))
        return torch.stack(list(predictions)).logsumexp(0) - count.log()

    def predictions(self, models: Sequence[Model], x: Tensor) -> Tensor:
        """Returns the ensemble's log-probabilities, shape (b, 2, T, V)."""
        members = [self.predicted(_in_pairs(self.network.logits(model, _texts(x)))) for model in models]
        return members[0] if len(members) == 1 else self.mixed(members)

    def statistics(self, predictor: Predictor, models: Sequence[Model], x: Tensor, y: Tensor) -> Tensor:
        """Returns the sums of the measures; the predictions of a method's own are made for few pairs at a time."""
        if not len(y):
            return self.measures.added(self.measures.by_sample(x.new_zeros(0, 2, dtype=torch.float64), y))
        task: Preference = predictor.task or self
        if predictor.combine is None:
            members = [task._tokens(model, x, y) for model in models]
            tokens = members[0] if len(members) == 1 else self.mixed(members)
        else:
            few = max((task.network.output_rows or y[0].numel()) // y[0].numel(), 1)
            parts = zip(torch.split(x, few), torch.split(y, few), strict=True)
            tokens = torch.cat(
                [_chosen(predictor.predictions(models, part, self, self.asked(own)), own) for part, own in parts]
            )
        return self.measures.added(self._scored(tokens, x, y))

    def outcomes(self, models: Model, x: Tensor, y: Tensor, stacked: bool) -> tuple[Tensor, ...]:
        """Returns the measures' summands by pair; the reference is one model for the pairs of all."""
        if not stacked:
            return self._scored(self._tokens(models, x, y), x, y)
        tokens = vmap(self._tokens)(dict(models), x, y)
        return self._scored(tokens.flatten(0, 1), x.flatten(0, 1), y.flatten(0, 1))

    def asked(self, y: Tensor) -> Tensor:
        """Returns the positions with a target."""
        return y != IGNORED

    def _tokens(self, model: Model, x: Tensor, y: Tensor, training: bool = False) -> Tensor:
        """Returns the log-probabilities of the answers' tokens, shape (b, 2, T); 0 where none is asked for."""
        return -_in_pairs(self.network.token_losses(model, _texts(x), _texts(y), training=training))

    def _scored(self, tokens: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Returns the measures' summands for the log-probabilities of n pairs' tokens, shape (n, 2, T)."""
        reference = self._tokens(self._beginning(x.device, tokens.dtype), x, y) if self._refers else None
        return self.measures.by_sample(torch.stack(self._of_pairs(tokens, reference, y), -1), y)

    def _mean(self, tokens: Tensor, reference: Tensor | None, batch: Batch) -> Tensor:
        return batch.mean(self._of_pairs(tokens, reference, batch.y)[0])

    def _of_pairs(self, tokens: Tensor, reference: Tensor | None, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the losses and margins of pairs, shape (n,) each."""
        known = None if reference is None else reference.sum(-1)
        return self._objective(tokens.sum(-1), (y != IGNORED).sum(-1), known)

    @property
    def _refers(self) -> bool:
        return self._objective.has_reference

    def _of_reference(self, batch: Batch, dtype: torch.dtype) -> Tensor | None:
        """Returns the reference's log-probabilities of a mini-batch's tokens, computed once for it."""
        if not self._refers:
            return None
        if self._latest is not None and self._latest[0]() is batch:
            return self._latest[1]
        with torch.no_grad():
            found = self._tokens(self._beginning(batch.x.device, dtype), batch.x, batch.y)
        self._latest = weakref.ref(batch), found
        return found

    def _beginning(self, device: torch.device, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Returns the tensors that the run begins with."""
        if (device, dtype) not in self._beginnings:
            assert isinstance(self.network, LanguageNetwork)  # asked for where the task is made
            tree = self.network.beginning()
            self._beginnings[device, dtype] = {name: leaf.to(device, dtype) for name, leaf in tree.items()}
        return self._beginnings[device, dtype]


def _texts(x: Tensor) -> Tensor:
    """The texts of pairs, shape (2 b, T), for pairs of shape (b, 2, T)."""
    return x.flatten(0, 1)


def _in_pairs(found: Tensor) -> Tensor:
    """The inverse of :func:`_texts`, for tensors of shape (2 b, ...)."""
    return found.view(-1, 2, *found.shape[1:])


def _chosen(predictions: Tensor, y: Tensor) -> Tensor:
    """The log-probabilities of the tokens that are asked for, shape (b, 2, T); 0 where none is."""
    asked = y != IGNORED
    found = predictions.gather(-1, y.where(asked, 0)[..., None])[..., 0]
    return found.where(asked, 0)


class PreferenceSection(TaskSection):
    """Alignment of language models with pairs of answers: DPO, IPO, SimPO or ORPO; preference accuracy and margin."""

    learns_from = "preference"

    name: Literal["preference"] = Field("preference", description="What is learned.")
    loss: Alignment = Field(
        "dpo", description="Of each pair: dpo or ipo, whose reference is the model of the run's start; simpo; or orpo."
    )
    beta: float | None = Field(
        None, gt=0, description="Factor of the difference of log-probabilities; null: 0.1 of dpo and ipo, 2 of simpo."
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Of dpo: share of pairs that are taken to be the wrong way round (cDPO)."
    )
    gamma: float = Field(0.5, ge=0, description="Of simpo: the margin that is aimed at.")
    odds_weight: float = Field(0.1, ge=0, description="Of orpo: weight of the odds ratio beside the likelihood.")

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> PreferenceSection:
        if self.beta is not None and self.loss not in BETAS:
            raise ValueError(f"beta is for loss={', '.join(BETAS)}: set one of these, or leave beta out")
        for option, loss in {"label_smoothing": "dpo", "gamma": "simpo", "odds_weight": "orpo"}.items():
            if getattr(self, option) != type(self).model_fields[option].default and self.loss != loss:
                raise ValueError(f"{option} is for loss={loss}: set that, or leave {option} out")
        return self

    def judged_by(self) -> tuple[Metric, ...]:
        """See the base class."""
        return PreferenceMeasures.metrics

    def maker(self, spec: InputSpec) -> Callable[[Network, Sequence[Any]], NetworkTask]:
        """See the base class."""
        beta = BETAS.get(self.loss, 1.0) if self.beta is None else self.beta
        objective = PreferenceLoss(self.loss, beta, self.label_smoothing, self.gamma, self.odds_weight)

        def make(network: Network, candidates: Sequence[Any]) -> NetworkTask:
            if not isinstance(network, LanguageNetwork):
                raise ConfigError(
                    "task: preference aligns a pretrained language model: set model.name=pretrained, with the folder "
                    "of one, or choose another task"
                )
            return Preference(network, candidates, spec, objective)

        return make
