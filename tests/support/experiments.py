"""A small experiment on real data, and what a run of it left on storage."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from algorithms import registry
from rayfl.params import Tree
from rayfl.storage.commits import CommitStore
from rayfl.storage.files import Storage
from rayfl.tracking.callback import Callback
from tests.support.toys import assert_equal


class Interrupt(Callback):
    """Ends the run after a round, as Ctrl-C would."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_round(self, rounds_completed: int, cohort: list[int], seconds: float) -> None:
        if rounds_completed == self._after:
            raise KeyboardInterrupt


METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg", "finetune_epochs": 1},
    "fedprox": {"name": "fedprox"},
    "fedbn": {"name": "fedbn"},
    "fedavgm": {"name": "fedavgm"},
    "fedadagrad": {"name": "fedadagrad"},
    "fedyogi": {"name": "fedyogi", "bias_correction": True},
    "fedadam": {"name": "fedadam"},
    "elastic": {"name": "elastic", "mu": 0.5, "sample_share": 0.6},
    "fedexp": {"name": "fedexp", "finetune_epochs": 1},
    "flash": {"name": "flash", "least_progress": 0.1, "finetune_epochs": 1},
    "adaptive_fedavg": {"name": "adaptive_fedavg", "decay": "time", "finetune_epochs": 1},
    "fednova": {"name": "fednova"},
    "qfedavg": {"name": "qfedavg", "fairness": 2.0, "lipschitz": 0.5},
    "drfa": {"name": "drfa", "weight_lr": 0.05},
    "fairfed": {"name": "fairfed", "beta": 0.5},
    "fedfb": {"name": "fedfb", "criterion": "equalized_odds"},
    "fedzo": {"name": "fedzo", "directions": 2},
    "fedkseed": {"name": "fedkseed", "candidates": 50, "sampling": "amplitude"},
    "decomfl": {"name": "decomfl", "local_steps": 2, "directions": 2},
    "feedsign": {"name": "feedsign"},
    "term": {"name": "term", "tilt": 2.0, "estimate_share": 0.5, "sample_tilt": 0.5},
    "fedntd": {"name": "fedntd"},
    "fedmlb": {"name": "fedmlb", "temperature": 2.0},
    "fedgkd": {"name": "fedgkd", "models": 2, "finetune_epochs": 1},
    "fedpft": {"name": "fedpft", "components": 2, "server_epochs": 2, "server_lr": 0.01},
    "ccvr": {"name": "ccvr", "virtual_features": 20, "calibrate_every": 2},
    "creff": {"name": "creff", "features_per_class": 5, "match_steps": 5, "retrain_epochs": 3},
    "fedgh": {"name": "fedgh"},
    "fedtgp": {"name": "fedtgp", "server_epochs": 5},
    "fedhp": {"name": "fedhp", "spread_steps": 20},
    "fedpcl": {"name": "fedpcl"},
    "adcol": {"name": "adcol", "discriminator_hidden": 8, "server_lr": 0.1},
    "metafed": {"name": "metafed", "warmup_epochs": 1, "ready_above": 0.3},
    "feddistill": {"name": "feddistill"},
    "feddf": {"name": "feddf", "distill_steps": 20},
    "dense": {"name": "dense", "draws": 2, "made_per_draw": 8, "generator_steps": 3, "generator_width": 4},
    "fltrust": {"name": "fltrust", "finetune_epochs": 1},
    "fedheal": {"name": "fedheal", "threshold": 0.6, "finetune_epochs": 1},
    "fedmgda": {"name": "fedmgda", "tolerance": 0.3, "finetune_epochs": 1},
    "fedcr": {"name": "fedcr", "information_weight": 0.01, "train_samples": 2},
    "fedhkd": {"name": "fedhkd", "noise": 0.01},
    "feddisco": {"name": "feddisco", "finetune_epochs": 1},
    "fedawa": {"name": "fedawa", "server_steps": 3, "server_lr": 0.1, "finetune_epochs": 1},
    "fedlaw": {"name": "fedlaw", "server_epochs": 2, "finetune_epochs": 1},
    "fedld": {"name": "fedld", "finetune_epochs": 1},
    "kafe": {"name": "kafe", "bandwidth": 0.1, "finetune_epochs": 1},
    "turbosvm": {"name": "turbosvm", "finetune_epochs": 1},
    "fedsol": {"name": "fedsol", "finetune_epochs": 1},
    "fedcurv": {"name": "fedcurv", "finetune_epochs": 1},
    "flwf": {"name": "flwf", "finetune_epochs": 1},
    "fedewc": {"name": "fedewc", "finetune_epochs": 1},
    "fedweit": {"name": "fedweit"},
    "target": {"name": "target", "draws": 3, "made_per_draw": 8, "generator_width": 4, "finetune_epochs": 1},
    "fedrcl": {"name": "fedrcl", "finetune_epochs": 1},
    "fednar": {"name": "fednar", "finetune_epochs": 1},
    "feduv": {"name": "feduv", "finetune_epochs": 1},
    "fedacg": {"name": "fedacg", "finetune_epochs": 1},
    "fedinit": {"name": "fedinit", "finetune_epochs": 1},
    "fednoro": {"name": "fednoro", "warmup_rounds": 1, "ramp_rounds": 1, "mixtures": 3, "finetune_epochs": 1},
    "fedcorr": {"name": "fedcorr", "iterations": 2, "clean_rounds": 1, "neighbours": 5, "confidence": 0.3},
    "fat": {"name": "fat", "steps": 2, "finetune_epochs": 1},
    "gear": {"name": "gear", "steps": 2, "finetune_epochs": 1},
    "calfat": {"name": "calfat", "steps": 2, "finetune_epochs": 1},
    "fedlsr": {"name": "fedlsr", "ramp_rounds": 2, "finetune_epochs": 1},
    "rofl": {"name": "rofl", "forget_rounds": 1, "pseudo_from": 2, "finetune_epochs": 1},
    "fedmd": {"name": "fedmd"},
    "semifl": {"name": "semifl", "threshold": 0.15, "server_batch_size": 16},
    "fixmatch": {
        "name": "fixmatch",
        "threshold": 0.3,
        "unlabelled_ratio": 2,
        "proximal_weight": 0.1,
        "finetune_epochs": 1,
    },
    "fedgen": {"name": "fedgen", "generator_steps": 10, "generator_hidden": 16},
    "fedfed": {"name": "fedfed", "distillation_rounds": 2, "hidden": 16, "proximal_weight": 0.1},
    "fedkd": {"name": "fedkd"},
    "knn-per": {"name": "knn_per", "neighbours": 3},
    "fedcac": {"name": "fedcac", "collaboration_rounds": 3},
    "fedselect": {"name": "fedselect"},
    "lotteryfl": {"name": "lotteryfl", "prune_share": 0.3, "accuracy_threshold": 0.1},
    "subfedavg": {"name": "subfedavg", "prune_share": 0.3, "accuracy_threshold": 0.1, "distance_threshold": None},
    "fedthe": {"name": "fedthe"},
    "fedema": {"name": "fedema"},
    "fedu": {"name": "fedu", "threshold": 0.02},
    "heterofl": {"name": "heterofl", "masked_loss": True, "width_choice": "each_round"},
    "fedrolex": {"name": "fedrolex", "widths": [0.5, 0.25]},
    "fjord": {"name": "fjord", "self_distillation": True},
    "depthfl": {"name": "depthfl", "ramp_up": 2},
    "fedpm": {"name": "fedpm", "reset_every": 2},
    "inclusivefl": {"name": "inclusivefl", "momentum_share": 0.5},
    "scalefl": {"name": "scalefl", "widths": [0.5, 1.0], "distillation_start": 0.0},
    "feddwa": {"name": "feddwa", "top_k": 2},
    "fedfomo": {"name": "fedfomo", "peers": 2, "select_on": "train", "evaluate": "federated"},
    "apple": {"name": "apple", "relation_lr": 0.05, "peers": 2},
    "fedem": {"name": "fedem", "components": 2},
    "fedsoft": {"name": "fedsoft", "clusters": 3},
    "pfedgraph": {"name": "pfedgraph", "alignment_weight": 0.1, "evaluate": "mixed"},
    "cfl": {"name": "cfl", "mean_norm": 1e9, "max_norm": 0, "split_from": 1},
    "fedpub": {"name": "fedpub", "scale": 3.0},
    "gpfedrec": {"name": "gpfedrec", "hops": 2},
    "fedrap": {"name": "fedrap", "ramp": 2.0},
    "gcfl": {"name": "gcfl", "mean_norm": 1e9, "max_norm": 0, "split_from": 1, "length": 2},
    "dfedavgm": {"name": "dfedavgm"},
    "sgp": {"name": "sgp", "links": "random", "receivers": 2},
    "dfedsam": {"name": "dfedsam", "topology": "ring"},
    "dispfl": {"name": "dispfl", "neighbours": 2},
    "local": {"name": "local"},
    "centralized": {"name": "centralized", "finetune_epochs": 2, "finetune_select": "best_val"},
    "scaffold": {"name": "scaffold"},
    "superfed-mm": {"name": "superfed", "mode": "mm", "start": 0.25},
    "superfed-lm": {"name": "superfed", "mode": "lm", "start": 0.25},
    "floco": {"name": "floco", "simplex_dimension": 3, "assignment_round": 2},
    "floco-plus": {"name": "floco_plus", "simplex_dimension": 3, "assignment_round": 2},
    "fedper": {"name": "fedper"},
    "pfedpara": {"name": "pfedpara"},
    "lg-fedavg": {"name": "lg_fedavg", "aggregation": "uniform"},
    "pfl-da": {"name": "pfl_da", "aggregation": "uniform"},
    "fedrep": {"name": "fedrep", "head_epochs": 2},
    "fedrecon": {"name": "fedrecon", "reconstruction_epochs": 2, "server_optimizer": "adam"},
    "fedbabu": {"name": "fedbabu", "finetune_epochs": 2},
    "fedaws": {"name": "fedaws", "spread_steps": 2},
    "fednh": {"name": "fednh", "finetune_epochs": 1, "smoothing": 0.5},
    "fedetf": {"name": "fedetf", "finetune_epochs": 1, "alternations": 2},
    "fedloge": {"name": "fedloge", "classifier_steps": 50},
    "fedpac": {"name": "fedpac"},
    "fedgc": {"name": "fedgc"},
    "pfedfda": {"name": "pfedfda"},
    "pfedgp": {"name": "pfedgp", "chains": 2, "gibbs_steps": 1, "evaluation_chains": 2},
    "flute": {"name": "flute", "head_epochs": 1},
    "pfedvem": {"name": "pfedvem", "head_epochs": 2, "weight_samples": 2, "evaluation_samples": 2},
    "fedap": {"name": "fedap", "warmup": 0.25},
    "pfedsim": {"name": "pfedsim", "warmup": 0.25},
    "hypcluster": {"name": "hypcluster", "clusters": 3},
    "pacfl": {"name": "pacfl", "vectors": 2, "finetune_epochs": 1},
    "fesem": {"name": "fesem", "centers": 3},
    "feddrift": {"name": "feddrift", "threshold": 0.0, "merge_threshold": 0.1, "step_rounds": 1},
    "hierfavg": {"name": "hierfavg", "edges": 3, "cloud_weights": "cohort", "finetune_epochs": 1},
    "ditto": {"name": "ditto", "unseen": "global"},
    "perada": {"name": "perada", "distill_steps": 10, "distill_rounds": 3},
    "feddyn": {"name": "feddyn", "alpha": 0.1},
    "fedsmoo": {"name": "fedsmoo", "alpha": 0.1},
    "fedadmm": {"name": "fedadmm", "rho": 0.1},
    "feddc": {"name": "feddc", "alpha": 0.1},
    "fedcm": {"name": "fedcm", "alpha": 0.3},
    "mime": {"name": "mime", "momentum": 0.5},
    "mimelite": {"name": "mimelite", "base": "adam", "adaptivity": 0.1},
    "scaffnew": {"name": "scaffnew", "communication_probability": 0.3},
    "tamuna": {"name": "tamuna", "communication_probability": 0.3},
    "federaser": {"name": "federaser", "finetune_epochs": 1},
    "fedvarp": {"name": "fedvarp", "clusters": 3, "assignment": "random"},
    "fedcross": {"name": "fedcross", "alpha": 0.8, "finetune_epochs": 1},
    "fediir": {"name": "fediir", "penalty_weight": 0.1},
    "fpl": {"name": "fpl", "temperature": 0.5},
    "fedsr": {"name": "fedsr"},
    "fedme": {"name": "fedme", "cluster_rounds": [1], "initial_epochs": 1, "finetune_epochs": 1},
    "fedphp": {"name": "fedphp", "transfer": "mmd", "transfer_weight": 0.1},
    "fedapen": {"name": "fedapen", "weight_lr": 0.1, "weight_epochs": 2},
    "fml": {"name": "fml", "persist_private_optimizer": True},
    "fedmmd": {"name": "fedmmd", "finetune_epochs": 1},
    "fedmrl": {"name": "fedmrl"},
    "fedfusion": {"name": "fedfusion", "operator": "conv"},
    "fedmtl": {"name": "fedmtl", "relationship": "learned"},
    "flda": {"name": "flda"},
    "apfl": {"name": "apfl", "alpha": 0.5, "adaptive": True},
    "pfedla": {"name": "pfedla", "hidden": 12, "retained_layers": 1, "server_lr": 0.1},
    "pefll": {"name": "pefll", "hidden": 12, "inner_steps": 10, "server_lr": 0.01},
    "pfedhn": {"name": "pfedhn", "hidden": 12, "inner_steps": 10},
    "pfedbayes": {"name": "pfedbayes", "kl_weight": 1.0, "evaluation_samples": 2},
    "pfedme": {"name": "pfedme", "proximal_weight": 1.0, "inner_steps": 3},
    "mapper": {"name": "mapper"},
    "l2gd": {"name": "l2gd", "penalty_weight": 5.0},
}

