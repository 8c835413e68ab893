"""Classification models and the stateless view of them that clients and server compute with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from rayfl.errors import ModelError
from rayfl.metrics.language import IGNORED
from rayfl.models.anatomy import draws, grouped, named_tensors, obstacle, owner_of, slots, stacked_at, under
from rayfl.models.forward_pass import ForwardPass, is_stacked
from rayfl.models.normalization import NORMALIZATION_LAYERS
from rayfl.models.recurrent_weights import in_one_block
from rayfl.models.reduced_precision import reduced_precision
from rayfl.models.stackable import make_stackable


class ClassificationModel(nn.Module):
    """A classifier cut in two: features, then the layers that turn features into logits.

    ``features`` is the input of the first fully connected layer of a convolutional net (FedPHP, section 3.3),
    the last hidden activation of a multilayer perceptron and the last hidden state of a recurrent net.

    Attributes:
        head_module: dotted name of the last linear layer, the head of FedRep, FedPAC, pFedSim, FedBABU and FLOCO.
        classifier_modules: dotted names of the modules that form the classifier block, the larger head that the
            reference code of SuPerFed personalizes; contains ``head_module``.
        feature_channels: channels of the map that ``features`` flattens, channel by channel; None where the features
            are no map, so that each is a channel of its own.
        channels_last: whether images of several channels are laid out channels last for it in training on a CPU:
            convolutions and pooling then read and write whole vectors of the processor. Results differ by round-off.
            The layout is passed on to its maps, of which ``view`` (in place of ``flatten``) refuses some.
        padding: the token that fills texts up, where outputs do not change when columns at the end of a batch that hold
            nothing else are left out, and outputs at each position are left out with them; None: all must be there.
    """

    head_module: str = "head"
    classifier_modules: tuple[str, ...] = ("head",)
    feature_channels: int | None = None
    channels_last: bool = False
    padding: int | None = None

    def chain(self) -> tuple[str, ...]:
        """The dotted names of the linear layers, in order, where the model is no more than these on flattened inputs,
        with ReLU between them, and its features what the last of them reads; else none.

        A model that says so must define this method in its own class: a subclass may compute something else.
        """
        return ()

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """Features of shape (b, f) of a batch of inputs (b, *input shape)."""

    @abstractmethod
    def classify(self, features: Tensor) -> Tensor:
        """Logits of shape (b, C) of a batch of features (b, f)."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (b, C) of a batch of inputs (b, *input shape)."""
        return self.classify(self.features(x))


