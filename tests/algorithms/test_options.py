"""Every option of every method changes what a small run does, and options that change nothing beside others say so."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
from pydantic import ValidationError
from torch import Tensor

from algorithms.parts.settings import TOGETHER
from algorithms.registry import METHODS
from rayfl.engine.settings import TrainConfig
from rayfl.errors import RayflError
from tests.support.adapted import adapted_toy, images
from tests.support.cases import ALGORITHMS, TRAIN
from tests.support.fedme_toys import two_architectures
from tests.support.toy_networks import normalized_layers, recurrent_layers, two_layers
from tests.support.toys import ListDataset, Toy, random_clients

BASES: dict[str, dict[str, Any]] = {
    "apple": {"relation_lr": 0.05, "relation_share": 0.9},
    "ccvr": {"virtual_features": 5, "server_epochs": 2},
    "cfl": {"mean_norm": 1e9, "max_norm": 0, "split_from": 0},
    "elastic": {"sample_share": 0.9},
    "fedala": {"start_threshold": None, "start_passes": 2, "weight_lr": 0.5},
    "fedamp": {"sigma": 2.0, "alpha": 20.0, "alpha_every": 1, "alpha_min": 0.3},
    "fedcac": {"collaboration_rounds": 3},
    "fedcm": {"alpha": 0.6},
    "feddbe": {"mean_weight": 5.0, "mean_momentum": 0.4},
    "feddf": {"distill_steps": 5, "server_lr": 0.05},
    "feddwa": {"top_k": 2},
    "fedem": {"components": 2},
    "fedetf": {"alternations": 2, "finetune_epochs": 1},
    "fedfomo": {"peers": 2, "select_on": "train"},
    "fedgen": {
        "label_weight": 1,
        "feature_weight": 1,
        "noise_dim": 4,
        "generator_hidden": 6,
        "generator_steps": 3,
        "regularized_epochs": 1,
    },
    "fedkd": {"energy_start": 0.6, "energy_end": 0.9},
    "fedmd": {"digest_batch_size": 4, "alignment_samples": 6},
    "fedme": {"cluster_rounds": (1,), "tuning_data": "train"},
    "fedphp": {"transfer_weight": 0.1},
    "fedtgp": {"server_epochs": 2},
    **{key: {"ranks": (1, 3, 2)} for key in ("flexlora", "flora")},
    **{key: {"simplex_dimension": 2, "assignment_round": 1} for key in ("floco", "floco_plus")},
    "hetlora": {"ranks": (1, 3, 2), "kept_share": 0.5, "pruning_weight": 1.0},
    "knn_per": {"neighbours": 3},
    "l2gd": {"penalty_weight": 5.0},
    "pacfl": {"threshold": 28.0},
    "mapper": {"grid": (0.25, 0.75)},
    "per_fedavg": {"alpha": 0.1},
    "pfedla": {"hidden": 6, "server_lr": 0.1},
    "pefll": {"hidden": 6, "inner_steps": 3, "server_lr": 0.01},
    "pfedhn": {"hidden": 6, "inner_steps": 3},
    "pfedbayes": {"kl_weight": 0.01},
    "pfedme": {"inner_steps": 3, "proximal_weight": 2.0, "personal_lr": 0.05},
    "pfedsim": {"warmup": 0.4},
    "scaffold": {"momentum_on_corrected": True},
    "superfed": {"start": 0.4},
}
"""Settings with which three rounds on few samples reach what a method does."""

BESIDE: dict[tuple[str, str], dict[str, Any]] = {
    ("apple", "peer_base"): {"peers": 4},
    ("apple", "peer_growth"): {"peers": 4},
    ("fedamp", "clip_self"): {"heuristic": False, "alpha": 100.0},
    ("fedala", "start_threshold"): {"start_threshold": 1e-9, "start_passes": 6, "start_window": 2},
    ("fedala", "start_window"): {"start_threshold": 1e9, "start_passes": 6, "start_window": 2},
    ("fedbuff", "staleness"): {"unit_staleness": 1.0},
    ("fedbuff", "staleness_exponent"): {"unit_staleness": 1.0},
    ("fedbuff", "staleness_threshold"): {"staleness": "threshold", "unit_staleness": 2.0, "stale_factor": 0.5},
    ("fedbuff", "stale_factor"): {"staleness": "threshold", "unit_staleness": 2.0},
    ("feddistill", "divergence"): {"output": "logits"},
    ("fedfomo", "explore_decay"): {"explore": 0.9},
    ("fedfomo", "fallback"): {"select_on": "validation"},
    ("fedsam", "weight_floor"): {"adaptive": True},
    ("fedfusion", "smoothing"): {"operator": "multi"},
    ("fedmd", "consensus"): {"digest_loss": "mse"},
    ("fedme", "cluster_outputs"): {"cluster_rounds": (1, 1, 2)},
    ("fedme", "initial_epochs"): {"warm": True},
    ("fedphp", "kd_form"): {"transfer": "kd"},
    ("fedphp", "temperature"): {"transfer": "kd"},
    ("mapper", "select_on"): {"grid": (0.0, 0.3, 0.6, 1.0)},
    ("per_fedavg", "delta"): {"version": "hf"},
    ("pfedfda", "fixed_beta"): {"interpolation": "fixed"},
    ("superfed", "lm_lstm_per_layer"): {"mode": "lm"},
    ("superfed", "start"): {"start": 0.4},
}
"""What else must be set for an option to have an effect in a small run."""

OTHERS: dict[tuple[str, str], tuple[Any, ...]] = {
    ("apple", "peer_base"): (1e9,),
    ("apple", "peer_growth"): (1e9,),
    ("apple", "relation_lr"): (0.01,),
    ("cfl", "gap"): (1.0,),
    ("cfl", "min_size"): (9,),
    ("cfl", "max_norm"): (1e9,),
    ("cfl", "mean_norm"): (0.0,),
    ("feddf", "server_max_grad_norm"): (1e-3,),
    ("fedetf", "projection_dim"): (5,),
    ("fedme", "cluster_rounds"): ((0,), (2,)),
    ("fedme", "initial_architecture"): (1,),
    ("flexlora", "ranks"): ((3, 2),),
    ("flora", "ranks"): ((3, 2),),
    ("hetlora", "ranks"): ((3, 2),),
    ("l2gd", "aggregation_probability"): (0.9,),
    ("mapper", "grid"): ((0.5,),),
    ("pefll", "server_max_grad_norm"): (1e-3,),
    ("pfedhn", "server_max_grad_norm"): (1e-3,),
    ("pfedme", "personal_lr"): (0.02,),
    ("superfed", "start"): (0.0, 0.8),
}
"""Values to try in place of the generic ones."""

FOURS = TRAIN.model_copy(update={"batch_size": 4})
TRAINING: dict[tuple[str, str], dict[str, Any]] = {
    ("fedfomo", "fallback"): {"lr": 3.0},
    ("fedme", "cluster_outputs"): {"lr": 1.0},
    ("fedme", "model_tuning"): {"lr": 1.0},
    ("fednova", "proximal_weight"): {"momentum": 0.0},
    ("mapper", "select_on"): {"lr": 1.0},
}
"""How to train for an option to have an effect in a small run."""

PERMISSIONS = {("pfedme", "momentum_on_personal"), ("scaffold", "momentum_on_corrected")}
"""Options without which momentum is refused, and which do nothing more."""


def declared(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Options of a method, with values of others beside which each has no effect."""
    for option, field in METHODS[name].model_fields.items():
        extra: Any = field.json_schema_extra or {}
        for others, values in extra.get("unless", {}).items():
            names = others.split(TOGETHER)
            yield from (
                (option, dict(zip(names, value if len(names) > 1 else [value], strict=True))) for value in values
            )
        for other, values in extra.get("only", {}).items():
            annotation = METHODS[name].model_fields[other].annotation
            yield from ((option, {other: value}) for value in choices(annotation) if value not in values)


