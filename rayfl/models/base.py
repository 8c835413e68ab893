"""The stateless view of a model that clients and server compute with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from rayfl.errors import ModelError
from rayfl.metrics.language import IGNORED
from rayfl.models.anatomy import draws, grouped, named_tensors, obstacle, owner_of, second_obstacle, stacked_at, under
from rayfl.models.bound import BoundModel
from rayfl.models.classification import ClassificationModel as ClassificationModel
from rayfl.models.contract import check_model
from rayfl.models.depths import Depths
from rayfl.models.layers.normalization import NORMALIZATION_LAYERS
from rayfl.models.units import Units, units_of


class Network(BoundModel):
    """A model as a function of its parameters, which live outside of it in a tree: a mapping from name to tensor.

    The tree holds every parameter that requires a gradient and every persistent floating-point buffer under its
    ``state_dict`` name (the first one where a tensor is shared). What is fixed is no part of it: parameters that
    require no gradient, integer and non-persistent buffers. The network has these, once for all trees, and they follow
    the tree from device to device. In training mode a module that updates a buffer writes into the bound tensor itself,
    so a caller that passes views of a larger vector finds the new running statistics there.

    The tensors of a tree are bound to one module that is reused: see :class:`~rayfl.models.bound.BoundModel` for what
    this means for graphs and threads.

    Args:
        factory: builds the model on the CPU; draws its initial values from PyTorch's global generator; an attribute.

    Attributes:
        parameter_names: all parameters that require a gradient, in the order of the model.
        buffer_names: the buffers of the tree in the order of the model.
        layers: ``parameter_names`` grouped by the module that owns them; stacked recurrent layers are one group.
        unstacked_layers: ``layers``, but every one of stacked recurrent layers is a group of its own.
        head_weight: name of the head's weight matrix, shape (C, f).
        head_shape: shape (C, f) of the head's weight matrix.
        head_is_fixed: whether the head's weight matrix is in no tree: it requires no gradient, or has factors.
        head_names: parameters of the head.
        body_names: all parameters but the head's.
        classifier_names: parameters of the classifier block.
        norm_names: parameters and buffers of normalization layers.
        vectorizable: whether the model can be trained under ``torch.func.vmap`` over a stack of trees.
        why_not_vectorizable: the reason, empty for a vectorizable model.
        batch_statistics: whether a layer normalizes by statistics of the mini-batch in training.
        batch_predictions: whether one does so in evaluation mode too.
        stochastic: whether a forward pass in training mode draws random numbers (active dropout).
        num_parameters: number of scalars over ``parameter_names``.
        feature_channels: see :class:`ClassificationModel`.
        rows_per_sample: how many rows a sample makes in the products of a network that runs all clients of a stack as
            one batch; else 0.
        rows_per_model: how many more rows a model makes in them in each pass, whatever the samples.
        output_rows: of how many positions the outputs should be in memory at a time, where outputs of a batch are
            large, and :meth:`classify` takes features of any positions, shape (rows, f); None: of any number.
        reading: makes of a tree what reads texts piece by piece
            (:class:`rayfl.models.pretrained.reading.Reading`); None for a network that reads them whole.
        groups: further kinds of parameters, by name of the kind.
        sites: inputs of the layers that have adapters, by the layer's name; empty for a network without any.
        padding: see :class:`ClassificationModel`.
        why_differentiable_once: why there is no second derivative, with the fix; empty where there is one.
        why_not_twice_stacked: why there is none under ``torch.func.vmap``; empty where there is one.

    Raises:
        ModelError: the head or classifier names do not fit the model, no parameter requires a gradient, or a batch
            normalization keeps a cumulative average (``momentum=None``), whose count would be shared by all clients.
    """

    rows_per_sample: int = 0
    rows_per_model: int = 0
    output_rows: int | None = None
    reading: Callable[[Mapping[str, Tensor]], object] | None = None
    groups: Mapping[str, tuple[str, ...]] = {}
    sites: Mapping[str, int] = {}
    why_differentiable_once: str = ""

    def __init__(self, factory: Callable[[], ClassificationModel]) -> None:
        self.factory = factory
        skeleton = self._made(0)
        super().__init__(skeleton)
        everything = dict(skeleton.named_parameters())
        self._drawn: tuple[int, dict[str, Tensor]] | None = None
        self._given: dict[int, dict[str, Tensor]] = {}
        self.layers = grouped(self.parameter_names, owner_of)
        recurrent = {name for name, module in skeleton.named_modules() if isinstance(module, nn.RNNBase)}
        self.unstacked_layers = grouped(
            self.parameter_names, lambda name: (owner_of(name), stacked_at(name) if owner_of(name) in recurrent else "")
        )
        self.head_is_fixed = self.head_weight not in self.parameter_names
        self.head_names = under(self.parameter_names, (skeleton.head_module,))
        self.body_names = tuple(name for name in self.parameter_names if name not in self.head_names)
        self.classifier_names = under(self.parameter_names, skeleton.classifier_modules)
        norms = {name for name, module in skeleton.named_modules() if isinstance(module, NORMALIZATION_LAYERS)}
        self.norm_names = tuple(name for name in self._tree_names if owner_of(name) in norms)
        self.num_parameters = sum(everything[name].numel() for name in self.parameter_names)
        self.feature_channels = skeleton.feature_channels
        self.padding = skeleton.padding
        chain = skeleton.chain() if "chain" in type(skeleton).__dict__ else ()
        fixed = any(name in self._fixed_parameters for layer in chain for name in (f"{layer}.weight", f"{layer}.bias"))
        self._chain = [] if fixed else [(f"{name}.weight", f"{name}.bias") for name in chain]
        self._biases = frozenset(bias for _, bias in self._chain if bias in self.parameter_names)
        self.stochastic = any(draws(module) for module in skeleton.modules())
        norms_of_batches = [module for module in skeleton.modules() if isinstance(module, _BatchNorm)]
        self.batch_statistics = bool(norms_of_batches)
        self.batch_predictions = any(not module.track_running_stats for module in norms_of_batches)
        self.why_not_vectorizable = next(filter(None, map(obstacle, skeleton.modules())), "")
        self.vectorizable = not self.why_not_vectorizable
        self.why_not_twice_stacked = next(filter(None, map(second_obstacle, skeleton.modules())), "")
        check_model(skeleton, everything, self.parameter_names)
        self.head_shape = tuple(skeleton.get_submodule(skeleton.head_module).weight.shape)  # type: ignore[arg-type]
        self._fixed = self._fixed_of(skeleton)

    def settle(self, seed: int) -> None:
        """Takes what is fixed from the initial model of a seed, so that every process has the same.

        Before, it is that of the seed 0.

        Args:
            seed: as for :meth:`initialize`.
        """
        if self._fixed_parameters or any(tensor.is_floating_point() for tensor in self._fixed.values()):
            model = self._made(seed)
            self._drawn = seed, self._tree_of(model)
            self._fixed, self._device = self._fixed_of(model), None

    def begin_from(self, seed: int, tree: Mapping[str, Tensor], where: str) -> None:
        """Takes a tree for the initial model of a seed.

        Args:
            seed: as for :meth:`initialize`.
            tree: the model.
            where: where it is from, for messages.

        Raises:
            ModelError: it is no model of this network.
        """
        own = self._drawn_for(seed)
        missing = sorted(own.keys() - tree.keys())
        unknown = sorted(tree.keys() - own.keys())
        other = sorted(name for name in own.keys() & tree.keys() if own[name].shape != tree[name].shape)
        if missing or unknown or other:
            raise ModelError(
                f"the model of {where} does not fit the section model: missing {missing[:3]}, unknown {unknown[:3]}, "
                f"of another shape {other[:3]}; name the same model, for the same classes"
            )
        self._given[seed] = {name: tree[name].detach().to("cpu", torch.float32) for name in self._tree_names}

    @cached_property
    def units(self) -> Units:
        """The hidden units; raises ModelError, naming the layer, where it is not known what they are."""
        return units_of(self._made(0).eval(), self.parameter_names)

    @cached_property
    def depths(self) -> Depths:
        """The stages by depth; raises ModelError, naming the layer, where there are none that are known."""
        return Depths(self._made(0).eval(), self._tree_names, self.head_weight.rpartition(".")[0])

    def save_memory(self) -> bool:
        """Has steps take less memory and more time from now on, where that was left open; False if nothing changes."""
        return False

    def refuse_vectorization(self, why: str) -> None:
        """Notes an obstacle to vmap that cannot be seen from the layers; the first one noted stays."""
        self.why_not_vectorizable = self.why_not_vectorizable or why
        self.vectorizable = False

    def initialize(self, seed: int) -> dict[str, Tensor]:
        """A fresh tree: float32 tensors on the CPU, a pure function of a seed below 2**64; draws from no generator."""
        tree = self._given[seed] if seed in self._given else self._drawn_for(seed)
        return {name: tensor.clone() for name, tensor in tree.items()}

    def _drawn_for(self, seed: int) -> dict[str, Tensor]:
        # Most clients ask for one and the same initial model, some every time they are evaluated.
        if self._drawn is None or self._drawn[0] != seed:
            self._drawn = seed, self._tree_of(self._made(seed))
        return self._drawn[1]

    def _made(self, seed: int) -> ClassificationModel:
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would also reseed the accelerators, which fork_rng(devices=[]) does not restore.
            torch.default_generator.manual_seed(seed)
            return self.factory()

    def _tree_of(self, model: ClassificationModel) -> dict[str, Tensor]:
        values = named_tensors(model)
        return {name: values[name].detach().to(torch.float32, copy=True) for name in self._tree_names}

    def _fixed_of(self, model: ClassificationModel) -> dict[str, Tensor]:
        values = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
        # Parameters are of the tree's type; buffers are as the model has made them.
        floats = {name for name in self._fixed_parameters if values[name].is_floating_point()}
        return {name: values[name].float() if name in floats else values[name] for _, _, name in self._fixed_slots}

    def logits(
        self, tree: Mapping[str, Tensor], x: Tensor, *, training: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """Logits of shape (b, C) for inputs (b, *input shape), differentiable with respect to the tree.

        Args:
            tree: tensors by name; plain, non-leaf and ``vmap``-batched tensors are all fine.
            x: a batch of inputs on the device of the tree.
            training: whether dropout is active and batch normalization uses (and records) batch statistics.
            mask: 1 for samples and 0 for padding, shape (b,), of which statistics of the batch know nothing; None if
                all are samples.

        Raises:
            ModelError: a name is missing from the tree or unknown to the model.
        """
        model = self._bind(tree, training, mask)
        with self._arithmetic():
            return self._widened(model.forward(self._laid_out(x)))

    def features_and_logits(
        self, tree: Mapping[str, Tensor], x: Tensor, *, training: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Features (b, f) and logits (b, C) from one forward pass; arguments and errors as for :meth:`logits`."""
        model = self._bind(tree, training, mask)
        with self._arithmetic():
            features = model.features(self._laid_out(x))
            return self._widened(features), self._widened(model.classify(features))

    def head_inputs_and_logits(
        self, tree: Mapping[str, Tensor], x: Tensor, *, training: bool = False, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the head reads, (b, f) for a head weight (C, f), and logits (b, C); arguments as for :meth:`logits`.

        The features of :meth:`features_and_logits` may lie before further layers.
        """
        model = self._bind(tree, training, mask)
        read: list[Tensor] = []
        hook = model.get_submodule(model.head_module).register_forward_pre_hook(lambda _, args: read.append(args[0]))
        try:
            with self._arithmetic():
                logits = self._widened(model.forward(self._laid_out(x)))
        finally:
            hook.remove()
        return self._widened(read[0]), logits

    def features(
        self, tree: Mapping[str, Tensor], x: Tensor, *, training: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        """Features of shape (b, f) alone; arguments and errors as for :meth:`logits`."""
        model = self._bind(tree, training, mask)
        with self._arithmetic():
            return self._widened(model.features(self._laid_out(x)))

    def classify(self, tree: Mapping[str, Tensor], features: Tensor, *, training: bool = False) -> Tensor:
        """Logits of shape (b, C) of given features (b, f); ``tree``, ``training`` and errors as for :meth:`logits`."""
        model = self._bind(tree, training)
        with self._arithmetic():
            return self._widened(model.classify(features))

    def token_losses(
        self,
        tree: Mapping[str, Tensor],
        x: Tensor,
        y: Tensor,
        *,
        training: bool = False,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Cross-entropies of a model whose outputs are logits at each position.

        Args:
            tree: as for :meth:`logits`, also the other arguments and errors.
            x: tokens, shape (b, T).
            y: the token that is asked for at each position, :data:`rayfl.metrics.language.IGNORED` where none is.
            training: see :meth:`logits`.
            mask: see :meth:`logits`.

        Returns:
            Of the shape of ``y``; 0 where none is asked for.
        """
        outputs = self.logits(tree, x, training=training, mask=mask)
        losses = cross_entropy(outputs.flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="none")
        return losses.view_as(y)

    def chain(self, tree: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor | None]] | None:
        """Weights and biases of the layers of a fully connected network in float32; None for any other.

        Raises:
            ModelError: a name is missing from the tree or unknown to the model.
        """
        if not self._chain or self._reduced is not None:
            return None
        if len(tree) != len(self._tree_names):
            raise self._misfit(tree)
        try:
            return [(tree[weight], tree[bias] if bias in self._biases else None) for weight, bias in self._chain]
        except KeyError:
            raise self._misfit(tree) from None
