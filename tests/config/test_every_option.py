"""No option is ignored: each changes what identifies a run or has an effect that a test shows, and is read by the code.

For every field of every section, of every data set, partition, model and method:

* some other value is valid and changes the configuration as it is resolved and hashed, or the field is one of those
  that are no part of what identifies a run;
* product code reads it, apart from its declaration;
* a test sets it; for those that are no part of what identifies a run, :data:`EFFECTS` names the test.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from tests.support.option_effects import EFFECTS

ROOT = Path(__file__).parents[2]
PRODUCT = [path for folder in ("rayfl", "actors", "algorithms", "cluster") for path in (ROOT / folder).rglob("*.py")]
TESTS = list((ROOT / "tests").rglob("*.py"))
SERIES = (
    *("window", "horizon", "stride", "validation", "test", "scaling", "season"),
    *("form", "client", "time", "covariates", "missing", "gaps", "decimal", "calendar"),
)
TOGETHER = {
    "PrivacyConfig.delta": {"clip_norm": 1, "noise_multiplier": 1},
    "PrivacyConfig.noise": {"clip_norm": 1, "noise_multiplier": 1},
    "PrivacyConfig.noise_at": {"clip_norm": 1, "noise_multiplier": 1},
    "PrivacyConfig.mechanism": {"clip_norm": 1, "noise_multiplier": 1},
    "PrivacyConfig.accountant": {"clip_norm": 1, "noise_multiplier": 1},
    "PrivacyConfig.bands": {"clip_norm": 1, "noise_multiplier": 1, "noise": "banded"},
    "PrivacyConfig.tree_rounds": {"clip_norm": 1, "noise_multiplier": 1, "noise": "tree"},
    "PrivacyConfig.target_quantile": {"clip_norm": 1},
    "PrivacyConfig.clip_lr": {"clip_norm": 1, "target_quantile": 0.5},
    "PrivacyConfig.count_noise": {"clip_norm": 1, "noise_multiplier": 1, "target_quantile": 0.5},
    "PrivacyConfig.example_noise_multiplier": {"example_clip_norm": 1},
    "PrivacyConfig.example_delta": {"example_clip_norm": 1, "example_noise_multiplier": 1},
    "AttackConfig.share": {"labels": "random"},
    "AttackConfig.clients": {"labels": "random"},
    "AttackConfig.labels": {"clients": [1]},
    "AttackConfig.message": {"clients": [1], "strength": 1},
    "AttackConfig.strength": {"clients": [1], "message": "scaled"},
    "AttackConfig.perturbation": {"clients": [1], "message": "min_max"},
    "SecureAggregation.modulus_bits": {"bits": 2},
    "EarlyStoppingConfig.patience": {"target": 0.5},
    "EarlyStoppingConfig.min_delta": {"patience": 1},
    "EarlyStoppingConfig.metric": {"patience": 1},
    "EarlyStoppingConfig.model": {"patience": 1},
    "EarlyStoppingConfig.min_rounds": {"patience": 1},
    "InitConfig.what": {"from": "run", "sha256": "0" * 64},
    "Clustered.similarity": {"by": "updates"},
    "TrainConfig.betas": {"optimizer": "adam"},
    "TrainConfig.eps": {"optimizer": "adam"},
    "TrainConfig.straggler_epochs": {"stragglers": 0.5},
    "SyntheticSource.iid": {"alpha": 0, "beta": 0},
    "LabelNoise.clients": {"kind": "symmetric", "ratio": 0.5},
    "LongTail.order": {"imbalance_factor": 5},
    "LongTail.official_test": {"imbalance_factor": 5},
    "RegressionSection.delta": {"loss": "huber"},
    "ForecastingSection.quantiles": {"loss": "quantile", "quantiles": [0.1, 0.5]},
    "SelfSupervisedSection.temperature": {"objective": "simclr"},
    "ClassificationSection.frequency": {"metrics": ["top1_by_frequency"]},
    "ClassificationSection.frequency_bounds": {"metrics": ["top1_by_frequency"], "frequency_bounds": [0.5, 0.9]},
    "ClassificationSection.thresholds": {"metrics": ["auroc"]},
    "ParquetSource.length": {"path": "rows.parquet", "tokenizer": "words"},
    "ParquetSource.vocabulary": {"path": "rows.parquet", "tokenizer": "words"},
    "ParquetSource.padding": {"path": "rows.parquet", "kind": "tokens"},
    "TuGraphsSource.max_degree": {"path": "graphs", "features": ["degree"]},
    "TuGraphsSource.larger": {"path": "graphs", "max_nodes": 9},
    "InteractionsSource.columns": {"path": "rows.csv"},
    "InteractionsSource.separator": {"path": "rows.csv"},
    **{f"SeriesSource.{field}": {"path": "rows.csv", "targets": ["load"]} for field in SERIES},
    "SeriesSource.borders": {"path": "rows.csv", "targets": ["load"], "borders": [5, 7]},
    "SyntheticSeriesSource.borders": {"borders": [5, 7]},
    "SeriesSource.separator": {"path": "rows.csv", "targets": ["load"], "separator": ";"},
    "SeriesSource.time_format": {"path": "rows.csv", "targets": ["load"], "time_format": "%Y"},
    "ImageFolderSource.part": {"path": "folder", "levels": ["split", "class"]},
    "ImageFolderSource.validation": {"path": "folder", "levels": ["split", "class"]},
    "HuggingFaceSource.length": {"path": "folder", "tokenizer": "words"},
    "HuggingFaceSource.vocabulary": {"path": "folder", "tokenizer": "words"},
    "HuggingFaceSource.padding": {"path": "folder", "kind": "tokens"},
    "PromptTuningConfig.tokenizer": {"text": "what"},
    "PromptTuningConfig.text_tokens": {"text": "what"},
}
"""What else must be given for an option to be valid."""


def models(annotation: Any) -> list[type[BaseModel]]:
    """The models that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in models(argument)]


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """All sections with their paths, every choice of a section apart."""
    found: set[tuple[str, type[BaseModel]]] = set()

    def below(path: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
        if (path, model) in found or path.count(".") > 3:
            return
        found.add((path, model))
        yield path, model
        for field, info in model.model_fields.items():
            chosen = Experiment.methods.values() if not path and field == "algorithm" else ()
            for inner in [*models(info.annotation), *chosen]:
                if field != "candidates":  # models again
                    yield from below(f"{path}.{field}" if path else field, inner)

    yield from below("", Experiment)


SECTIONS = list(sections())
OPTIONS = [
    (path, field)
    for path, model in SECTIONS
    for field, info in model.model_fields.items()
    if not models(info.annotation) and not (field == "name" and path) and (path or field != "algorithm")
]
"""All options, by the path of their section."""


def dotted(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def identifies(path: str, field: str) -> bool:
    """Whether the option is part of what identifies a run, as ``ExperimentConfig.fingerprint`` has it."""
    top = dotted(path, field).partition(".")[0]
    # What a run begins from must be there to be hashed.
    elsewhere = {"name", "storage_path", "cluster", "clients", "storage", "tracking", "max_failures", "init"}
    free = ("engine.width", "engine.capture", "engine.rows_per_step")
    return top not in elsewhere and dotted(path, field) not in free


def trees(product: bool) -> Iterator[tuple[Path, ast.Module]]:
    """One after the other: all at once are millions of objects, which the garbage collector goes through."""
    for path in PRODUCT if product else TESTS:
        yield path, ast.parse(path.read_text(encoding="utf-8"))


@cache
def reads() -> dict[str, set[Path]]:
    """The names that product code reads as attributes (or by a constant ``getattr``), and where."""
    found: dict[str, set[Path]] = {}
    for path, tree in trees(product=True):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.setdefault(node.attr, set()).add(path)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                found.setdefault(str(getattr(node.args[1], "value", "")), set()).add(path)
    return found


@cache
def set_by_tests() -> set[str]:
    """The names that tests give values to: keywords, keys of dictionaries (but of :data:`EFFECTS`), overrides."""
    found: set[str] = set()
    for _, tree in trees(product=False):
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "EFFECTS":
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.keyword) and node.arg is not None:
                    found.add(node.arg)
                elif isinstance(node, ast.Dict):
                    keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                    found |= {str(key).rpartition(".")[2] for key in keys}
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found |= set(re.findall(r"(\w+)(?:=|: )", node.value))
    return found


def values(annotation: Any, default: Any) -> Iterator[Any]:
    """Other values that a field might take."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from arguments
    elif annotation is bool:
        yield not default
    elif annotation is int:
        yield from (1, 2, 3, 5, 7, 11, 13, 16, 19, 100)
    elif annotation is float:
        yield from (0.5, 0.25, 0.1, 1.5, 2.0, 90.0)
    elif annotation is str:
        yield from ("other", "module:name", "module:another", "0" * 64, "{column}", "words {}")
    elif annotation is Path:
        yield from (Path("other.parquet"), Path("another.parquet"))
    elif annotation is type(None):
        yield None
    elif origin is dict:
        pairs = zip(*(values(argument, None) for argument in arguments), strict=False)
        yield from ({"seed": 1}, {"seed": 2}, *({key: value} for key, value in pairs))
    elif origin in (tuple, list):
        items = [list(values(argument, None)) for argument in arguments if argument is not Ellipsis]
        for first in itertools.islice(itertools.product(*items), 40):
            yield from (first, first * 2, first * 3)
            if isinstance(default, tuple) and default:
                yield (*first, *default)
    elif arguments:  # a union, or one with constraints
        for argument in arguments:
            yield from values(argument, default)
    elif hasattr(annotation, "__mro__"):
        for base in (int, float, str):
            if issubclass(annotation, base):
                yield from values(base, default)


def required(model: type[BaseModel]) -> Iterator[dict[str, Any]]:
    """Values for the fields without a default."""
    names = [name for name, info in model.model_fields.items() if info.is_required()]
    choices = [list(itertools.islice(values(model.model_fields[name].annotation, None), 12)) for name in names]
    for chosen in itertools.islice(itertools.product(*choices), 400):
        yield dict(zip(names, chosen, strict=True))


def resolved(model: type[BaseModel], content: dict[str, Any]) -> str | None:
    """The section as it is hashed; None if it is refused."""
    try:
        return model.model_validate(content).model_dump_json()
    except ValidationError:
        return None


def differ(model: type[BaseModel], field: str) -> bool:
    """Whether two values are valid, if need be with another option of the section, and not the same."""
    info = model.model_fields[field]
    if get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1:
        return True  # says what the method does: everything else is refused
    others = [
        {name: value}
        for name, other in model.model_fields.items()
        if name != field and not models(other.annotation)
        for value in itertools.islice(values(other.annotation, other.default), 6)
    ]
    for base in required(model):
        base = {name: value for name, value in base.items() if name != field}
        for extra in [{}, TOGETHER.get(f"{model.__name__}.{field}", {}), *others]:
            tried = [{}, *({field: value} for value in values(info.annotation, info.default))]
            if len({resolved(model, {**base, **extra, **one}) for one in tried} - {None}) > 1:
                return True
    return False


def test_every_option_is_read_and_tried() -> None:
    wrong = []
    for path, field in OPTIONS:
        place = dotted(path, field)
        if field not in reads():
            wrong.append(f"{place}: no product code reads .{field}")
        if field not in set_by_tests():
            wrong.append(f"{place}: no test sets {field}")
        if not identifies(path, field) and place not in EFFECTS:
            wrong.append(f"{place} is no part of what identifies a run: name the test of its effect in EFFECTS")
    assert len(OPTIONS) > 1000 and wrong == []


def test_every_option_can_be_chosen_and_makes_a_difference() -> None:
    same = [
        f"{path}.{field} of {model.__name__}: no other value is valid, or the configuration stays the same"
        for path, model in SECTIONS
        for field, info in model.model_fields.items()
        if path and not models(info.annotation) and field != "name" and not differ(model, field)
    ]
    assert same == []


def test_what_identifies_a_run_is_all_but_what_is_known_to_change_no_result() -> None:
    base = load_config(Experiment, "quickstart", [])
    for override in ("seed=1", "train.lr=0.02", "holdout.test=0.35", "evaluation.every=3", "noise.ratio=0.1"):
        changes = [override, "noise.kind=pair"] if override.startswith("noise") else [override]
        assert load_config(Experiment, "quickstart", changes).fingerprint() != base.fingerprint(), override
    excluded = {top for top in Experiment.model_fields if not identifies("", top)}
    assert excluded == {"name", "storage_path", "cluster", "clients", "storage", "tracking", "max_failures", "init"}


@pytest.mark.parametrize("option", sorted(EFFECTS))
def test_the_tests_that_show_an_effect_exist_and_set_the_option(option: str) -> None:
    file, _, name = EFFECTS[option].partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert option.rpartition(".")[2] in text, f"{file} does not mention {option}"
    assert not name or re.search(rf"^def {name}\(", text, re.MULTILINE), f"{file} has no test {name}"
    assert option in {dotted(path, field) for path, model in SECTIONS for field in model.model_fields}
