"""Presets of the papers' tables: what they hold, and that each can be run."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.registry import Experiment
from rayfl.cli.catalog import catalog
from rayfl.config.loading import load_config, preset_names, preset_text
from rayfl.config.paper_presets import method_row, method_settings, paper_presets
from rayfl.data.partitions.base import NaturalPartition
from rayfl.engine.round_context import RoundContext
from rayfl.errors import ConfigError
from rayfl.examples import InputSpec
from rayfl.models.networks.perceptron import TwoNN
from rayfl.randomness import RandomStreams
from rayfl.tasks.classification import Classification

PRESETS = paper_presets()
OWN = {"mnist-pathological", "femnist", "femnist-3550", "shakespeare", "ag-news", "ixi-tiny", "quickstart"} | {
    *(
        f"quickstart-{task}"
        for task in (
            "regression",
            "semi-supervised",
            "continual",
            "multilabel",
            "text",
            "tabular",
            "segmentation",
            "survival",
            "self-supervised",
            "anomaly",
            "recommendation",
            "graphs",
            "nodes",
            "lora",
            "lm",
            "clip",
            "preference",
            "forecasting",
            "long-tail",
            "groups",
        )
    ),
    "vit-cifar100-lora",
    "flowertune-alpaca",
}
WORKLOADS = {
    *("workload-pflresearch-cifar10", "workload-blazefl-cifar10", "workload-flute-femnist", "workload-flute-cifar100"),
    "workload-flute-shakespeare",
}
SINGLE = {
    *(
        "stackoverflow-nwp",
        "reddit",
        "sent140",
        "celeba",
        "fashion-mnist",
        "svhn",
        "cinic10",
        "digit-five",
        "synthetic",
    ),
    *("tff-shakespeare", "tff-emnist", "tff-cifar100"),
    *("office-caltech", "domainnet", "camelyon17", "isic2019", "heart-disease", "tcga-brca", "camelyon16"),
    *("kits19", "lidc", "har", "pamap2", "medmnist", "speech-commands"),
}
SIZES = {"mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000, "emnist": 697_932, "tiny_imagenet": 100_000}
SIZES |= {"fashion_mnist": 60_000, "ag_news": 120_000}
SPECS = {
    "mnist": InputSpec("image", (1, 28, 28), 10),
    "fashion_mnist": InputSpec("image", (1, 28, 28), 10),
    "cifar10": InputSpec("image", (3, 32, 32), 10),
    "cifar100": InputSpec("image", (3, 32, 32), 100),
    "emnist": InputSpec("image", (1, 28, 28), 62),
    "tiny_imagenet": InputSpec("image", (3, 64, 64), 200),
    "ag_news": InputSpec("tokens", (200,), 4, 98_635),
    "femnist": InputSpec("image", (1, 28, 28), 62),
    "shakespeare": InputSpec("tokens", (80,), 80, 80),
}
NATURAL_CLIENTS = {
    "superfed-table3-femnist": 730,
    "superfed-table3-shakespeare": 660,
    "floco-table1-femnist": 100,
    "floco-table1-femnist-squeezenet": 100,
    "fedme-table4-femnist": 20,
    "fedme-table4-shakespeare": 20,
    "fedphp-table2-femnist": 3550,
    "fedphp-fig5-shakespeare": 1129,
}
COMBINATIONS = {(name, method): method_settings(name, method) for name in PRESETS for method in PRESETS[name].methods}


@cache
def config(name: str, method: str | None = None) -> Any:
    return load_config(Experiment, name, {} if method is None else COMBINATIONS[name, method])


def data_of(name: str) -> str:
    dataset = config(name).dataset
    return dataset.path.stem.partition("-")[0] if dataset.name == "leaf" else str(dataset.name)


@cache
def sizes_of(dataset: str, part: str, partition: Any) -> tuple[int, ...]:
    """Samples by client where every class is equally frequent."""
    tests = 7_600 if dataset == "ag_news" else 10_000
    count = SIZES[dataset] + tests * (part == "both")
    labels = np.arange(count) % SPECS[dataset].num_classes
    return tuple(len(samples) for samples in partition.assign(labels, RandomStreams(0)))


def clients_of(name: str) -> int:
    settings = config(name)
    if name in NATURAL_CLIENTS:
        assert isinstance(settings.partition, NaturalPartition)
        return NATURAL_CLIENTS[name]
    return len(sizes_of(settings.dataset.name, settings.dataset.part, settings.partition))


def test_all_names_are_unique_and_the_handwritten_presets_are_still_there() -> None:
    names = preset_names()
    assert len(set(names)) == len(names)
    assert set(names) == {*OWN, *WORKLOADS, *SINGLE, *PRESETS}
    assert {name.partition("-")[0] for name in PRESETS} == {"superfed", "floco", "fedme", "fedphp", "pfllib"}
    assert {"superfed-table1-mnist-k50", "floco-table1-cifar10-5fold"} <= set(names)


def test_a_preset_runs_its_papers_method_and_says_where_it_is_from() -> None:
    for name, preset in PRESETS.items():
        assert config(name) == load_config(Experiment, name, COMBINATIONS[name, preset.own])
        own = {"PFLlib": "fedavg"}.get(
            preset.paper.short.partition(" ")[0], preset.paper.short.partition(" ")[0].lower()
        )
        assert config(name).algorithm.name.startswith(own)
        assert preset_text(name).startswith(f"# {preset.paper.short}, {preset.table}: ")
    entries = {entry[0]: entry[1:] for entry in catalog("presets")}
    assert entries["floco-table1-femnist"] == (
        "FLOCO (NeurIPS 2024)",
        "Tables 1 to 4, Figure 2, Appendix E",
        "LEAF FEMNIST, 100 writers, SimpleCNN",
    )
    assert entries["quickstart"] == ("SuPerFed on scikit-learn's digits",)


def test_overrides_work_as_for_files() -> None:
    settings = load_config(Experiment, "superfed-table1-mnist-k50", ["algorithm=fedavg", "train.rounds=7"])
    assert (settings.algorithm.name, settings.train.rounds, settings.train.momentum) == ("fedavg", 7, 0.9)
    with pytest.raises(ConfigError, match="did you mean 'superfed-table1-mnist-k500'"):
        load_config(Experiment, "superfed-table1-mnist-k5000", [])


@pytest.mark.two_cases
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if at % 4 == 0 else pytest.mark.slow) for at, name in enumerate(PRESETS)]
)
def test_every_method_of_a_preset_is_valid_and_runs_with_its_clients(name: str) -> None:
    clients = clients_of(name)
    small = Classification(TwoNN(hidden=(4, 3)).network(InputSpec("image", (1, 2, 2), 3)))
    sizes = np.tile([100, 30, 20], (clients, 1))
    for method in PRESETS[name].methods:
        settings = config(name, method)
        context = RoundContext(0, settings.train.rounds, clients, settings.train, RandomStreams(0))
        assert context.cohort_size <= clients
        settings.algorithm.check(small, context)
        settings.algorithm.check_data(small, sizes, settings.holdout.public)
        assert settings.model.name != "candidates" or settings.algorithm.mixes_architectures
        row = method_row(name, method)
        assert row in (None, "global", "personalized", "local", "finetuned")
        assert row != "finetuned" or settings.algorithm.finetune_epochs is not None


@pytest.mark.slow
def test_every_model_fits_its_data() -> None:
    models = {}
    for (name, method), overrides in COMBINATIONS.items():
        if method == PRESETS[name].own or "model" in overrides:
            settings = config(name, method)
            spec = settings.transform.build(SPECS[data_of(name)], lambda: pytest.fail("no samples needed")).spec
            for model in getattr(settings.model, "candidates", (settings.model,)):
                models[model, spec] = name
    for (model, spec), name in models.items():
        without_weights = model.model_copy(update={"weights": None}) if hasattr(model, "weights") else model
        with torch.device("meta"):
            built = without_weights.build(spec).eval()
            x = torch.zeros(2, *spec.shape, dtype=torch.int64 if spec.kind == "tokens" else None)
            logits = built.classify(built.features(x))
        assert logits.shape == (2, model.vocabulary if getattr(model, "vocabulary", None) else spec.num_classes), name


@pytest.mark.slow
def test_clients_have_the_sizes_that_the_papers_print() -> None:
    def sizes(name: str) -> np.ndarray:
        settings = config(name)
        return np.array(sizes_of(settings.dataset.name, settings.dataset.part, settings.partition))

    assert set(sizes("superfed-table1-mnist-k500")) == {120}
    assert set(sizes("superfed-table1-cifar10-k50")) == {1000}
    assert set(sizes("floco-table1-cifar10-5fold")) == set(sizes("floco-table1-cifar10-dir0.5")) == {500}
    assert set(sizes("fedphp-table2-cifar100-100-20")) == {500}
    assert set(sizes("fedphp-fig5-cifar100-20-5")) == {2500}
    emnist, tiny = sizes("superfed-arxiv-table2-emnist"), sizes("superfed-arxiv-table2-tinyimagenet")
    assert abs(len(emnist) - 1543) <= 40 and 440 <= emnist.mean() <= 460  # printed: 1,543 clients, mean 452
    assert abs(len(tiny) - 390) <= 20 and 240 <= tiny.mean() <= 265  # printed: 390 clients, mean 252
    me = config("fedme-table4-cifar10")
    tests = np.floor(sizes("fedme-table4-cifar10") * me.holdout.test).sum()
    assert abs(60_000 - tests - me.holdout.public - 49_000) <= 20


def test_the_presets_of_pfllib_have_its_protocol() -> None:
    """20 clients of all samples, three quarters of each for training; blocks of classes that two clients share."""
    names = [name for name in PRESETS if name.startswith("pfllib-")]
    assert len(names) == 18
    for name in names:
        settings = config(name)
        sizes = np.array(sizes_of(settings.dataset.name, settings.dataset.part, settings.partition))
        pooled = {"tiny_imagenet": 100_000, "mnist": 70_000, "fashion_mnist": 70_000, "ag_news": 127_600}
        assert (len(sizes), sizes.sum()) == (20, pooled.get(settings.dataset.name, 60_000))
        assert sizes.min() >= (40 if "dir" in name else 8)
        train = settings.train
        assert (train.rounds, train.batch_size, train.clients_per_round, train.drop_last) == (2000, 10, "all", True)
        assert train.lr == (0.1 if "resnet18" in name or "agnews" in name else 0.005)
        assert (settings.holdout.test, settings.holdout.validation) == (0.25, 0.0)
    cifar = config("pfllib-cifar100-pat").partition.assign(np.arange(60_000) % 100, RandomStreams(0))
    for client, part in enumerate(cifar):
        assert np.unique(part % 100).tolist() == list(range(10 * (client // 2), 10 * (client // 2) + 10))
    news = config("pfllib-agnews-dir1")
    assert sum(leaf.numel() for leaf in news.model.build(SPECS["ag_news"]).parameters()) == 3_157_508
    assert config("pfllib-tiny-resnet18-dir0.1").train.private_norm == "statistics"
    assert config("pfllib-tiny-resnet18-dir0.1", "feddbe").algorithm.mean_momentum == 0.1


def test_settings_tuned_by_row() -> None:
    found = {
        (data, clients): [
            COMBINATIONS[f"superfed-table1-{data}-k{clients}", f"superfed_{mode}"]["algorithm"]["start"]
            for mode in ("mm", "lm")
        ]
        for data in ("mnist", "cifar10")
        for clients in (50, 100, 500)
    }
    expected = {50: [0.6, 0.8], 100: [0.4, 0.6], 500: [0.2, 0.4]}
    assert found == {(data, clients): expected[clients] for data, clients in found}
    lm = COMBINATIONS["superfed-table3-femnist", "superfed_lm"]["algorithm"]
    assert (lm["start"], lm["orthogonality_weight"]) == (0.45, 3.0)
    assert COMBINATIONS["superfed-table2-tinyimagenet-alpha1", "fedprox"]["train.lr"] == 0.01
    squeeze = config("floco-table1-femnist-squeezenet").algorithm
    assert (squeeze.simplex_dimension, squeeze.assignment_round, squeeze.radius) == (3, 20, 0.05)
    assert config("floco-table1-cifar10-5fold-resnet18", "fedprox").algorithm.proximal_weight == 0.1
    assert config("fedme-table4-shakespeare").algorithm.cluster_rounds == (50, 75, 90)
    assert config("fedphp-table2-femnist", "fedphp_mu_c").algorithm.transfer_weight == 0.1
    grid = [name for name in PRESETS["superfed-fig3-cifar10"].methods if "_nu" in name]
    assert len(grid) == 32


def test_noise_compares_with_the_printed_table() -> None:
    noise = config("superfed-table4-cifar10-symmetric0.6").noise
    assert (noise.kind, noise.ratio, noise.legacy) == ("symmetric", 0.6, True)
    assert "noise.legacy=false" in preset_text("superfed-table4-cifar10-symmetric0.6").replace("\n# ", " ")


def test_unknown_presets_and_methods_are_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'superfed-table5-cifar10'"):
        method_settings("superfed-table5-cifar", "fedavg")
    with pytest.raises(ConfigError, match="did you mean 'superfed_mm'"):
        method_row("superfed-table1-mnist-k50", "superfed-mm")