class Network:
    """A model as a function of its parameters, which live outside of it in a tree: a mapping from name to tensor.

    The tree holds every parameter that requires a gradient and every persistent floating-point buffer under its
    ``state_dict`` name (the first one where a tensor is shared). What is fixed is no part of it: parameters that
    require no gradient, integer and non-persistent buffers. The network has these, once for all trees, and they follow
    the tree from device to device. In training mode a module that updates a buffer writes into the bound tensor itself,
    so a caller that passes views of a larger vector finds the new running statistics there.

    The tensors of a tree are bound to one module that is reused, which avoids the per-call cost of
    ``torch.func.functional_call``. An instance therefore holds on to the last tree it saw (an enclosing
    ``vmap`` or autograd graph included) until :meth:`release`, and must not be shared between threads.

    Args:
        factory: builds the model on the CPU; draws its initial values from PyTorch's global generator.

    Attributes:
        parameter_names: all parameters that require a gradient, in the order of the model.
        buffer_names: the buffers of the tree in the order of the model.
        layers: ``parameter_names`` grouped by the module that owns them; stacked recurrent layers are one group.
        unstacked_layers: ``layers``, but every one of stacked recurrent layers is a group of its own.
        head_weight: name of the head's weight matrix, shape (C, f).
        head_shape: shape (C, f) of the head's weight matrix, which may be fixed.
        head_is_fixed: whether the head's weight matrix requires no gradient, and so is in no tree.
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
        output_rows: of how many positions the outputs should be in memory at a time, where outputs of a batch are
            large, and :meth:`classify` takes features of any positions, shape (rows, f); None: of any number.
        groups: further kinds of parameters, by name of the kind.
        sites: inputs of the layers that have adapters, by the layer's name; empty for a network without any.
        padding: see :class:`ClassificationModel`.
        why_differentiable_once: why there is no second derivative, with the fix; empty where there is one.

    Raises:
        ModelError: the head or classifier names do not fit the model, no parameter requires a gradient, or a batch
            normalization keeps a cumulative average (``momentum=None``), whose count would be shared by all clients.
    """

    rows_per_sample: int = 0
    output_rows: int | None = None
    groups: Mapping[str, tuple[str, ...]] = {}
    sites: Mapping[str, int] = {}
    why_differentiable_once: str = ""

    def __init__(self, factory: Callable[[], ClassificationModel]) -> None:
        self._factory = factory
        skeleton = self._made(0)
        self._skeleton = skeleton
        self._forward_pass = ForwardPass()
        make_stackable(skeleton, self._forward_pass)
        everything = dict(skeleton.named_parameters())
        parameters = {name: parameter for name, parameter in everything.items() if parameter.requires_grad}
        persistent = skeleton.state_dict().keys()
        buffers = {n: b for n, b in skeleton.named_buffers() if b.is_floating_point() and n in persistent}
        self._slots = slots(skeleton, {**parameters, **buffers})
        others = {n: t for n, t in (*everything.items(), *skeleton.named_buffers()) if n not in {*parameters, *buffers}}
        self._fixed_slots = slots(skeleton, others)
        self._fixed_parameters = tuple(name for name in everything if name not in parameters)
        self._device: torch.device | None = None
        self._reduced: torch.dtype | None = None
        self._drawn: tuple[int, dict[str, Tensor]] | None = None
        self._given: dict[int, dict[str, Tensor]] = {}
        self._recurrent = tuple(module for module in skeleton.modules() if isinstance(module, nn.RNNBase))
        for module in self._recurrent:
            # Without references RNNBase sees no change of weights. Otherwise it would call flatten_parameters,
            # which on CUDA moves the bound tensors to storage of its own and detaches them from the caller's vector.
            module._flat_weight_refs = [None] * len(module._flat_weights_names)

        self.parameter_names = tuple(parameters)
        self.buffer_names = tuple(buffers)
        self._tree_names = self.parameter_names + self.buffer_names
        self.layers = grouped(self.parameter_names, owner_of)
        recurrent = {name for name, module in skeleton.named_modules() if isinstance(module, nn.RNNBase)}
        self.unstacked_layers = grouped(
            self.parameter_names, lambda name: (owner_of(name), stacked_at(name) if owner_of(name) in recurrent else "")
        )
        self.head_weight = f"{skeleton.head_module}.weight"
        self.head_is_fixed = self.head_weight in others
        self.head_names = under(self.parameter_names, (skeleton.head_module,))
        self.body_names = tuple(name for name in self.parameter_names if name not in self.head_names)
        self.classifier_names = under(self.parameter_names, skeleton.classifier_modules)
        norms = {name for name, module in skeleton.named_modules() if isinstance(module, NORMALIZATION_LAYERS)}
        self.norm_names = tuple(name for name in self._tree_names if owner_of(name) in norms)
        self.num_parameters = sum(parameter.numel() for parameter in parameters.values())
        self.feature_channels = skeleton.feature_channels
        self.padding = skeleton.padding
        chain = skeleton.chain() if "chain" in type(skeleton).__dict__ else ()
        fixed = any(name in others for layer in chain for name in (f"{layer}.weight", f"{layer}.bias"))
        self._chain = [] if fixed else [(f"{name}.weight", f"{name}.bias") for name in chain]
        self._biases = frozenset(bias for _, bias in self._chain if bias in parameters)
        self._channels_last = skeleton.channels_last
        self.stochastic = any(draws(module) for module in skeleton.modules())
        norms_of_batches = [module for module in skeleton.modules() if isinstance(module, _BatchNorm)]
        self.batch_statistics = bool(norms_of_batches)
        self.batch_predictions = any(not module.track_running_stats for module in norms_of_batches)
        self.why_not_vectorizable = next(filter(None, map(obstacle, skeleton.modules())), "")
        self.vectorizable = not self.why_not_vectorizable
        self._check(skeleton, everything)
        self.head_shape = tuple(everything[self.head_weight].shape)
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

    @property
    def fixed_parameters(self) -> dict[str, Tensor]:
        """The parameters that require no gradient, by name, on the CPU: no part of any tree."""
        return {name: self._fixed[name] for name in self._fixed_parameters}

    def refuse_vectorization(self, why: str) -> None:
        """Notes an obstacle to vmap that cannot be seen from the layers; the first one noted stays."""
        self.why_not_vectorizable = self.why_not_vectorizable or why
        self.vectorizable = False

    def compute_in(self, dtype: torch.dtype) -> None:
        """Has forward and backward passes compute in a narrower type, wherever PyTorch's autocast does so.

        Trees stay what they are, which must be float32, and features and logits are float32.

        Args:
            dtype: such as ``torch.bfloat16``.
        """
        self._reduced = dtype

    @property
    def draws(self) -> int:
        """How many tensors of random numbers the step has had; set back, the next passes have the same ones again."""
        return self._forward_pass.calls

    @draws.setter
    def draws(self, count: int) -> None:
        self._forward_pass.calls = count

    def release(self) -> None:
        """Lets go of the last tree."""
        for tensors, key, _ in self._slots:
            tensors[key] = None
        for module in self._recurrent:
            module._flat_weights = []
        self._forward_pass.mask = self._forward_pass.key = None
        self._forward_pass.padded = False

    def begin_step(self, key: Tensor, padded: bool = False, call: int | None = 0) -> None:
        """Tells the layers of the random numbers of the next step, and of its padding; until :meth:`release`.

        Args:
            key: of dropout's masks (:func:`rayfl.models.forward_pass.keys_of`), on the device.
            padded: whether its mini-batches have padding; layers that depend on the batch then need a mask.
            call: from where the step's masks are counted; None goes on.
        """
        self._forward_pass.key, self._forward_pass.padded = key, padded
        if call is not None:
            self._forward_pass.calls = call

    def initialize(self, seed: int) -> dict[str, Tensor]:
        """A fresh tree: float32 tensors on the CPU, a pure function of the seed; global generators are untouched.

        Args:
            seed: an integer below 2**64.
        """
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
            return self._factory()

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

    def _bind(self, tree: Mapping[str, Tensor], training: bool, mask: Tensor | None = None) -> ClassificationModel:
        if len(tree) != len(self._tree_names):
            raise self._misfit(tree)
        try:
            for tensors, key, name in self._slots:
                tensors[key] = tree[name]
        except KeyError:
            raise self._misfit(tree) from None
        device = tree[self._tree_names[0]].device
        if device != self._device:
            self._bind_fixed(device)
            self._device = device
        if self._reduced is not None and tree[self.head_weight].dtype == torch.float64:
            raise ModelError(f"a model in float64 cannot compute in {self._reduced}: set engine.precision=float32")
        for module in self._recurrent:
            weights: list[Any] = [getattr(module, name) for name in module._flat_weights_names]
            if device.type != "cpu" and not is_stacked(weights[0]):
                weights = in_one_block(weights)
            module._flat_weights = weights
        if self._skeleton.training != training:
            self._skeleton.train(training)
        self._forward_pass.mask = mask
        return self._skeleton

    def _bind_fixed(self, device: torch.device) -> None:
        """Puts what is fixed in its places."""
        for tensors, key, name in self._fixed_slots:
            tensors[key] = self._fixed[name].to(device)

    def _arithmetic(self) -> AbstractContextManager[object]:
        """Returns the context in which the bound model computes."""
        if self._reduced is None:
            return nullcontext()
        assert self._device is not None  # a tree is bound
        return reduced_precision(self._reduced, self._device, bool(self._recurrent))

    def _laid_out(self, x: Tensor) -> Tensor:
        """Inputs of the bound model as it reads them fastest."""
        if not self._channels_last or not self._skeleton.training or x.device.type != "cpu" or x.shape[1] == 1:
            return x
        # vmap knows no layouts but one
        return x if is_functorch_wrapped_tensor(x) else x.contiguous(memory_format=torch.channels_last)

    def _widened(self, found: Tensor) -> Tensor:
        return found if self._reduced is None else found.float()

    def _misfit(self, tree: Iterable[str]) -> ModelError:
        missing, extra = sorted(set(self._tree_names).difference(tree)), sorted(set(tree).difference(self._tree_names))
        model = type(self._skeleton).__name__
        fixed = set(extra) & set(self._fixed_parameters)
        old = f"; {len(fixed)} of these require no gradient: an older version of rayfl trained them" if fixed else ""
        return ModelError(f"parameters do not fit the model {model}: missing {missing}, unknown {extra}{old}")

    def _check(self, skeleton: ClassificationModel, everything: Collection[str]) -> None:
        model = type(skeleton).__name__
        if self.head_weight not in everything:
            raise ModelError(
                f"model {model}: head_module is {skeleton.head_module!r}, but there is no such linear layer"
            )
        if not self.parameter_names:
            raise ModelError(
                f"model {model}: no parameter requires a gradient, so that there is nothing to train: leave "
                "requires_grad on for those that are to be trained"
            )
        for module in skeleton.classifier_modules:
            if not under(everything, (module,)):
                raise ModelError(f"model {model}: classifier_modules names {module!r}, which has no parameters")
        if self.head_weight not in under(everything, skeleton.classifier_modules):
            raise ModelError(f"model {model}: classifier_modules must contain the head {skeleton.head_module!r}")
        if any(isinstance(m, _BatchNorm) and m.track_running_stats and m.momentum is None for m in skeleton.modules()):
            raise ModelError(f"model {model}: batch normalization needs a momentum, a cumulative average has none")
