"""What can be named in a configuration, with a line on each: the lists and pages of the command line."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rayfl.cli.source_files import named_classes
from rayfl.config.paper_presets import paper_presets, preset_names, preset_text
from rayfl.config.plain_yaml import read_yaml

KINDS = {
    "algorithms": "algorithm",
    "datasets": "dataset",
    "partitions": "partition",
    "tasks": "task",
    "models": "model",
    "stages": "stages",
    "selections": "selection",
    "systems": "system",
    "compressions": "compression",
    "aggregators": "aggregator",
    "contributions": "contribution",
}
"""What is listed at once, with the section of a configuration that it is for."""

LONG = ("presets", "tables")
"""What is listed where it is asked for."""

Kind = Literal[
    "algorithms",
    "methods",
    "datasets",
    "partitions",
    "tasks",
    "models",
    "stages",
    "selections",
    "systems",
    "compressions",
    "aggregators",
    "contributions",
    "presets",
    "tables",
]
"""All lists; methods are another word for algorithms."""


def catalog(kind: str) -> list[tuple[str, ...]]:
    """The names of a kind that a configuration may use and what each is; of a method also its paper and what persists.

    Nothing but `tables` imports PyTorch.

    Args:
        kind: of :data:`KINDS` or :data:`LONG`.
    """
    if kind == "presets":
        return [_preset_entry(name) for name in preset_names()]
    if kind == "tables":
        return _tables()
    found = named_classes(KINDS[kind])
    if kind != "algorithms":
        return [(one.name, one.sentence) for one in found]
    return [
        (
            one.name,
            one.sentence,
            one.texts.get("citation", ""),
            f"client: {one.texts.get('client_keeps', '-')}; server: {one.texts.get('server_keeps', 'w')}",
        )
        for one in found
    ]


def fields(kind: str) -> tuple[str, ...]:
    """Returns what the entries of a kind are, in their order; a preset that is no paper's has the first two."""
    return {
        "algorithms": ("name", "about", "source", "keeps"),
        "presets": ("name", "about", "table", "data"),
        "tables": ("name", "paper", "table", "caption"),
    }.get(kind, ("name", "about"))


def _tables() -> list[tuple[str, ...]]:
    from rayfl.reproduction.reference import reference_tables
    from rayfl.reproduction.tables import obstacle

    return [
        (table.name, paper_presets()[table.preset_names[0]].paper.short, table.table, table.caption)
        for table in reference_tables()
        if not obstacle(table)
    ]


def describe_method(method: type[BaseModel]) -> str:
    """A method's docstring."""
    return inspect.getdoc(method) or ""


def hyper_parameters(method: type[BaseModel]) -> list[tuple[str, str, str, str, str]]:
    """Field, the paper's symbol, default, range and meaning of each hyper-parameter."""
    rows = []
    for name, field in method.model_fields.items():
        if name == "name":
            continue
        extra: Any = field.json_schema_extra or {}
        default = "required" if field.default is PydanticUndefined else str(field.default)
        rows.append((name, str(extra.get("symbol", "")), default, _range(field), field.description or ""))
    return rows


def _range(field: Any) -> str:
    """Bounds, or the allowed words, and the bounds of numbers beside these."""
    found = _literals(field.annotation)
    numbers = [_bounds(one.metadata) for one in found if isinstance(one, FieldInfo)]
    return _bounds(field.metadata) or " | ".join([word for word in found if isinstance(word, str)] + numbers)


def _bounds(metadata: Sequence[Any]) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    return ", ".join(f"{sign} {getattr(m, key)}" for m in metadata for key, sign in signs.items() if hasattr(m, key))


def _literals(annotation: Any) -> list[Any]:
    arguments = get_args(annotation)
    if not arguments:
        return [annotation] if not isinstance(annotation, type) else []
    return [inner for argument in arguments for inner in _literals(argument)]


def first_sentence(model: type[BaseModel]) -> str:
    """The first paragraph of a docstring, on one line."""
    paragraph = (inspect.getdoc(model) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


def _preset_entry(name: str) -> tuple[str, ...]:
    """Of a paper's preset its name, the paper, the table and the data; of others the name and their first comment."""
    made = paper_presets().get(name)
    if made is not None:
        return name, made.paper.short, made.table, made.about
    text = preset_text(name)
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    return name, comment.split(": ")[0].rstrip(".") if comment else str(read_yaml(text).get("algorithm", ""))
