"""Writes the table of methods and tasks in ``docs/tasks.md``: what happens when each method is given each task.

    python scripts/docs/task_table.py            writes the table
    python scripts/docs/task_table.py --check    says whether it is out of date, exit status 1 if so

A method and a task work where two rounds of them on small data, in this process, and an evaluation of all clients end
with finite numbers. They are refused where the check before the start names a reason. Anything else is an error.
"""

from __future__ import annotations

import logging
import math
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from actors.federation.federation import Federation
from actors.federation.hosts import Hosts
from actors.hosting.building import build_host
from actors.processes.pool import InlinePool
from algorithms.registry import METHODS, Experiment
from rayfl.config.loading import load_config
from rayfl.errors import ConfigError
from rayfl.experiment.parts import Parts
from rayfl.models.pretrained.making import make
from rayfl.models.pretrained.making_clip import NAMES
from rayfl.models.pretrained.section import PretrainedModel

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "tasks.md"
BEGIN, END = "<!-- made by scripts/docs/task_table.py -->", "<!-- end of what it made -->"
ROUNDS = 2
FEW_HOURS = {"period": 8, "window": 8, "horizon": 3, "validation": 0.2}

TASKS: dict[str, dict[str, Any]] = {
    "classification": {
        "dataset": "wine",
        "partition": {"name": "pathological", "num_clients": 4},
        "model": {"name": "two_nn", "hidden": [6, 6]},
    },
    "multilabel": {
        "dataset": {"name": "synthetic_labels", "num_clients": 4, "samples": 30, "dimension": 6, "labels": 3},
        "model": {"name": "two_nn", "hidden": [6, 6]},
    },
    "regression": {
        "dataset": "diabetes",
        "partition": {"name": "pathological", "num_clients": 4},
        "model": {"name": "two_nn", "hidden": [6, 6]},
    },
    "language_model": {
        "dataset": {"name": "synthetic_text", "num_clients": 4, "texts": 20, "length": 6, "vocabulary": 7},
        "model": {"name": "window_lm", "embedding": 3, "hidden": 6},
    },
    "segmentation": {
        "dataset": {"name": "synthetic_masks", "num_clients": 4, "samples": 20, "side": 6},
        "model": {"name": "unet", "width": 2, "depth": 1},
    },
    "survival": {
        "dataset": {"name": "synthetic_survival", "num_clients": 4, "samples": 30, "dimension": 6},
        "model": {"name": "two_nn", "hidden": [6, 6]},
    },
    "recommendation": {
        "dataset": {
            "name": "synthetic_interactions",
            "num_clients": 4,
            "items": 30,
            "interactions": 8,
            "negatives": 10,
        },
        "holdout": {},
        "model": {"name": "neural_cf", "factors": 3, "embedding": 4, "hidden": [6]},
    },
    "preference": {"dataset": {"name": "synthetic_preferences", "num_clients": 4, "samples": 20}},
    "forecasting": {
        "dataset": {"name": "synthetic_series", "num_clients": 4, "times": 60, **FEW_HOURS},
        "holdout": {},
        "model": {"name": "two_nn", "hidden": [6, 6]},
    },
    "node_classification": {
        "dataset": {"name": "synthetic_subgraphs", "num_clients": 4, "nodes": 20, "dimension": 3},
        "holdout": {},
        "model": {"name": "gcn", "layers": 1, "hidden": 6},
    },
    "anomaly_detection": {
        "task": {"name": "anomaly_detection", "decoder": [6]},
        "dataset": "wine",
        "partition": {"name": "iid", "num_clients": 4},
        "model": {"name": "two_nn", "hidden": [6, 6]},
    },
    "self_supervised": {
        "task": {"name": "self_supervised", "hidden": 8, "projection": 4},
        "dataset": "digits",
        "partition": {"name": "iid", "num_clients": 4},
        "holdout": {"test": 0.1, "validation": 0.05, "public": 1500},
        "model": {"name": "two_nn", "hidden": [6, 6]},
        "augment": {"crop": 1, "jitter": 1},
    },
}
"""By task, small data and a model for them; preferences are learned by adapters over a small pretrained model alone."""

