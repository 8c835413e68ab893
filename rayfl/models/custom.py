"""A user's own model."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rayfl.errors import ModelError, RayflError, text_of
from rayfl.examples import InputSpec
from rayfl.models.anatomy import named_tensors
from rayfl.models.architecture import NAME
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.factorization import Factorizable
from rayfl.models.split import PixelModel, SplitModel, is_pixelwise
from rayfl.models.tryout import made_up_inputs, try_out, try_training
from rayfl.naming.objects import as_custom, import_object
from rayfl.naming.texts import ObjectPath

_LEFT_BEHIND = (
    "a pass in training mode changes what is in no client's model, so that all clients would share it; keep it in a "
    "buffer of floating-point numbers: self.register_buffer(name, torch.zeros(()))"
)
_HELD = (
    "it computes with tensors that are not the ones at the names of its parameters, so that these would be trained in "
    "vain: have forward take them from its layers (self.layer.weight), and not from a list, a closure or a cache"
)


class CustomModel(Factorizable):
    """A user's own model, made by a function that is named as my_package.my_module:factory.

    The function is called with an :class:`~rayfl.examples.InputSpec` and returns a
    :class:`~rayfl.models.base.ClassificationModel`, or any module whose last linear layer ``head`` names: the features
    are then the input of that layer, and the classifier block is the layer. Where pixels have classes, ``head`` may
    also name a convolution of one pixel, which makes logits of shape (b, C, H, W[, D]). It must draw its initial values
    from PyTorch's generator alone. The model is tried on made-up inputs when the experiment starts.
    """

    name: Literal["custom"] = Field(default="custom", description=NAME)
    factory: ObjectPath = Field(
        description="The function, as my_package.my_module:factory; it may also stand in the place of the name."
    )
    head: str | None = Field(
        default=None, description="Dotted name of the last linear layer, if the function returns an ordinary module."
    )

    def build(self, spec: InputSpec) -> ClassificationModel:
        return self._as_model(self._made(spec), spec)

    def _as_model(self, module: nn.Module, spec: InputSpec) -> ClassificationModel:
        """A module, which is changed, as features and head."""
        if isinstance(module, ClassificationModel):
            if self.head is not None:
                raise ModelError(f"{self._label}: head is {self.head!r}, but the model says itself which its head is")
            return module
        heads = {name: child for name, child in module.named_modules() if name and _is_head(child, spec)}
        if self.head is None or self.head not in heads:
            of_pixels = " (or a convolution of one pixel)" if spec.target == "mask" else ""
            found = f"there are {', '.join(heads)}: set model.head={list(heads)[-1]}" if heads else "there is none"
            raise ModelError(
                f"{self._label}: head is {self.head!r}, but must name the linear layer{of_pixels} that makes the "
                f"logits; {found}"
            )
        split = SplitModel if isinstance(heads[self.head], nn.Linear) else PixelModel
        return split(module, self.head)

    def network(self, spec: InputSpec) -> Network:
        """The stateless view of :meth:`build`, tried on made-up inputs.

        Raises:
            ModelError: the factory or its model fails, or the head's output is not what the model returns,
                or autograd refuses the model.
            ConfigError: the factory cannot be imported.
        """
        import_object(self.factory, "model")  # a module that draws numbers draws them now, and not as initial values
        network = Network(partial(self.build, spec))
        try:
            try_out(network, spec, self._label)
        except ModelError as error:
            if self.head is None or not self._applies(spec):
                raise
            raise ModelError(
                f"{error}. The model as it is made can be applied, but not in two parts, its layer {self.head!r} after "
                "all others: head must name the layer that makes the logits"
            ) from error
        try_training(network, spec, self._label)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(0)
            module, x = self._made(spec).float().eval(), made_up_inputs(spec, 0)
            try:
                made = module(x)
            except Exception as error:  # whatever the user's code raises
                raise ModelError(f"{self._label} cannot be applied to {spec.words()}: {text_of(error)}") from error
            if spec.target == "mask" and _convolves(module, self.head):
                made = made.movedim(1, -1)
            if not _is_made_by(network, made, x):
                # What the training passes of the trial have left behind is not in a network that has seen none.
                trained = _is_made_by(Network(partial(self.build, spec)), made, x)
                raise ModelError(f"{self._label}: {_LEFT_BEHIND if trained else self._otherwise_made}")
            if not _follows_its_tree(network, self._as_model(module, spec), x):
                raise ModelError(f"{self._label}: {_HELD}")
        return network if self.factorize is None else self._with_factors(spec)

    def _with_factors(self, spec: InputSpec) -> Network:
        network = super().network(spec)
        try_out(network, spec, self._label)
        try_training(network, spec, self._label)
        return network

    @property
    def _label(self) -> str:
        return f"model {self.factory}"

    @property
    def _otherwise_made(self) -> str:
        after = f" its layer {self.head!r} alone makes the logits and" if self.head else ""
        return (
            f"two calls with the same random numbers differ; see that{after} all initial values come from PyTorch's "
            "generator"
        )

    def _applies(self, spec: InputSpec) -> bool:
        """Returns whether the function's own model can be applied."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            try:
                self._made(spec).float().eval()(made_up_inputs(spec, 0))
            except Exception:  # whatever the user's code raises
                return False
        return True

    def _made(self, spec: InputSpec) -> nn.Module:
        factory = import_object(self.factory, "model")
        try:
            module = factory(spec)
        except RayflError:
            raise
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            raise ModelError(f"{self._label} fails for {spec}: {type(error).__name__}: {text_of(error)}") from error
        if not isinstance(module, nn.Module):
            raise ModelError(f"{self._label} returned a {type(module).__name__}; needed is a module of PyTorch")
        tensors = (*module.named_parameters(), *module.named_buffers())
        if lazy := [name for name, tensor in tensors if is_lazy(tensor)]:
            raise ModelError(
                f"{self._label}: lazy layers have no sizes yet ({', '.join(lazy)}); give the layers their sizes, which "
                "follow from spec.shape"
            )
        if imaginary := [name for name, tensor in module.named_parameters() if tensor.is_complex()]:
            raise ModelError(
                f"{self._label}: models are trained in float32, which has no imaginary part, and these parameters are "
                f"complex: {', '.join(imaginary)}; have two real ones in place of each (torch.view_as_complex)"
            )
        return module


def _is_made_by(network: Network, logits: Tensor, x: Tensor) -> bool:
    """Returns whether a network's initial model of the seed 0 makes these logits."""
    return torch.allclose(logits, network.logits(network.initialize(0), x), rtol=1e-4, atol=1e-5)


def _follows_its_tree(network: Network, model: ClassificationModel, x: Tensor) -> bool:
    """Returns whether a network makes of another tree what a model makes into whose own tensors this is written."""
    tree = {name: leaf * (1 + 0.1 * torch.rand_like(leaf)) for name, leaf in network.initialize(0).items()}
    for name, tensor in named_tensors(model).items():
        if name in tree:
            tensor.copy_(tree[name])
    expected = model(x)
    error = (network.logits(tree, x) - expected).abs().max()
    return not bool(error > 1e-3 * expected.abs().max())


def _is_head(layer: nn.Module, spec: InputSpec) -> bool:
    return isinstance(layer, nn.Linear) or (spec.target == "mask" and is_pixelwise(layer))


def _convolves(module: nn.Module, head: str | None) -> bool:
    return head is not None and is_pixelwise(module.get_submodule(head))


def named_by_object(content: Any) -> Any:
    """``{name: my_module:factory}`` as ``{name: custom, factory: my_module:factory}``; everything else as it is."""
    return as_custom(content, "factory")