OF_ADAPTERS: dict[str, dict[str, Any]] = {
    "feddpa": {"name": "feddpa", "local_epochs": 1},
    "feddpa-f": {"name": "feddpa", "version": "F"},
    "fedalt": {"name": "fedalt"},
    "hetlora": {"name": "hetlora", "ranks": [1, 2], "kept_share": 0.5, "pruning_weight": 1.0},
    "flora": {"name": "flora", "ranks": [1, 2]},
    "flexlora": {"name": "flexlora", "ranks": [1, 2]},
    "rolora-b-twice": {"name": "rolora", "b_rounds": 2},
    "lora-fair-squared": {"name": "lora_fair", "penalty": "squared"},
    "superfed-products": {"name": "superfed", "start": 0.25, "adapters": "products"},
    "floco-adapters": {
        "name": "floco", "simplex_dimension": 3, "assignment_round": 1, "simplex_over": "adapters",
    },
    "floco-plus-adapters": {
        "name": "floco_plus", "simplex_dimension": 3, "assignment_round": 1, "simplex_over": "adapters",
    },
}  # fmt: skip
"""Methods, and versions of methods, that need a pretrained model with adapters."""

FURTHER = {name: {"name": name} for name in registry.METHODS if name not in {one["name"] for one in METHODS.values()}}
"""The methods that neither of both names, as they are; of those that need adapters, the default version."""

