"""Classification models of torchvision, by name."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from rayfl.errors import ModelError
from rayfl.examples import InputSpec
from rayfl.models.architecture import NAME
from rayfl.models.base import ClassificationModel, Network
from rayfl.models.factorization import Factorizable
from rayfl.models.layers.normalization import NORMALIZATION, Normalization, normalize_by
from rayfl.models.split import SplitModel, last_linear_layer
from rayfl.models.traced import Preparation
from rayfl.models.tryout import try_out
from rayfl.models.weights import load_weights
from rayfl.naming.spelling import nearest

_OPTIONS: dict[str, dict[str, Any]] = {
    # The heads that these two have for training only would make tuples of their outputs.
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}
_SQUEEZENET_HEAD = "classifier.1"
"""The 1x1 convolution that takes the place of the last linear layer in the only family without one."""


class ImageClassifier(Factorizable):
    """What models share that another library makes of a name: here torchvision, in ``timm_models`` timm."""

    weights: str | None = Field(
        default=None,
        description="Initial values: null for random ones; imagenet for the library's default weights, from its cache "
        "or the internet; or a file (safetensors, or torch.save of a state dict) that every node can read. A layer for "
        "the data set's classes is always new with imagenet, and with a file unless it has one of the same shape.",
    )
    norm: Normalization = Field(default="batch", description=NORMALIZATION)
    resize: int | None = Field(
        default=None, ge=1, description="Side in pixels to which images are resized (bilinear); null: as they come."
    )

    @model_validator(mode="after")
    def _weights_are_used(self) -> Self:
        if self.factorize is not None and self.weights is not None:
            raise ValueError("factorize: factors are drawn and take the place of weights: set weights to null")
        return self

    @property
    @abstractmethod
    def architecture_name(self) -> str:
        """The library's name of the model."""

    @abstractmethod
    def _module(self, classes: int) -> tuple[nn.Module, str | None]:
        """The library's module for ``classes`` classes, and the name of its last linear layer."""

    def build(self, spec: InputSpec) -> ClassificationModel:
        channels = self.image(spec)[0]
        if channels not in (1, 3):
            raise self.misfit(spec, "images of one or three channels")
        module, head = self._module(spec.num_classes)
        if normalize_by(module, self.norm) == 0 and self.norm != "batch":
            raise ModelError(
                f"model {self.name}: norm is {self.norm}, but {self.architecture_name} has no batch normalization; "
                "leave it out"
            )
        prepare = _Preparation(self.resize)
        if head is None:
            return _ConvolutionHeaded(module, prepare)
        return SplitModel(module, head, block=head.partition(".")[0], prepare=prepare)

    def network(self, spec: InputSpec) -> Network:
        """See the base class; it is tried on made-up inputs. Raises ModelError if it fails on them."""
        network = super().network(spec)
        try_out(network, spec, f"model {self.name}: {self.architecture_name} (resize={self.resize})")
        return network


class _TorchvisionModel(ImageClassifier):
    """What the models that come from torchvision share."""

    def _module(self, classes: int) -> tuple[nn.Module, str | None]:
        """torchvision's module for ``classes`` classes, and the name of its last linear layer."""
        models, name = torchvision_models(), self.architecture_name
        known = models.list_models(module=models)
        if name not in known:
            raise ModelError(f"model {self.name}: torchvision has no classifier {name!r}{nearest(name, known)}")
        make = partial(models.get_model, name)
        if self.weights != "imagenet":
            module: nn.Module = make(weights=None, num_classes=classes, **_OPTIONS.get(name, {}))
            head = last_linear_layer(module)
            if self.weights is not None:
                load_weights(module, self.weights, head or _SQUEEZENET_HEAD, f"model {self.name}")
            return module, head
        try:
            module = make(weights="DEFAULT", progress=False)
        except Exception as error:  # of the network, the cache, or a damaged file
            raise ModelError(
                f"model {self.name}: the weights of {name} are neither in torchvision's cache {torch.hub.get_dir()} "
                f"nor can they be downloaded ({type(error).__name__}: {error}); put the file into the cache's folder "
                "checkpoints, or name it as weights"
            ) from error
        if name in _OPTIONS:  # with weights torchvision refuses the options
            _without_training_heads(module)
        head = last_linear_layer(module)
        parent, _, leaf = (head or _SQUEEZENET_HEAD).rpartition(".")
        setattr(module.get_submodule(parent), leaf, _renewed(module.get_submodule(head or _SQUEEZENET_HEAD), classes))
        return module, head


