"""From a data source and the sections around it to the clients of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from rayfl.data.federated import FederatedDataset
from rayfl.data.files.natural_file import open_natural
from rayfl.data.images.moments import Moments, moments_of
from rayfl.data.images.transform import TransformConfig
from rayfl.data.partitions.assignment import FilePartition
from rayfl.data.partitions.base import NaturalPartition
from rayfl.data.partitions.grouped import DomainsPartition
from rayfl.data.partitions.holdout import HoldoutConfig
from rayfl.data.partitions.long_tail import LongTail
from rayfl.data.partitions.noise import LabelNoise
from rayfl.data.partitions.owners import places_by_owner
from rayfl.data.partitions.registry import Partition
from rayfl.data.sources.base import NaturalPath, Samples, Source
from rayfl.data.sources.custom import CustomSource
from rayfl.data.sources.natural import NaturalDataset
from rayfl.data.sources.preparation.pooled import PooledDataset
from rayfl.data.tables import TabularDataset
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec, Target
from rayfl.randomness import RandomStreams

_SHOWN = 3


class Aim(Protocol):
    """What an experiment learns."""

    @property
    def target(self) -> Target:
        """Returns what must be known of samples."""
        ...


class DataSections(Protocol):
    """The sections of a configuration that say what the clients hold."""

    @property
    def dataset(self) -> Source: ...
    @property
    def task(self) -> Aim: ...
    @property
    def partition(self) -> Partition: ...
    @property
    def holdout(self) -> HoldoutConfig: ...
    @property
    def long_tail(self) -> LongTail: ...
    @property
    def noise(self) -> LabelNoise: ...
    @property
    def transform(self) -> TransformConfig: ...


def open_dataset(config: DataSections, streams: RandomStreams) -> FederatedDataset:
    """The clients; samples are read when a client is loaded.

    Raises:
        DataError: when the source cannot be read or divided as asked.
        ConfigError: when the sections do not go together.
    """
    opened = config.dataset.aimed_at(config.task.target).open(streams)
    if isinstance(opened, FederatedDataset):
        _natural(config)
        _check_untouched(config)
        opened.own_splits = True
        return opened
    if opened.table is not None and config.transform.normalize != "none":
        raise ConfigError(
            "transform.normalize: the inputs are a table's columns, and what is missing in them, and which are "
            "categories, could no longer be told; leave it out, and set dataset.standardize=global (or client)"
        )
    divided = _divided(config, opened, streams)
    dataset: FederatedDataset = divided if opened.table is None else TabularDataset(divided, opened.table)
    dataset.content_hash = opened.content
    dataset.sound = True  # sources look at their samples when they make or open them
    untrained = divided.untrained if isinstance(divided, NaturalDataset) else ()
    dataset.remarks = lambda: [
        *(found.text for found in opened.remarks() if config.transform.normalize == "none" or not found.scale),
        *([_on_untrained(untrained)] if untrained else []),
    ]
    return dataset


def _on_untrained(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN])) + (", ..." if len(names) > _SHOWN else "")
    return f"clients that have test samples and none to train on are left out, {len(names)} of the data's: {shown}"


def _divided(config: DataSections, opened: Samples | NaturalPath, streams: RandomStreams) -> FederatedDataset:
    if isinstance(opened, NaturalPath):
        natural = _natural(config)
        _check_own_clients(config)
        _check_noise(config, open_natural(opened.path).header.spec)
        if config.holdout.test is not None and open_natural(opened.path).header.own_test:
            raise ConfigError(
                f"holdout.test: dataset {config.dataset.name!r} comes with its own test part; "
                "set holdout.test=null (holdout.validation is taken from the train part)"
            )
        return NaturalDataset(
            opened.path,
            config.holdout.validation,
            streams,
            config.holdout.public,
            config.noise,
            config.transform,
            config.holdout.test,
            natural,
        )
    return _pooled(config, opened, streams)


def _pooled(config: DataSections, samples: Samples, streams: RandomStreams) -> PooledDataset:
    made = _of_samples(config, samples, streams)
    made.domains, made.domain, made.group = samples.domains, samples.domain, samples.group
    return made


def _of_samples(config: DataSections, samples: Samples, streams: RandomStreams) -> PooledDataset:
    x, y, spec = samples.x, samples.y, samples.spec
    if spec.target == "forecast":
        raise ConfigError(
            f"dataset {config.dataset.name!r}: samples would be held out by chance, and windows of series overlap in "
            "time: return a rayfl.data.series.SeriesDataset, which cuts and divides series in the order of time"
        )
    _check_noise(config, spec)

    def moments() -> Moments:
        if samples.moments is not None:
            return samples.moments
        assert isinstance(x, np.ndarray)  # graphs have none
        return moments_of(x)

    preprocess = config.transform.build(spec, moments)
    if isinstance(config.partition, FilePartition):
        if config.long_tail.active:
            raise ConfigError(
                "long_tail: partition.path says which samples clients have, and those of a run with a long tail have "
                "one already; leave out the section long_tail"
            )
        if config.holdout != HoldoutConfig():
            raise ConfigError("holdout: partition.path brings its own splits; leave out the section, or set holdout={}")
        splits, public = config.partition.splits(len(y))
        return PooledDataset(x, y, spec, splits, config.holdout, streams, config.noise, public, preprocess)
    names = None
    if samples.clients is None:
        divided_by, kept = _divided_by(config, samples), np.arange(len(y))
        if config.long_tail.active:
            _check_classes(config, spec)
            kept = config.long_tail.divided(y, spec.num_classes, streams).kept
            divided_by = divided_by[kept]
        parts = [kept[part] for part in config.partition.assign(divided_by, streams)]
        if isinstance(config.partition, DomainsPartition):
            names = config.partition.names([samples.domains[number] for number in np.unique(divided_by)])
    else:
        natural = _natural(config)
        _check_own_clients(config)
        owners, owner = np.unique(samples.clients, return_inverse=True)
        places = places_by_owner(owner, len(owners))
        kept = natural.chosen(np.array([len(own) for own in places]), streams)
        names = [str(owners[client]) for client in kept]
        parts = [places[client] for client in kept]
    return PooledDataset(x, y, spec, parts, config.holdout, streams, config.noise, None, preprocess, names)


def _divided_by(config: DataSections, samples: Samples) -> np.ndarray:
    """Returns what the partition divides samples by, of shape (N,).

    Raises:
        ConfigError: it needs classes, domains or groups of people, and the data have none.
    """
    y, spec = samples.y, samples.spec
    if isinstance(config.partition, DomainsPartition):
        if samples.domain is None:
            raise ConfigError(
                f"partition.name: 'domains' divides samples by their domains, and those of dataset "
                f"{config.dataset.name!r} have none: choose digit_five, office_caltech, domainnet, image_folder, "
                "tu_graphs with several sets, or your own function that returns Samples with domains, or another "
                "partition"
            )
        return samples.domain
    if getattr(config.partition, "by", "class") == "group":
        if (group := samples.grouped()) is None:
            raise ConfigError(
                f"partition.by=group divides samples by groups of people, and dataset {config.dataset.name!r} does not "
                "say of which one each is: name the column that does (dataset.group), choose synthetic_groups or adult "
                "(docs/group-fairness.md), or leave the option out"
            )
        return group
    reads = getattr(config.partition, "reads", "classes")
    if spec.target == "class" or isinstance(config.partition, NaturalPartition):
        return y
    if reads == "nothing":
        return np.zeros(len(y), dtype=np.int64)
    if reads == "order" and spec.target == "values" and spec.num_classes == 1:
        return y[:, 0]
    ordered = ", pathological (which sorts by the number)" if spec.target == "values" and spec.num_classes == 1 else ""
    raise ConfigError(
        f"partition.name: {config.partition.name!r} divides samples by their classes, and those of dataset "
        f"{config.dataset.name!r} have {_one_at_each_pixel(spec) or 'none'}: choose iid{ordered}, partition.path, or "
        "data that name their clients"
    )


def _check_noise(config: DataSections, spec: InputSpec) -> None:
    if config.noise.active and spec.target != "class":
        raise ConfigError(
            f"noise: wrong labels are those of another class, and samples of dataset {config.dataset.name!r} have "
            f"{_one_at_each_pixel(spec) or 'no class'}: leave out the section noise"
        )


def _check_classes(config: DataSections, spec: InputSpec) -> None:
    if spec.target != "class":
        raise ConfigError(
            f"long_tail: it leaves out samples by their class, and those of dataset {config.dataset.name!r} have "
            f"{_one_at_each_pixel(spec) or 'none'}: leave out the section long_tail"
        )


def _check_own_clients(config: DataSections) -> None:
    if config.long_tail.active:
        raise ConfigError(
            f"long_tail: the samples of dataset {config.dataset.name!r} already belong to clients, of which some could "
            "be left without any; leave out the section long_tail, or choose data that a partition divides"
        )


def _one_at_each_pixel(spec: InputSpec) -> str:
    return {"mask": "one at each pixel", "nodes": "one of each node"}.get(spec.target, "")


def _natural(config: DataSections) -> NaturalPartition:
    if not isinstance(config.partition, NaturalPartition):
        raise ConfigError(
            f"partition.name: {config.partition.name!r} cannot divide dataset {config.dataset.name!r}, "
            "whose samples already belong to clients; set partition=natural"
        )
    return config.partition


def _check_untouched(config: DataSections) -> None:
    """Clients and splits that a source makes by itself, or a user's own object, are used as they are."""
    defaults = (
        ("holdout", HoldoutConfig()),
        ("long_tail", LongTail()),
        ("noise", LabelNoise()),
        ("transform", TransformConfig()),
        ("partition", NaturalPartition()),
    )
    for section, default in defaults:
        if getattr(config, section) != default:
            what = f"dataset {config.dataset.name!r}, which has clients and splits of its own,"
            if isinstance(config.dataset, CustomSource):
                what = "a FederatedDataset of your own"
            given, usual = (one.model_dump(mode="json") for one in (getattr(config, section), default))
            fix = " ".join(
                f"{section}.{name}={'null' if value is None else value}"
                for name, value in usual.items()
                if given.get(name, value) != value
            )
            raise ConfigError(
                f"{section}: {what} is used as it is; leave out the section {section}{fix and f' (or set {fix})'}"
            )
