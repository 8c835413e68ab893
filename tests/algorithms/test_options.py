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
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import RayflError
from tests.support.adapted import adapted_toy, images
from tests.support.cases import ALGORITHMS, TRAIN
from tests.support.clips import clip_images, clip_toy
from tests.support.factorized_toys import factorized_layers
from tests.support.fedme_toys import two_architectures
from tests.support.option_values import BASES, BESIDE, OTHERS, PERMISSIONS, TRAINING
from tests.support.toy_networks import four_layers, normalized_layers, recurrent_layers, two_layers
from tests.support.toys import ListDataset, Toy, random_clients
from tests.support.unlabelled_toys import TRAIN as SEMI_TRAIN
from tests.support.unlabelled_toys import hidden, image_clients, semi_toy

FOURS = TRAIN.model_copy(update={"batch_size": 4})


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
ADAPTED = {"feddpa", "fedalt", "hetlora", "flora", "flexlora", "fedex_lora", "rolora", "lora_fair"}
PROMPTED = {"fedpgp", "fedotp", "pfedmoap", "fedtpg"}
LEARN_UNLABELLED = {"fixmatch", "semifl"}
COMPARE_VIEWS = {"fedlsr"}
COHORTS = ([0, 2, 3], [1, 2, 4], [2, 3, 4])


def toy_of(name: str, settings: Mapping[str, Any], training: Mapping[str, Any]) -> Toy:
    """The method on six clients with validation samples, the last of which takes no part if the method allows that."""
    method = METHODS[name](**settings)
    unseen = 0 if method.no_newcomers else 1
    if name in ADAPTED or "products" in settings.values() or settings.get("simplex_over") == "adapters":
        return adapted_toy(method, train=FOURS.model_copy(update={"rounds": 3}), dataset=images((5, 8, 9, 6, 5, 7)),
                           unseen=unseen)  # fmt: skip
    if name in PROMPTED:
        dataset = clip_images((5, 8, 9, 6, 5, 7))
        return clip_toy(method, dataset=dataset, train=FOURS.model_copy(update={"rounds": 3}), unseen=unseen)
    if name in LEARN_UNLABELLED:
        dataset = hidden(image_clients((14, 9, 17, 6, 11, 8), public=9, validated=True), share=0.3)
        return semi_toy(method, dataset=dataset, train=SEMI_TRAIN.model_copy(update={"rounds": 3}), unseen=unseen)
    if name in COMPARE_VIEWS:
        dataset = image_clients((14, 9, 17, 6, 11, 8), validated=True)
        return semi_toy(method, dataset=dataset, train=SEMI_TRAIN.model_copy(update={"rounds": 3}), unseen=unseen)
    case, public = CASE_OF[name], 12
    data = random_clients((9, 12, 6, 10, 7, 8), public=public)
    clients = [(one.x, one.y) for one in (data.load(client)["train"] for client in range(6))]
    # one client alone has the last class
    clients = [(x, y if client == 0 else y % 2) for client, (x, y) in enumerate(clients)]
    held = [(x[::2] + 0.3, y[::2]) for x, y in clients]
    dataset = ListDataset(clients, public=data.load_public() if case.public else None, validation=held)
    normalized = dict.fromkeys(("dense", "fedap", "fedbn", "target"), normalized_layers)
    deep = dict.fromkeys(("depthfl", "fedmlb", "inclusivefl", "scalefl"), four_layers)
    networks = {**normalized, **deep, "fedme": two_architectures, "pfedpara": factorized_layers}
    task = networks.get(name, two_layers)()
    if settings.get("mode") == "lm":
        task = recurrent_layers()
    update = {**FOURS.model_dump(), "rounds": 3, "momentum": 0.5, **case.train, **training}
    if case.everyone:
        update["clients_per_round"] = "all"
    return Toy(method, dataset, task, TrainConfig(**update), unseen=unseen, stages=case.stages)


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