EVERY = {**METHODS, **FURTHER, **OF_ADAPTERS}

PRETRAINED = {
    "feddpa", "fedalt", "hetlora", "flora", "flexlora", "fedex_lora", "rolora", "lora_fair", "fedpgp", "fedotp",
    "pfedmoap", "fedtpg",
}  # fmt: skip
"""Methods of :data:`FURTHER` that need a pretrained model; small experiments have none."""

KINDS = {
    "fedavg",
    "scaffold",
    "superfed-mm",
    "floco",
    "fedme",
    "fedphp",
    "feddf",
    "fedmd",
    "fedgen",
    "fedem",
    "knn-per",
}
KINDS |= {"fedfomo", "pfedhn", "l2gd", "cfl"}
"""Methods that stand for the others where each takes seconds: nothing kept, corrections, two trees, phases, teachers,
work of the server, several models, other clients' models, coins, clusters."""


FEW = {"fedavg", "superfed-mm", "floco", "fedme", "fedgen"}
"""Of these, those that differ most."""


def each_method(names: Iterable[str] = METHODS, quick: Collection[str] = KINDS) -> list[Any]:
    """Parameters of a test: quick ones, and the others as slow ones.

    Args:
        names: of experiments.
        quick: those of the quick suite.
    """
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


TRAIN: dict[str, dict[str, Any]] = {
    "scaffold": {"momentum": 0.0},
    "feddc": {"momentum": 0.0},
    "fedcm": {"momentum": 0.0},
    "mime": {"momentum": 0.0},
    "mimelite": {"momentum": 0.0},
    "scaffnew": {"momentum": 0.0, "clients_per_round": "all"},
    "tamuna": {"momentum": 0.0},
    **{key: {"momentum": 0.0} for key in ("fedkseed", "decomfl", "feedsign")},
    "pfedme": {"momentum": 0.0},
    "pfedbayes": {"momentum": 0.0},
    "l2gd": {"momentum": 0.0, "clients_per_round": "all"},
    "fedme": {"clients_per_round": "all"},
    "cfl": {"clients_per_round": "all"},
    "gcfl": {"clients_per_round": "all"},
}
"""What a method needs of the training section."""