def _without_training_heads(module: Any) -> None:
    """Takes the heads that are for training only out of GoogLeNet or Inception."""
    module.aux_logits = False
    for name in ("aux1", "aux2", "AuxLogits"):
        if hasattr(module, name):
            setattr(module, name, None)


def _renewed(layer: nn.Module, classes: int) -> nn.Module:
    """A new last layer for ``classes`` classes."""
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, classes, layer.bias is not None)
    assert isinstance(layer, nn.Conv2d)
    new = nn.Conv2d(layer.in_channels, classes, 1)
    nn.init.normal_(new.weight, std=0.01)  # as torchvision initializes the last convolution of SqueezeNet
    nn.init.constant_(new.bias, 0)  # type: ignore[arg-type]
    return new


class TorchvisionModel(_TorchvisionModel):
    """Any classification model of torchvision, with its last linear layer made for the data set's classes.

    The features are the input of that layer; the classifier block is the part of the model that torchvision has it in
    (``fc``, ``classifier``, ``heads``). Grey images are repeated to three channels. The images are not normalized:
    with pretrained weights normalize them where they are read.
    """

    name: Literal["torchvision"] = Field(default="torchvision", description=NAME)
    architecture: str = Field(description="torchvision's name of the model, such as resnet18 or mobilenet_v3_small.")

    @property
    def architecture_name(self) -> str:
        return self.architecture


class ResNet18(_TorchvisionModel):
    """torchvision's ResNet-18 (He et al., 2016): 11,181,642 parameters for 10 classes.

    FLOCO (Grinwald et al., 2024) starts it from ``weights: imagenet``. The features are the 512 averaged channels.
    """

    name: Literal["resnet18"] = Field(default="resnet18", description=NAME)

    @property
    def architecture_name(self) -> str:
        return "resnet18"


class SqueezeNet(_TorchvisionModel):
    """torchvision's SqueezeNet (Iandola et al., 2016): with 62 classes 767,230 (1.0) or 754,302 (1.1) parameters.

    FLOCO (Grinwald et al., 2024) starts it from ``weights: imagenet``, without saying which version. The head is the
    1x1 convolution of the original, as a linear layer that is applied to every pixel of the last map and followed by
    ReLU and the mean over pixels; the features are that map, flattened.
    """

    name: Literal["squeezenet"] = Field(default="squeezenet", description=NAME)
    version: Literal["1.0", "1.1"] = Field(default="1.1", description="Which of the two nets.")

    @property
    def architecture_name(self) -> str:
        return f"squeezenet{self.version.replace('.', '_')}"


class _Preparation(Preparation):
    """Grey images repeated to three channels, then all images resized."""

    def __init__(self, side: int | None) -> None:
        super().__init__()
        self._side = side

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        if self._side is None:
            return x
        return functional.interpolate(x, (self._side, self._side), mode="bilinear", antialias=True)


class _ConvolutionHeaded(ClassificationModel):
    """torchvision's SqueezeNet, its last convolution a linear layer on pixels."""

    def __init__(self, module: Any, prepare: nn.Module) -> None:
        super().__init__()
        self.prepare = prepare
        self.body = module.features
        self.dropout, old = module.classifier[0], module.classifier[1]
        self.feature_channels = old.in_channels
        self.head = nn.Linear(old.in_channels, old.out_channels)
        with torch.no_grad():
            self.head.weight.copy_(old.weight.flatten(1))
            self.head.bias.copy_(old.bias)

    def features(self, x: Tensor) -> Tensor:
        maps: Tensor = self.body(self.prepare(x))
        return maps.flatten(1)

    def classify(self, features: Tensor) -> Tensor:
        pixels = self.dropout(features).unflatten(1, (self.head.in_features, -1)).transpose(1, 2)
        return functional.relu(self.head(pixels)).mean(1)


def torchvision_models() -> Any:
    """The module ``torchvision.models``; raises ModelError if it cannot be imported."""
    # A torchvision built for another torch fails on import with RuntimeError ("operator torchvision::nms does not
    # exist") or AttributeError ("partially initialized module 'torchvision' has no attribute 'extension'").
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError, AttributeError) as error:
        try:
            found = f"torchvision {version('torchvision')}"
        except PackageNotFoundError:
            found = "no torchvision"
        raise ModelError(
            f"the model comes from torchvision, which cannot be imported ({error}); {found} is installed beside torch "
            f"{torch.__version__}; install matching versions, e.g. `pip install --upgrade torch torchvision`"
        ) from error