OPTIONS: dict[str, dict[str, Any]] = {
    "floco": {"simplex_dimension": 3, "assignment_round": 1},
    "floco_plus": {"simplex_dimension": 3, "assignment_round": 1},
    "knn_per": {"neighbours": 3},
    "cfl": {"mean_norm": 1e9, "max_norm": 0, "split_from": 1},
    "gcfl": {"mean_norm": 1e9, "max_norm": 0, "split_from": 1, "length": 2},
    "fedme": {"cluster_rounds": [1], "initial_epochs": 1},
    "pfedbayes": {"kl_weight": 0.01},
    "pfedme": {"inner_steps": 2},
    "l2gd": {"penalty_weight": 5.0},
    "hypcluster": {"clusters": 2},
    "feddf": {"distill_steps": 2},
    "perada": {"distill_steps": 2},
    "fedlsr": {"rotate": 0},
    "fedfed": {"distillation_rounds": 1, "code_dim": 2, "hidden": 4},
    "fedlaw": {"server_epochs": 2},
    "target": {"draws": 3, "made_per_draw": 4, "generator_width": 2, "noise_dim": 3},
    "dense": {"draws": 2, "made_per_draw": 4, "generator_steps": 2, "generator_width": 2, "noise_dim": 3},
    "fedgen": {"generator_steps": 2, "generator_hidden": 4, "noise_dim": 3},
}
"""By method, hyper-parameters that small data need, or that have no default."""

TRAIN: dict[str, dict[str, Any]] = {
    "subfedavg": {"local_epochs": 2},
    "l2gd": {"clients_per_round": "all"},
    "scaffnew": {"clients_per_round": "all"},
    "fedme": {"clients_per_round": "all"},
    "cfl": {"clients_per_round": "all"},
    "gcfl": {"clients_per_round": "all"},
    **{key: {"lr": 0.001} for key in ("fedkseed", "decomfl", "feedsign")},
}


ADAPTED = ("fedalt", "feddpa", "hetlora", "flora", "flexlora", "fedex_lora", "rolora", "lora_fair")
"""Methods that need a pretrained model, of which there are small ones for classes of images and for texts."""
KEEPING = ("fedper", "fedrap", "fedrep", "fedrecon", "fedbabu", "lg_fedavg", "gpfedrec")
"""Methods that tell a part of a model from the rest, which of a language model are the second factors of adapters."""
PROMPTED = ("fedpgp", "fedotp", "fedtpg", "pfedmoap")
"""Methods that need CLIP, which tells classes."""
_NOT_TRIED = (
    "-: not tried. The method needs adapters, and the small pretrained models here are for classes of "
    "images and for texts."
)


def sections(method: str, task: str) -> dict[str, Any]:
    """The configuration of a method on a task."""
    content: dict[str, Any] = {
        "task": task,
        "holdout": {"test": 0.3, "validation": 0.2, "public": 8},
        "algorithm": {"name": method, **OPTIONS.get(method, {})},
        "train": {"rounds": ROUNDS, "clients_per_round": 3, "local_epochs": 1, "batch_size": 8, "lr": 0.05},
        "cluster": {"backend": "inline", "device": "cpu"},
        **TASKS[task],
    }
    content["train"] |= TRAIN.get(method, {})
    if METHODS[method].asynchronous:
        content["system"] = {"name": "sampled", "mode": "buffered", "concurrency": 4}
    if task == "preference":
        if method in KEEPING:
            content["algorithm"]["head_group"] = "lora_b"
        content["model"] = {"name": "pretrained", "folder": _base(_BASES[task]), "adapter": {"r": 2}}
        content["model"]["head"] = {"train": False}
        return content
    if method == "fedap" or (method == "fedbn" and task != "segmentation"):  # a U-Net has group normalization
        content["model"] = {"name": "scripts.docs.task_models:normalized", "head": "2"}
    if method == "pfedpara":
        content["model"] = {**TASKS[task]["model"], **_WIDE.get(task, {"hidden": [24, 24]}), "factorize": "pfedpara"}
    if method in ADAPTED:
        content["model"] = {"name": "pretrained", "folder": _base(_BASES[task]), "adapter": {"r": 2}}
        if task == "classification":
            content["dataset"] = "digits"
        else:
            content["model"]["head"] = {"train": False}
    if METHODS[method].learns_unlabelled and task == "classification":  # it compares images
        content["dataset"], content["labelled"] = "digits", {"share": 0.3}
    if method in ("fairfed", "fedfb") and task == "classification":
        content["dataset"] = {"name": "synthetic_groups", "samples": 80}
    if method in PROMPTED and task == "classification":
        content["dataset"], folder = "digits", _base("tiny-clip")
        content["model"] = {"name": "pretrained", "folder": folder, "adapter": "none", "head": {"train": False}}
        content["model"]["prompt"] = {"classes": list(NAMES), "length": 2}
    if method == "fedme":
        content["model"] = {
            "candidates": [TASKS[task]["model"], {**TASKS[task]["model"], **_OTHERS.get(task, _NARROW)}]
        }
    return content


