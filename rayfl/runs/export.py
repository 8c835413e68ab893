"""A committed model as files that need no rayfl."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from rayfl.data.files.whole import new_file
from rayfl.errors import ConfigError
from rayfl.models.pretrained.feature_adapter import OF_FEATURES
from rayfl.models.pretrained.merging import write_model
from rayfl.models.pretrained.mixing import is_delta, is_mixed_by_rows, merged
from rayfl.models.pretrained.peft_files import write_adapter
from rayfl.models.pretrained.prompts import PROMPTS
from rayfl.models.pretrained.text_files import is_of_texts, text_head_file, tokenizer_files
from rayfl.models.zoo import Candidates, PretrainedModel
from rayfl.results.schemas import metrics_of
from rayfl.runs.committed import CommittedModels, single_model, task_of
from rayfl.runs.measured import Cohort
from rayfl.runs.rows import named_model, where
from rayfl.tasks.base import Predictor


@dataclass(frozen=True)
class Exported:
    """What was exported.

    Attributes:
        row: the model's name in the tables.
        round: after which round.
        parameters: number of scalars.
        modules: the architecture as PyTorch prints it.
        metrics: by split, the metrics of ``clients.parquet`` for this client; none if it was not evaluated then.
    """

    row: str
    round: int
    parameters: int
    modules: str
    metrics: dict[str, dict[str, float]]


def check_destination(destination: Path) -> None:
    """Raises ConfigError for a name that does not end in .safetensors."""
    if destination.suffix != ".safetensors":
        raise ConfigError(f"--out: {destination} must end in .safetensors")


def export_model(models: CommittedModels, client: int, model: str | None, destination: Path) -> Exported:
    """Writes one model of a client.

    The tensors have the names of the model's ``state_dict`` and are as they were computed with, on the CPU; parameters
    that require no gradient, which no commit has, are those of the model as it is made today. The file's metadata have,
    next to ``format``, one entry ``rayfl``: JSON with the method, where the model is from, the section ``model`` of its
    configuration, the kind and shape of its inputs and what they were made by, the section ``transform`` (what was done
    to images), the modules, the metrics of the tables, and the section ``task`` where it has replaced layers.

    Args:
        models: the commit.
        client: whose model.
        model: a row of the tables; None: the method's personalized model.
        destination: the file, ``.safetensors``.

    Raises:
        ConfigError: no such client or model, one that is several models, or another ending; nothing is written.
        DataError: the file cannot be written.
    """
    check_destination(destination)
    chosen = _chosen(models, client, model)
    with new_file(destination) as file:
        metadata = {"format": "pt", "rayfl": json.dumps(chosen.description)}
        file.write(safetensors.torch.save(chosen.tensors, metadata))
    return chosen.exported


def export_adapter(models: CommittedModels, client: int, model: str | None, folder: Path) -> Exported:
    """Writes adapters and head of one model of a client as the package ``peft`` reads them.

    Args:
        models: the commit of a run with ``model=pretrained``.
        client: whose model.
        model: a row of the tables; None: the method's personalized model.
        folder: is made; ``PeftModel.from_pretrained`` loads it over the run's base.

    Raises:
        ConfigError: as for :func:`export_model`, or the model has no adapters, or some that peft does not know.
    """
    chosen = _with_adapters(models, client, model, "peft", "which peft cannot")
    if any(map(is_delta, chosen.tensors)):
        raise ConfigError(
            f"--format peft: {chosen.exported.row!r} adds a whole matrix to each layer, which no adapter of peft does: "
            "--format transformers writes the base with it"
        )
    rank = next((len(leaf) for name, leaf in chosen.tensors.items() if name.endswith(".lora_A.weight")), None)
    own = {name: leaf for name, leaf in chosen.tensors.items() if not is_of_texts(name)}
    settings = chosen.section.peft_settings(list(own), models.parts.model_spec.target, rank)
    write_adapter(folder, own, settings, {**chosen.description, "base": chosen.section.base}, _text_head(chosen))
    return chosen.exported


def export_merged(models: CommittedModels, client: int, model: str | None, folder: Path) -> Exported:
    """Writes one model of a client with its adapters merged into the base, as transformers reads it.

    Args:
        models: the commit of a run with ``model=pretrained``.
        client: whose model.
        model: a row of the tables; None: the method's personalized model.
        folder: is made; ``from_pretrained`` of transformers loads it. Weights are float32.

    Raises:
        ConfigError: as for :func:`export_model`, or the model has no adapters, or some that cannot be merged.
        ModelError: the run's base is not there, or was changed.
    """
    chosen = _with_adapters(models, client, model, "transformers", "so that no weights do what they do together")
    if any(name.startswith(PROMPTS) for name in chosen.tensors):
        raise ConfigError(
            f"--format transformers: {chosen.exported.row!r} reads virtual tokens, which are inputs and no weights of "
            "the base: set --format peft for decoders of texts, or leave it out for a file of all tensors"
        )
    if any(name.startswith(OF_FEATURES) for name in chosen.tensors):
        raise ConfigError(
            f"--format transformers: {chosen.exported.row!r} passes features through a network that the base does not "
            "have: leave --format out for a file of all tensors"
        )
    about = {key: value for key, value in chosen.description.items() if key != "modules"}
    about["base"], labels = chosen.section.base, _labels(models, chosen.section)
    further = _text_head(chosen)
    if further:
        further |= tokenizer_files(Path(chosen.network.source.folder))
    whole = write_model(folder, chosen.network, chosen.tensors, about, labels, further)
    return replace(chosen.exported, parameters=sum(one.numel() for one in whole.parameters()), modules=str(whole))


def _text_head(chosen: _Chosen) -> dict[str, bytes]:
    """The file of the head that texts make, by its name; none where there is no such head."""
    prompt = chosen.section.prompt
    return {} if prompt is None else text_head_file(chosen.network, chosen.tensors, prompt.classes)


def _labels(models: CommittedModels, section: PretrainedModel) -> tuple[str, ...]:
    """Names of a model's outputs; none where its head began as the base's, whose names are theirs then."""
    spec, config = models.parts.model_spec, models.run.config
    if spec.target == "tokens":
        return ()
    known = config.dataset.aimed_at(config.task.target).class_names() if spec.target == "class" else ()
    if len(known) == spec.num_classes:
        return known
    own = section.head.init == "new" and section.head.train
    return tuple(f"LABEL_{number}" for number in range(spec.num_classes)) if own else ()


def _with_adapters(models: CommittedModels, client: int, model: str | None, format: str, why: str) -> _Chosen:
    """A model whose adapters are the same for all inputs.

    Args:
        models: the commit.
        client: whose model.
        model: its row.
        format: what is written.
        why: adapters that differ from row to row are not.
    """
    chosen = _chosen(models, client, model)
    if not isinstance(chosen.section, PretrainedModel):
        raise ConfigError(
            f"--format {format}: model={chosen.section.name} has no adapters: leave it out for a file of all tensors"
        )
    if is_mixed_by_rows(chosen.tensors):
        raise ConfigError(
            f"--format {format}: {chosen.exported.row!r} mixes two adapters by the rows of an input, {why}: "
            "leave --format out for a file of all tensors"
        )
    return chosen


@dataclass(frozen=True)
class _Chosen:
    """A model of a client: its tensors, its network, what is said of it, and the section that makes it."""

    tensors: dict[str, Tensor]
    network: Any
    description: dict[str, Any]
    section: Any
    exported: Exported


def _chosen(models: CommittedModels, client: int, model: str | None) -> _Chosen:
    run, rounds = models.run, models.rounds_completed
    found = models.predictors(client)
    cohort: Cohort = "unseen" if client in models.parts.context.newcomers else "all"
    row = named_model(run, model, found, rounds, cohort)
    predictor = models.predictor(client, row)
    network = task_of(predictor, models.parts.task).network
    whole = {**single_model(predictor, row), **network.fixed_parameters}
    whole = merged(whole, {**network.initialize(0), **network.fixed_parameters})
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in whole.items()}
    section, modules = _architecture(models, predictor)
    spec = models.parts.model_spec
    metrics = _metrics(models, client, row, cohort)
    description = {
        "method": run.config.algorithm.name,
        "run": run.name,
        "client": client,
        "name": models.parts.dataset.names[client],
        "round": rounds,
        "row": row,
        "model": section.model_dump(mode="json"),
        "inputs": {
            "kind": spec.kind,
            "shape": spec.shape,
            "classes": spec.num_classes,
            "vocabulary": spec.vocabulary,
            **({} if spec.target == "class" else {"target": spec.target}),
            **({"horizon": spec.horizon} if spec.horizon else {}),
            **({"quantiles": spec.quantiles} if spec.quantiles else {}),
            **models.parts.dataset.made_by(client),
        },
        "transform": run.config.transform.model_dump(mode="json"),
        # of which the layers are that stand for the last one of the model
        **({"task": run.config.task.model_dump(mode="json")} if run.config.task.views > 1 else {}),
        "modules": modules,
        "metrics": metrics,
    }
    return _Chosen(tensors, network, description, section, Exported(row, rounds, _scalars(tensors), modules, metrics))


def _architecture(models: CommittedModels, predictor: Predictor) -> tuple[Any, str]:
    """The section of the configuration that makes the model, and its modules."""
    task, config = models.parts.task, models.run.config.model
    network = task_of(predictor, task.candidates[0]).network
    architecture: Any = config
    if isinstance(config, Candidates):
        networks = [candidate.network for candidate in task.candidates]
        architecture = config.candidates[networks.index(network)]
    with torch.random.fork_rng(devices=[]):
        # What the task has made of the architecture is in the file, too.
        module = network.factory() if models.run.config.task.views > 1 else architecture.whole(models.parts.model_spec)
    return architecture, str(module)


def _metrics(models: CommittedModels, client: int, row: str, cohort: Cohort) -> dict[str, dict[str, float]]:
    rows = where(
        models.run.clients, client=client, model=row, round=models.rounds_completed, cohort=cohort, phase="received"
    )
    names = [metric.name for metric in metrics_of(rows)]
    return {
        str(found["split"]): {m: float(found[m]) for m in names if found[m] is not None} for found in rows.to_pylist()
    }


def _scalars(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors.values())
