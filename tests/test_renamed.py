"""Names that the pages and examples of rayfl 0.1.0 import still work; where they have moved, with a warning."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest

from rayfl import renamed

ROOT = Path(__file__).parents[1]

MOVED = [
    ("rayfl.aggregation", "Weighted"),
    ("rayfl.cli", "main"),
    ("rayfl.inspection.folder", "open_run"),
    ("rayfl.objectives", "declared_by"),
    ("rayfl.reference", "reference_tables"),
    ("rayfl.storage", "Storage"),
    ("rayfl.tables", "CLIENTS_SCHEMA"),
    ("rayfl.tables", "ROUNDS_SCHEMA"),
    ("rayfl.tables", "SKIPPED_SCHEMA"),
    ("rayfl.tasks", "Predictor"),
]
STAYED = [
    ("algorithms.base", "Averaging"),
    ("algorithms.base", "setting"),
    ("algorithms.registry", "Experiment"),
    ("rayfl", "run"),
    ("rayfl", "Client"),
    ("rayfl", "Predictor"),
    ("rayfl", "Result"),
    ("rayfl", "Weighted"),
    ("rayfl", "import_leaf"),
    ("rayfl.config.paper_presets", "method_settings"),
    ("rayfl.data.federated", "FederatedDataset"),
    ("rayfl.data.federated", "InputSpec"),
    ("rayfl.data.federated", "OnDemand"),
    ("rayfl.engine.client", "Client"),
    ("rayfl.errors", "RayflError"),
    ("rayfl.models.base", "ClassificationModel"),
    ("rayfl.params", "interpolate"),
    ("rayfl.params", "squared_distance"),
    ("rayfl.plots.output", "write_plot"),
    ("rayfl.randomness", "RandomStreams"),
]


def _imported(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[object, list[warnings.WarningMessage]]:
    """What ``from module import name`` gives in a process that has not done so before, and its deprecations."""
    for loaded in {module, *renamed.MODULES} & {*sys.modules} & {*renamed.MODULES}:
        monkeypatch.delitem(sys.modules, loaded)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        space: dict[str, object] = {}
        exec(compile(f"from {module} import {name}", __file__, "exec"), space)
    return space[name], [one for one in said if issubclass(one.category, DeprecationWarning) and "rayfl" in str(one)]


@pytest.mark.parametrize(("module", "name"), MOVED)
def test_old_names_work_and_say_the_new_one(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = _imported(module, name, monkeypatch)
    news = renamed.MODULES.get(module) or (renamed.NAMES[module][name],)
    assert found is next(getattr(import_module(new), name) for new in news if hasattr(import_module(new), name))
    assert any(news[0] in str(one.message) and one.filename == __file__ for one in said), [str(one) for one in said]


@pytest.mark.parametrize(("module", "name"), STAYED)
def test_names_that_stay_say_nothing(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, said = _imported(module, name, monkeypatch)
    assert found is not None
    assert not said


def test_the_table_names_modules_that_are_there_and_none_that_is_not_gone() -> None:
    for old, news in renamed.MODULES.items():
        place = ROOT / old.replace(".", "/")
        assert not place.with_suffix(".py").exists()
        assert not (place / "__init__.py").exists()
        assert all(import_module(new) for new in news)
    for folder, names in renamed.NAMES.items():
        assert (ROOT / folder.replace(".", "/") / "__init__.py").exists()
        assert all(hasattr(import_module(module), name) for name, module in names.items())


def test_unknown_names_are_refused_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"cannot import name 'Nothing' from 'rayfl\.tasks'"):
        _imported("rayfl.tasks", "Nothing", monkeypatch)
    with pytest.raises(ImportError, match=r"cannot import name 'Nothing' from 'rayfl\.aggregation'"):
        _imported("rayfl.aggregation", "Nothing", monkeypatch)
    with pytest.raises(ModuleNotFoundError, match=r"rayfl\.nothing"):
        import_module("rayfl.nothing")


@pytest.mark.slow
def test_nothing_of_ours_uses_an_old_name() -> None:
    code = (
        "import warnings; warnings.filterwarnings('error', message='.* since rayfl 0.2', category=DeprecationWarning);"
        "import rayfl.cli.entry, cluster.run, algorithms.registry; rayfl.run, rayfl.Client, rayfl.import_leaf"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
