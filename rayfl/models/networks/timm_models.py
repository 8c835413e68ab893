"""Classification models of timm, by name."""

from __future__ import annotations

import importlib
from typing import Any, Literal

from pydantic import Field
from torch import nn

from rayfl.errors import ModelError
from rayfl.models.architecture import NAME
from rayfl.models.networks.torchvision_models import ImageClassifier
from rayfl.models.split import last_linear_layer
from rayfl.models.weights import load_weights
from rayfl.naming.spelling import nearest


class TimmModel(ImageClassifier):
    """Any classification model of timm (PyTorch Image Models) whose classifier is one linear layer.

    The features are the input of that layer; the classifier block is the part of the model that timm has it in. Grey
    images are repeated to three channels. The images are not normalized: with pretrained weights normalize them where
    they are read. Needs the package timm (``pip install 'rayfl[timm]'``).
    """

    name: Literal["timm"] = Field(default="timm", description=NAME)
    architecture: str = Field(description="timm's name of the model, such as convnext_atto or resnet26.")

    @property
    def architecture_name(self) -> str:
        return self.architecture

    def _module(self, classes: int) -> tuple[nn.Module, str | None]:
        timm = _timm()
        if not timm.is_model(self.architecture):
            known = timm.list_models()
            raise ModelError(f"model timm: timm has no model {self.architecture!r}{nearest(self.architecture, known)}")
        try:
            module: nn.Module = timm.create_model(
                self.architecture, pretrained=self.weights == "imagenet", num_classes=classes
            )
        except Exception as error:  # of the network, the cache, or a damaged file
            if self.weights != "imagenet":
                raise ModelError(
                    f"model timm: {self.architecture} cannot be made: {type(error).__name__}: {error}"
                ) from error
            raise ModelError(
                f"model timm: the weights of {self.architecture} are neither in the cache of huggingface_hub nor can "
                f"they be downloaded ({type(error).__name__}: {error}); name a file as weights"
            ) from error
        head = last_linear_layer(module)
        if head is None or module.get_classifier() is not module.get_submodule(head):  # type: ignore[operator]
            raise ModelError(
                f"model timm: the classifier of {self.architecture} is not one linear layer at the end, which methods "
                "work on; choose another model"
            )
        if self.weights not in (None, "imagenet"):
            load_weights(module, str(self.weights), head, f"model {self.name}")
        return module, head


def _timm() -> Any:
    try:
        return importlib.import_module("timm")
    except (ImportError, RuntimeError, AttributeError) as error:
        raise ModelError(
            f"model timm: the package timm cannot be imported ({error}); install it with `pip install 'rayfl[timm]'`"
        ) from error
