"""Validation errors in words: all at once, each with its path, what is allowed and the nearest name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from rayfl.config.redaction import redact
from rayfl.naming.spelling import nearest

_BRANCH = re.compile(r"(literal|nullable|list|tuple|dict|function-\w+|constrained-\w+)\[")
"""What pydantic calls a branch of a union of values and models: no part of what was written."""
_SEVERAL = re.compile(r"[^,]+(,[^,]+)+|-?\d+:-?\d+(:\d+)?|(log|uniform|choice)\(.*\)")
_FOR_SWEEPS = "; several values are for `rayfl sweep`"
_WRITTEN = re.compile(r"\s*(\{.*\}|\[.*\])\s*", re.DOTALL)
_IN_PYTHON = "; this is text: in Python give a dict or a list, of which a shell's overrides are the text"
_OF_ONE_VALUE = ("int_parsing", "float_parsing", "bool_parsing", "literal_error", "union_tag_invalid")


def explain(error: ValidationError, schema: type[BaseModel], place: str) -> str:
    """All problems of a configuration, a line each.

    Args:
        error: what pydantic found.
        schema: the configuration class.
        place: the file or preset, named in the first line.
    """
    reported = error.errors()
    locations = [problem["loc"] for problem in reported]
    # A sequence whose items are wrong is reported as too short as well: only the items help.
    found: dict[str, list[str]] = {}
    for problem, here in zip(reported, locations, strict=True):
        if not any(len(other) > len(here) and other[: len(here)] == here for other in locations):
            path, text = _describe(problem, schema)
            found.setdefault(path, []).append(text)
    for problem, here in zip(reported, locations, strict=True):
        value = problem.get("ctx", {}).get("tag", problem["input"])
        texts = found.get(".".join(_walk(here, schema)[0]))
        if not texts or not isinstance(value, str):
            continue
        if _WRITTEN.fullmatch(value):
            texts[-1] = f"{texts[-1].removesuffix(_IN_PYTHON)}{_IN_PYTHON}"
        elif problem["type"] in _OF_ONE_VALUE and _SEVERAL.fullmatch(value):
            texts[-1] = f"{texts[-1].removesuffix(_FOR_SWEEPS)}{_FOR_SWEEPS}"
    return problems(place, found)


def problems(place: str, found: Mapping[str, Sequence[str]]) -> str:
    """Returns what is wrong by dotted path, a line each after one that names the place."""
    count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
    return "\n".join([f"{place}: {count}", *(f"  {path}: {', or '.join(texts)}" for path, texts in found.items())])


def _describe(problem: Any, schema: type[BaseModel]) -> tuple[str, str]:
    """The dotted path of a problem, and what is wrong there."""
    path, owners = _walk(problem["loc"], schema)
    dotted = ".".join(path) or "(top level)"
    return dotted, _message(problem, dotted, path, owners)


def _message(problem: Any, dotted: str, path: Sequence[str], owners: Sequence[type[BaseModel]]) -> str:
    kind, context, value = problem["type"], problem.get("ctx", {}), problem["input"]
    if kind == "extra_forbidden":
        fields = sorted({field for owner in owners for field in owner.model_fields})
        meant = _by_symbol(path[-1], owners) or _in_sections(path[-1], owners) or nearest(path[-1], fields)
        return f"unknown{meant}; allowed: {', '.join(fields)}"
    if kind == "union_tag_invalid":
        names = [tag.strip().strip("'") for tag in context["expected_tags"].split(",")]
        given = str(context["tag"])
        return f"{given!r} does not exist{nearest(given, names)}; allowed: {', '.join(names)}"
    if kind == "union_tag_not_found":
        return f"needs a name (for instance {dotted}=...); see `rayfl list`"
    if kind == "missing":
        return "required, not given"
    if kind == "literal_error":
        choices = [choice.strip("' ") for choice in context["expected"].replace(" or ", ", ").split(",")]
        return f"{value!r} is not allowed{nearest(str(value), choices)}; allowed: {', '.join(choices)}"
    if kind in ("model_type", "model_attributes_type") and all(path[-1] in owner.model_fields for owner in owners):
        inner = [model for owner in owners for model in _models(owner.model_fields[path[-1]].annotation)]
        named = any("name" in model.model_fields for model in inner)
        ways = [f"{dotted}{'.name' if len(path) > 1 else ''}=NAME"] if named else []
        return f"is a section: set {' or '.join([*ways, f'{dotted}.OPTION=VALUE'])} (got {_short(value)})"
    if kind == "string_type" and isinstance(value, bool | int | float | date):
        return f"must be text, for which YAML does not take this (got {value}): put it in quotes, '{dotted}=\"TEXT\"'"
    message: str = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if kind == "value_error" and isinstance(value, Mapping | BaseModel):
        return message  # what does not go together in a section names its options; the section's beginning says nothing
    return f"{message} (got {_short(value)})"


def _walk(location: Sequence[Any], schema: type[BaseModel]) -> tuple[list[str], list[type[BaseModel]]]:
    """The path as the user wrote it, and the models one of whose fields is at its end."""
    path: list[str] = []
    here: list[type[BaseModel]] = [schema]
    owners = here
    for part in location:
        chosen = [model for model in here if len(here) > 1 and model.model_fields["name"].default == part]
        if chosen:
            here = chosen
            continue
        if isinstance(part, str) and _BRANCH.match(part):
            continue
        if not here and isinstance(part, str):
            break  # pydantic goes on with the branch of a union of plain types: no part of what was written
        path.append(str(part))
        if isinstance(part, int):
            continue  # an item is of the models that its sequence names
        owners = here
        annotations = [m.model_fields[part].annotation for m in here if part in m.model_fields]
        here = [model for annotation in annotations for model in _models(annotation)]
    return path, owners


def _by_symbol(word: str, owners: Sequence[type[BaseModel]]) -> str:
    """`` (did you mean 'option', the paper's word?)`` where that is the symbol of an option of a method."""
    found = set[str]()
    for owner in owners:
        for option, about in owner.model_fields.items():
            extra = about.json_schema_extra
            if isinstance(extra, Mapping) and word == extra.get("symbol"):
                found.add(option)
    return f" (did you mean {' or '.join(map(repr, sorted(found)))}, the paper's {word}?)" if found else ""


def _in_sections(word: str, owners: Sequence[type[BaseModel]]) -> str:
    """`` (did you mean section.word?)`` where sections have the option, else nothing."""
    found = {
        f"{field}.{word}"
        for owner in owners
        for field, about in owner.model_fields.items()
        if any(word in model.model_fields for model in _models(about.annotation))
    }
    return f" (did you mean {' or '.join(sorted(found))}?)" if found else ""


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models an annotation names, alone or in a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def _short(value: Any) -> str:
    text = redact(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."