_BASES = {"classification": "tiny-vit", "language_model": "tiny-lm", "preference": "tiny-lm"}


@cache
def _base(name: str) -> str:
    """A small pretrained model."""
    folder = tempfile.TemporaryDirectory()
    _FOLDERS.append(folder)
    return str(make(name, f"{folder.name}/base").folder)


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""They are removed when the process ends."""


_WIDE: dict[str, dict[str, Any]] = {
    "language_model": {"hidden": 24},
    "segmentation": {"width": 8},
    "node_classification": {"hidden": 24, "layers": 2},
}
"""By task, of how many units a model is that has weights larger than their factors."""
_NARROW = {"hidden": [5]}
_OTHERS: dict[str, dict[str, Any]] = {
    "language_model": {"hidden": 5},
    "segmentation": {"width": 3},
    "node_classification": {"hidden": 5},
}
"""By task, how FedMe's second architecture differs."""


def tried(content: Mapping[str, Any]) -> str:
    """What happens: ``yes``, or why the check before the start refuses it.

    Raises:
        AssertionError: a number is not finite, or a client has no row.
    """
    config = load_config(Experiment, content, {})
    parts = Parts(config)
    try:
        sizes = parts.check()
    except ConfigError as error:
        if "needs a model that can be cut by width" in str(error):
            return "the small model that is tried here cannot be cut by width"
        if "holdout.public is 0" in str(error):  # where every sample is some user's
            return "the server needs samples that belong to no client, and the data have none"
        if "initial models that differ" in str(error):
            return "adapters begin alike, and so would its models stay"
        if isinstance(config.model, PretrainedModel) and "cannot learn" not in str(error):
            return "a language model with adapters has no last layer of its own, batch normalization or units to cut"
        if "cannot learn" not in str(error):
            raise
        return str(error).partition(": ")[2].partition(": ")[2].partition(". Choose")[0]
    host = build_host(config, 0, "cpu", tell=lambda line: None)
    federation = Federation(Hosts(InlinePool([host])), parts.task, parts.context, sizes)
    server = parts.initial_server()
    for number in range(ROUNDS):
        cohort = parts.cohort(number)
        federation.begin_round(number, ("test",), cohort)
        server = {**server, **federation.play(config.algorithm, server, cohort)}
    common, own = config.algorithm.served(server, parts.context)
    scores = federation.evaluate(common, ("validation", "test"), True, own)
    assert len(scores) == parts.dataset.num_clients
    first = parts.task.measures.first.name
    for client, splits in scores.items():
        for model, statistics in splits["test"].items():
            assert math.isfinite(statistics.metrics()[first]), f"client {client}, {model}: {statistics.metrics()}"
    return "yes"


def table() -> str:
    """The table as Markdown."""
    rows, reasons = [], list[str]()
    for method in sorted(METHODS):
        cells = []
        for task in TASKS:
            if method in ADAPTED and task not in _BASES:
                cells.append("-")
                continue
            try:
                found = tried(sections(method, task))
            except Exception as error:
                raise SystemExit(f"{method} on {task}: {type(error).__name__}: {error}") from error
            if found == "yes":
                cells.append("yes")
                continue
            if found not in reasons:
                reasons.append(found)
            cells.append(f"no ({reasons.index(found) + 1})")
        rows.append(f"| [`{method}`](methods/{method}.md) | {' | '.join(cells)} |")
    head = [f"| method | {' | '.join(TASKS)} |", f"|---|{'---|' * len(TASKS)}"]
    why = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([BEGIN, "", *head, *rows, "", _NOT_TRIED, "", "Why not:", "", *why, "", END])


def main() -> None:
    """Writes the table, or says whether it is what the page has."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    made = before + table() + rest.split(END)[1]
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(made, encoding="utf-8")
    elif made != text:
        raise SystemExit(f"{PAGE.relative_to(ROOT)} is out of date: python scripts/docs/task_table.py writes it")


if __name__ == "__main__":
    main()
