"""Code of users that a configuration names: what is known of it without importing it."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model

from rayfl.config.schema import ExperimentConfig
from rayfl.data.sources.custom import CustomSource
from rayfl.errors import ConfigError
from rayfl.models.custom import CustomModel
from rayfl.models.zoo import Candidates
from rayfl.naming.objects import names_an_object
from rayfl.tasks.registry import CustomTask


class NamedMethod(BaseModel):
    """A user's own method by its name, with the values that the configuration gives; its class was not imported."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str


def schema_without_code(
    schema: type[ExperimentConfig], content: Mapping[str, Any], trusted: Collection[str] = ()
) -> type[ExperimentConfig]:
    """The configuration class for some raw content, in which a user's own method is a :class:`NamedMethod`.

    Args:
        schema: the class that knows the built-in methods.
        content: of a configuration.
        trusted: names ``module:Class`` that may be imported all the same.
    """
    section = content.get("algorithm")
    name = section.get("name") if isinstance(section, Mapping) else None
    if not names_an_object(name) or name in trusted:
        return schema
    return _with_named_method(schema, str(name))


def own_name(method: BaseModel) -> str:
    """Returns the name that a user's own method gives itself in its class; empty for all other methods."""
    if not names_an_object(getattr(method, "name", "")):
        return ""
    written: Any = type(method).__bases__[0]
    default = written.model_fields["name"].default
    return default if isinstance(default, str) else ""


def named_code(
    config: ExperimentConfig, sections: Sequence[str] = ("dataset", "task", "model", "algorithm", "train")
) -> list[str]:
    """The users' own functions and classes ``module:name`` that some sections of a configuration would import."""
    found: dict[str, list[str]] = {
        "dataset": [config.dataset.function] if isinstance(config.dataset, CustomSource) else [],
        "task": [config.task.factory] if isinstance(config.task, CustomTask) else [],
        "model": [model.factory for model in _models(config) if isinstance(model, CustomModel)],
        "algorithm": [config.algorithm.name] if names_an_object(config.algorithm.name) else [],
        "train": [config.train.optimizer] if names_an_object(config.train.optimizer) else [],
    }
    return list(dict.fromkeys(name for section in sections for name in found[section]))


def refuse_code(names: Collection[str], place: str) -> None:
    """Raises ConfigError, saying how it may be allowed, where code of users would be imported."""
    if names:
        raise ConfigError(
            f"{place} names code that would be imported and run for this: {', '.join(names)}. Read it, and add --trust "
            "if you trust it"
        )


def _models(config: ExperimentConfig) -> Sequence[BaseModel]:
    return config.model.candidates if isinstance(config.model, Candidates) else [config.model]


@lru_cache
def _with_named_method(schema: type[ExperimentConfig], path: str) -> type[ExperimentConfig]:
    label: Any = Literal[path]
    known: Any = schema.methods
    named: dict[str, type[BaseModel]] = {path: create_model("NamedMethod", __base__=NamedMethod, name=(label, path))}
    made = create_model(schema.__name__, __base__=schema)
    made.methods = ChainMap(named, known)  # in which no other method is looked up, and so imported
    return made
