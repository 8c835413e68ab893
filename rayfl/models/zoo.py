"""All models that a configuration can name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from rayfl.examples import InputSpec
from rayfl.models.architecture import NAME, Architecture, Initialization
from rayfl.models.base import Network
from rayfl.models.custom import CustomModel, named_by_object
from rayfl.models.networks.bags import AttentionPooling
from rayfl.models.networks.convolutional import TFCNN, LeafCNN, ReddiCNN, TwoCNN
from rayfl.models.networks.forecasters import DLinear, LSTMForecaster, NLinear
from rayfl.models.networks.graphs import GCNModel, GINModel
from rayfl.models.networks.mobile import MobileNet
from rayfl.models.networks.patches import PatchTransformer
from rayfl.models.networks.perceptron import TabularMLP, TwoNN
from rayfl.models.networks.personalized import SimpleCNN, SuPerFedCNN, SuPerFedTwoCNN
from rayfl.models.networks.recommenders import MatrixFactorization, NeuralCF
from rayfl.models.networks.recurrent import CharLSTM
from rayfl.models.networks.residual import ResNet9
from rayfl.models.networks.sensors import HarCNN
from rayfl.models.networks.structural import StructuralGIN
from rayfl.models.networks.timm_models import TimmModel
from rayfl.models.networks.tokens import FastText, WindowModel
from rayfl.models.networks.torchvision_models import ResNet18, SqueezeNet, TorchvisionModel
from rayfl.models.networks.unet import UNetModel
from rayfl.models.networks.vgg import VGG, VGG9
from rayfl.models.networks.waveforms import M5
from rayfl.models.pretrained.section import PretrainedModel

__all__ = [
    "M5",
    "TFCNN",
    "VGG",
    "VGG9",
    "Architecture",
    "AttentionPooling",
    "Candidates",
    "CharLSTM",
    "CustomModel",
    "DLinear",
    "FastText",
    "GCNModel",
    "GINModel",
    "HarCNN",
    "Initialization",
    "LSTMForecaster",
    "LeafCNN",
    "MatrixFactorization",
    "MobileNet",
    "ModelConfig",
    "NLinear",
    "NeuralCF",
    "PatchTransformer",
    "PretrainedModel",
    "ReddiCNN",
    "ResNet9",
    "ResNet18",
    "SimpleCNN",
    "SqueezeNet",
    "StructuralGIN",
    "SuPerFedCNN",
    "SuPerFedTwoCNN",
    "TabularMLP",
    "TimmModel",
    "TorchvisionModel",
    "TwoCNN",
    "TwoNN",
    "UNetModel",
    "WindowModel",
]

_Union = Union[  # noqa: UP007
    TwoNN,
    TabularMLP,
    AttentionPooling,
    TwoCNN,
    LeafCNN,
    CharLSTM,
    FastText,
    WindowModel,
    MatrixFactorization,
    NeuralCF,
    GCNModel,
    GINModel,
    StructuralGIN,
    DLinear,
    NLinear,
    LSTMForecaster,
    PatchTransformer,
    SuPerFedCNN,
    SuPerFedTwoCNN,
    SimpleCNN,
    TFCNN,
    ReddiCNN,
    HarCNN,
    M5,
    VGG,
    VGG9,
    ResNet9,
    MobileNet,
    UNetModel,
    ResNet18,
    SqueezeNet,
    TorchvisionModel,
    PretrainedModel,
    TimmModel,
    CustomModel,
]
_Single = Annotated[_Union, Field(discriminator="name"), BeforeValidator(named_by_object)]


class Candidates(BaseModel):
    """Several architectures among which every client has one of its own, for methods that can mix them (FedMe)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["candidates"] = Field(default="candidates", description=NAME)
    candidates: tuple[_Single, ...] = Field(min_length=2, description="The architectures, numbered from 0.")

    def settled(self) -> Candidates:
        """The section with what every candidate finds out once."""
        found = tuple(one.settled() for one in self.candidates)
        return self if found == self.candidates else self.model_copy(update={"candidates": found})

    def told(self, class_names: Callable[[], Sequence[str]]) -> Candidates:
        """See :meth:`Architecture.told`."""
        found = tuple(one.told(class_names) for one in self.candidates)
        return self if found == self.candidates else self.model_copy(update={"candidates": found})

    def saving_memory(self) -> Candidates:
        """See :meth:`Architecture.saving_memory`."""
        found = tuple(one.saving_memory() for one in self.candidates)
        return self if found == self.candidates else self.model_copy(update={"candidates": found})

    def networks(self, spec: InputSpec) -> list[Network]:
        """One network per candidate; raises ModelError if a model does not fit the inputs."""
        return [candidate.network(spec) for candidate in self.candidates]


ModelConfig = Annotated[Union[_Union, Candidates], Field(discriminator="name"), BeforeValidator(named_by_object)]  # noqa: UP007
