"""How an experiment changes training images at random."""

from __future__ import annotations

import numpy as np

from rayfl.config.schema import ExperimentConfig
from rayfl.data.federated import FederatedDataset
from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.augmentation import Augmentation
from rayfl.data.images.views import Views
from rayfl.errors import ConfigError


def augmentation_of(config: ExperimentConfig, dataset: FederatedDataset) -> Augmentation | None:
    """Returns what the section ``augment`` does to training images; None if nothing changes.

    Raises:
        ConfigError: when the inputs are no images.
    """
    return _built(config.augment, dataset, config.task.views)


def views_of(config: ExperimentConfig, dataset: FederatedDataset) -> Views | None:
    """Returns the views of a sample that the method compares; None for a method that compares none.

    Raises:
        ConfigError: when the inputs are no images.
    """
    algorithm, spec = config.algorithm, dataset.spec
    wanted = algorithm.views(config.augment)
    if not wanted:
        return None
    if spec.kind != "image" or len(spec.shape) != 3 or spec.horizon:
        raise ConfigError(
            f"algorithm: {algorithm.name} cannot learn from {spec.words()}: it compares differently changed images "
            "(channels, rows, columns) of a sample. Choose another method, or data of images"
        )
    return Views(tuple(_built(one, dataset, 1) for one in wanted))


def _built(config: AugmentConfig, dataset: FederatedDataset, views: int) -> Augmentation | None:
    spec, preprocess = dataset.spec, dataset.preprocess
    if preprocess is None or not config.active:
        return config.build(spec, np.zeros(spec.shape[0], dtype=np.float32), views=views)
    return config.build(spec, preprocess.pixel(0), preprocess.pixel(1), views)
