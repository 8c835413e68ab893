"""All data sources that a configuration can name."""

from __future__ import annotations

from typing import Annotated, Union

from pydantic import BeforeValidator, Field

from rayfl.data.sources.custom import CustomSource, data_named_by_object
from rayfl.data.sources.graphs.subgraphs import NodeGraphSource, SyntheticSubgraphsSource
from rayfl.data.sources.graphs.tu_graphs import TuGraphsSource
from rayfl.data.sources.huggingface.source import HuggingFaceSource
from rayfl.data.sources.images.camelyon import Camelyon17Source
from rayfl.data.sources.images.cifar import Cifar10Source, Cifar100Source
from rayfl.data.sources.images.digit_five import DigitFiveSource
from rayfl.data.sources.images.digits import DigitsSource
from rayfl.data.sources.images.emnist import EmnistSource
from rayfl.data.sources.images.isic import Isic2019Source
from rayfl.data.sources.images.medmnist import MedMnistSource
from rayfl.data.sources.images.own_folder import ImageFolderSource
from rayfl.data.sources.images.published_folders import Cinic10Source, DomainNetSource, OfficeCaltechSource
from rayfl.data.sources.images.tiny_imagenet import TinyImageNetSource
from rayfl.data.sources.images.torchvision_source import TorchvisionSetSource
from rayfl.data.sources.images.vision import FashionMnistSource, MnistSource, SvhnSource
from rayfl.data.sources.interactions.source import InteractionsSource, SyntheticInteractionsSource
from rayfl.data.sources.made_up.graphs import SyntheticGraphsSource
from rayfl.data.sources.made_up.instructions import SyntheticInstructionsSource
from rayfl.data.sources.made_up.masks import SyntheticMasksSource
from rayfl.data.sources.made_up.people import SyntheticGroupsSource
from rayfl.data.sources.made_up.preferences import SyntheticPreferencesSource
from rayfl.data.sources.made_up.source import SyntheticLabelsSource, SyntheticSurvivalSource, SyntheticTextSource
from rayfl.data.sources.made_up.synthetic import SyntheticSource
from rayfl.data.sources.natural import LeafSource
from rayfl.data.sources.rows.arrays import ArraysSource
from rayfl.data.sources.rows.parquet import ParquetSource
from rayfl.data.sources.series.source import SeriesSource, SyntheticSeriesSource
from rayfl.data.sources.speech.speech_commands import SpeechCommandsSource
from rayfl.data.sources.tables.adult import AdultSource
from rayfl.data.sources.tables.har import HarSource
from rayfl.data.sources.tables.heart_disease import HeartDiseaseSource
from rayfl.data.sources.tables.pamap2 import Pamap2Source
from rayfl.data.sources.tables.small_tables import BreastCancerSource, DiabetesSource, WineSource
from rayfl.data.sources.tables.tcga_brca import TcgaBrcaSource
from rayfl.data.sources.texts.ag_news import AgNewsSource
from rayfl.data.sources.texts.instructions import InstructionsSource
from rayfl.data.sources.texts.preferences import PreferencesSource

DatasetConfig = Annotated[
    Union[  # noqa: UP007
        DigitsSource,
        DiabetesSource,
        BreastCancerSource,
        WineSource,
        HeartDiseaseSource,
        AdultSource,
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
        SyntheticGroupsSource,
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
