"""All data sources that a configuration can name."""

from __future__ import annotations

from typing import Annotated, Union

from pydantic import BeforeValidator, Field

from rayfl.data.sources.ag_news import AgNewsSource
from rayfl.data.sources.arrays import ArraysSource
from rayfl.data.sources.camelyon import Camelyon17Source
from rayfl.data.sources.cifar import Cifar10Source, Cifar100Source
from rayfl.data.sources.custom import CustomSource, data_named_by_object
from rayfl.data.sources.digit_five import DigitFiveSource
from rayfl.data.sources.digits import DigitsSource
from rayfl.data.sources.emnist import EmnistSource
from rayfl.data.sources.har import HarSource
from rayfl.data.sources.heart_disease import HeartDiseaseSource
from rayfl.data.sources.huggingface import HuggingFaceSource
from rayfl.data.sources.image_folder import ImageFolderSource
from rayfl.data.sources.image_folders import Cinic10Source, DomainNetSource, OfficeCaltechSource
from rayfl.data.sources.instructions import InstructionsSource
from rayfl.data.sources.interactions import InteractionsSource, SyntheticInteractionsSource
from rayfl.data.sources.isic import Isic2019Source
from rayfl.data.sources.made_up import SyntheticLabelsSource, SyntheticSurvivalSource, SyntheticTextSource
from rayfl.data.sources.made_up_graphs import SyntheticGraphsSource
from rayfl.data.sources.made_up_instructions import SyntheticInstructionsSource
from rayfl.data.sources.made_up_masks import SyntheticMasksSource
from rayfl.data.sources.made_up_preferences import SyntheticPreferencesSource
from rayfl.data.sources.medmnist import MedMnistSource
from rayfl.data.sources.natural import LeafSource
from rayfl.data.sources.pamap2 import Pamap2Source
from rayfl.data.sources.parquet import ParquetSource
from rayfl.data.sources.preferences import PreferencesSource
from rayfl.data.sources.series import SeriesSource, SyntheticSeriesSource
from rayfl.data.sources.small_tables import BreastCancerSource, DiabetesSource, WineSource
from rayfl.data.sources.speech_commands import SpeechCommandsSource
from rayfl.data.sources.subgraphs import NodeGraphSource, SyntheticSubgraphsSource
from rayfl.data.sources.synthetic import SyntheticSource
from rayfl.data.sources.tcga_brca import TcgaBrcaSource
from rayfl.data.sources.tiny_imagenet import TinyImageNetSource
from rayfl.data.sources.torchvision_set import TorchvisionSetSource
from rayfl.data.sources.tu_graphs import TuGraphsSource
from rayfl.data.sources.vision import FashionMnistSource, MnistSource, SvhnSource

DatasetConfig = Annotated[
    Union[  # noqa: UP007
        DigitsSource,
        DiabetesSource,
        BreastCancerSource,
        WineSource,
        HeartDiseaseSource,
        TcgaBrcaSource,
        MnistSource,
        FashionMnistSource,
        EmnistSource,
        SvhnSource,
        Cifar10Source,
        Cifar100Source,
        TinyImageNetSource,
        AgNewsSource,
        Cinic10Source,
        DigitFiveSource,
        OfficeCaltechSource,
        DomainNetSource,
        Camelyon17Source,
        Isic2019Source,
        MedMnistSource,
        TorchvisionSetSource,
        HarSource,
        Pamap2Source,
        SpeechCommandsSource,
        LeafSource,
        SyntheticSource,
        SyntheticLabelsSource,
        SyntheticSurvivalSource,
        SyntheticTextSource,
        SyntheticMasksSource,
        SyntheticInstructionsSource,
        SyntheticPreferencesSource,
        SyntheticInteractionsSource,
        SyntheticGraphsSource,
        SyntheticSeriesSource,
        SyntheticSubgraphsSource,
        ParquetSource,
        ArraysSource,
        ImageFolderSource,
        HuggingFaceSource,
        InstructionsSource,
        PreferencesSource,
        InteractionsSource,
        TuGraphsSource,
        SeriesSource,
        NodeGraphSource,
        CustomSource,
    ],
    Field(discriminator="name"),
    BeforeValidator(data_named_by_object),
]