PEOPLE: dict[str, Any] = {
    "dataset": {"name": "synthetic_groups", "samples": 300},
    "partition": {"name": "dirichlet", "by": "group", "num_clients": 5, "alpha": 1.0, "min_samples": 30},
}
"""Clients with people of two groups, for methods that compare these."""

SECTIONS: dict[str, dict[str, Any]] = {
    "fedme": {
        "model": {"candidates": [{"name": "two_nn", "hidden": [12]}, {"name": "two_nn", "hidden": [8, 8]}]},
        "holdout": {"public": 50},
    },
    "feddf": {
        "model": {"candidates": [{"name": "two_nn", "hidden": [12]}, {"name": "two_nn", "hidden": [8, 8]}]},
        "holdout": {"public": 50},
    },
    "fairfed": PEOPLE,
    "fedfb": PEOPLE,
    "fltrust": {"holdout": {"public": 50}},
    "fixmatch": {"labelled": {"share": 0.3}},
    "semifl": {"labelled": {"at": "server"}, "holdout": {"public": 50}},
    "perada": {"holdout": {"public": 50}},
    "fedlaw": {"holdout": {"public": 50}},
    "fedmd": {
        "model": {"candidates": [{"name": "two_nn", "hidden": [12]}, {"name": "two_nn", "hidden": [8, 8]}]},
        "holdout": {"public": 50},
    },
    "fedmrl": {
        "model": {"candidates": [{"name": "two_nn", "hidden": [6]}, {"name": "two_nn", "hidden": [12, 8]}]},
    },
    "pfedpara": {"model": {"name": "two_nn", "hidden": [24, 24], "factorize": {"name": "pfedpara", "gamma": 0.5}}},
    "fedasync": {"system": {"name": "sampled", "mode": "buffered", "concurrency": 3}},
    "ca2fl": {"system": {"name": "sampled", "mode": "buffered", "concurrency": 3}},
    "fedbuff": {"system": {"name": "sampled", "mode": "buffered", "concurrency": 3}},
    "fedap": {"model": {"name": "tests.support.own_norm:normalized", "head": "4"}},
    "fedbn": {"model": {"name": "tests.support.own_norm:normalized", "head": "4"}},
}
"""What a method needs of other sections, in place of those of the others."""