def choices(annotation: Any) -> list[Any]:
    """Values of an option's type."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    known: dict[Any, list[Any]] = {
        bool: [False, True],
        int: [0, 1, 2, 3],
        float: [0.0, 0.3, 0.9, 2.0],
        NoneType: [None],
    }
    return known.get(annotation) or [value for inner in get_args(annotation) for value in choices(inner)]


def alternatives(name: str, option: str, settings: Mapping[str, Any]) -> list[Any]:
    """Values of an option other than its own that are valid beside the settings."""
    method = METHODS[name]
    now = settings.get(option, method.model_fields[option].default)
    tried = OTHERS.get((name, option)) or choices(method.model_fields[option].annotation)
    return [
        value
        for value in tried
        if (value != now or type(value) is not type(now)) and made(name, settings, option, value)
    ]


def made(name: str, settings: Mapping[str, Any], option: str, value: Any) -> bool:
    try:
        METHODS[name](**{**settings, option: value})
    except ValidationError:
        return False
    return True


CASE_OF = {case.algorithm.name: case for case in ALGORITHMS.values()}
ADAPTED = {"feddpa", "fedalt", "hetlora", "flora", "flexlora"}
COHORTS = ([0, 2, 3], [1, 2, 4], [2, 3, 4])


def toy_of(name: str, settings: Mapping[str, Any], training: Mapping[str, Any]) -> Toy:
    """The method on six clients with validation samples, the last of which takes no part if the method allows that."""
    method = METHODS[name](**settings)
    unseen = 0 if method.no_newcomers else 1
    if name in ADAPTED or "products" in settings.values() or settings.get("simplex_over") == "adapters":
        return adapted_toy(method, train=FOURS.model_copy(update={"rounds": 3}), dataset=images((5, 8, 9, 6, 5, 7)),
                           unseen=unseen)  # fmt: skip
    case, public = CASE_OF[name], 12
    data = random_clients((9, 12, 6, 10, 7, 8), public=public)
    clients = [(one.x, one.y) for one in (data.load(client)["train"] for client in range(6))]
    # one client alone has the last class
    clients = [(x, y if client == 0 else y % 2) for client, (x, y) in enumerate(clients)]
    held = [(x[::2] + 0.3, y[::2]) for x, y in clients]
    dataset = ListDataset(clients, public=data.load_public() if case.public else None, validation=held)
    task = {"fedbn": normalized_layers, "fedme": two_architectures}.get(name, two_layers)()
    if settings.get("mode") == "lm":
        task = recurrent_layers()
    update = {**FOURS.model_dump(), "rounds": 3, "momentum": 0.5, **case.train, **training}
    if case.everyone:
        update["clients_per_round"] = "all"
    return Toy(method, dataset, task, TrainConfig(**update), unseen=unseen)


@cache
def outcome(name: str, settings: tuple[tuple[str, Any], ...], training: tuple[tuple[str, Any], ...]) -> str | None:
    """A hash of all that three rounds leave and of every score; None where the settings are refused."""
    try:
        toy = toy_of(name, dict(settings), dict(training))
        toy.algorithm.check_task(toy.task)
        toy.algorithm.check(toy.task, toy.context)
    except (ValidationError, RayflError):
        return None
    found = hashlib.sha256()
    scores: list[Mapping[int, Mapping[str, Any]]] = []
    for cohort in COHORTS:
        toy.step(range(toy.context.num_clients) if CASE_OF.get(name, CASE_OF["fedavg"]).everyone else cohort)
        add(found, toy.server)
        add(found, toy.states())
        scores += [{client: one["test"] for client, one in toy.federation.trained_scores.items()}, toy.scores()]
    scores.append(toy.scores(final=True))
    if toy.unseen:
        scores.append(toy.scores(final=True, newcomers=True))
    add(found, {str(i): {c: {r: s.vector for r, s in rows.items()} for c, rows in one.items()} for i, one in
                enumerate(scores)})  # fmt: skip
    return found.hexdigest()


def add(found: Any, tree: Any) -> None:
    """Adds a tree to a hash."""
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            found.update(str(key).encode())
            add(found, tree[key])
    else:
        found.update(
            tree.contiguous().numpy().tobytes() if isinstance(tree, Tensor) else repr(np.asarray(tree)).encode()
        )


def run(name: str, option: str, settings: Mapping[str, Any]) -> str | None:
    return outcome(name, tuple(sorted(settings.items())), tuple(TRAINING.get((name, option), {}).items()))


OPTIONS = [
    pytest.param(name, option, id=f"{name}-{option}")
    for name, method in METHODS.items()
    for option, field in method.model_fields.items()
    if option != "name" and len(choices(field.annotation)) != 1 and (name, option) not in PERMISSIONS
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_every_option_has_an_effect(name: str, option: str) -> None:
    beside: dict[str, Any] = {"finetune_epochs": 3} if option.startswith("finetune_") else {}
    if option == "finetune_select":
        beside["finetune_lr"] = 3.0  # so that some epoch but the last is the best
    settings = {**BASES.get(name, {}), **beside, **BESIDE.get((name, option), {})}
    before = run(name, option, settings)
    assert before is not None, "the settings of this test are refused"
    tried = {
        str(value): run(name, option, {**settings, option: value}) for value in alternatives(name, option, settings)
    }
    assert any(tried.values()), f"no value of {list(tried)} is accepted"
    assert any(found not in (None, before) for found in tried.values()), f"{list(tried)} change nothing"


IDLE = [
    pytest.param(
        name, option, beside, id="-".join([name, option, *(f"{key}={value}" for key, value in beside.items())])
    )
    for name in METHODS
    for option, beside in declared(name)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option", "beside"), IDLE)
def test_what_is_said_to_have_no_effect_has_none(name: str, option: str, beside: dict[str, Any]) -> None:
    settings = {**BASES.get(name, {}), **beside}
    if option.startswith("finetune_") and "finetune_epochs" not in beside:
        settings["finetune_epochs"] = 1
    settings.pop(option, None)
    before = run(name, option, settings)
    default = METHODS[name].model_fields[option].default
    for tried in alternatives(name, option, settings):
        if tried != default:
            said = METHODS[name](**{**settings, option: tried}).idle_settings()
            assert any(sentence.startswith(f"algorithm.{option} has no effect") for sentence in said)
            assert run(name, option, {**settings, option: tried}) in (None, before), tried