def small_experiment(storage: Path, name: str, method: str, **cluster: Any) -> dict[str, Any]:
    """Five clients of scikit-learn's digits, four rounds of three, all stateful parts in use."""
    return {
        "name": name,
        "storage_path": str(storage),
        "dataset": {"name": "digits"},
        "partition": {"name": "classes", "num_clients": 5, "classes_per_client": 2},
        "model": {"name": "two_nn", "hidden": [12]},
        "algorithm": deepcopy(EVERY[method]),
        "train": {
            "rounds": 4,
            "clients_per_round": 3,
            "local_epochs": 1,
            "batch_size": 32,
            "lr": 0.1,
            "momentum": 0.5,
            **TRAIN.get(method, {}),
        },
        "evaluation": {"every": 2},
        "tracking": {"tensorboard": False},
        "cluster": cluster,
        **SECTIONS.get(method, {}),
    }


def with_large_model(config: dict[str, Any]) -> dict[str, Any]:
    """The experiment with all clients in two rounds, and a model whose sums are merged before they travel."""
    train = config["train"] | {"rounds": 2, "clients_per_round": "all"}
    return config | {"model": {"name": "two_nn", "hidden": [1200, 900]}, "train": train}


@dataclass
class Outcome:
    """Everything that must be equal to the bit between two runs of one configuration."""

    server: Tree
    states: dict[str, Tree]
    rounds: pa.Table
    clients: pa.Table
    skipped: pa.Table
    calibration: pa.Table


def outcome(folder: Path) -> Outcome:
    """Reads a finished run from its folder."""
    store = CommitStore(Storage(str(folder)))
    manifest = store.latest()
    assert manifest is not None
    states = {str(client): store.read_states(file)[client] for client, file in manifest.states.items()}
    return Outcome(
        store.read_server(manifest),
        states,
        pq.read_table(folder / "rounds.parquet"),
        pq.read_table(folder / "clients.parquet"),
        pq.read_table(folder / "skipped.parquet"),
        pq.read_table(folder / "calibration.parquet"),
    )


def assert_same(left: Outcome, right: Outcome) -> None:
    """Server model, all client states and all tables are equal to the bit."""
    assert_equal(left.server, right.server)
    assert_equal(left.states, right.states)
    assert left.rounds.equals(right.rounds)
    assert left.clients.equals(right.clients)
    assert left.skipped.equals(right.skipped)
    assert left.calibration.equals(right.calibration)
