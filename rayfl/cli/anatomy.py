"""What ``rayfl show model=NAME`` prints: a model's parts, whether it stacks, and what methods send and keep."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayfl.errors import ConfigError, RayflError
from rayfl.naming.spelling import nearest
from rayfl.params import leaves

if TYPE_CHECKING:
    from rayfl.config.schema import ExperimentConfig
    from rayfl.examples import InputSpec
    from rayfl.models.base import Network

_CLIENTS, _TRAIN, _TEST = 2, 8, 2
_ROUNDS = 2
"""The first round may be another than all further ones: methods that look at other clients' models have none yet."""


@dataclass(frozen=True)
class Anatomy:
    """A model for a data set.

    Attributes:
        model: its name.
        inputs: shape of an input.
        classes: number of outputs.
        parameters: numbers that are trained or fixed.
        trained: those that are trained.
        buffers: numbers beside them, such as running statistics.
        head: parameters of the last linear layer.
        body: all other parameters.
        stacks: whether many clients' models can be trained as one stack.
        why_not: why it cannot; empty if it can.
    """

    model: str
    inputs: tuple[int, ...]
    classes: int
    parameters: int
    trained: int
    buffers: int
    head: int
    body: int
    stacks: bool
    why_not: str


@dataclass(frozen=True)
class Traffic:
    """What a method sends and keeps for each client, or why it does not run.

    Attributes:
        method: its name.
        down: bytes from the server to a client in a round.
        up: bytes from a client to the server in a round.
        state: bytes of tensors that a client keeps from round to round.
        refused: why the method does not run with this model; empty if it does.
    """

    method: str
    down: int | None
    up: int | None
    state: int | None
    refused: str = ""


def anatomies(config: ExperimentConfig) -> list[Anatomy]:
    """The model, or each of the candidates, for the inputs of the configuration's data set.

    Raises:
        DataError: the data set is not there, and does not say its shape without its files.
        ModelError: the model does not fit it.
    """
    from rayfl.models.zoo import Candidates

    spec, model = inputs_of(config), config.model
    candidates = model.candidates if isinstance(model, Candidates) else (model,)
    made_for = config.task.of_model(spec)
    networks = [config.task.network_of(one.network(made_for), made_for, one.name) for one in candidates]
    shown = replace(made_for, shape=spec.shape)
    return [_anatomy(one.name, network, shown) for one, network in zip(candidates, networks, strict=True)]


def inputs_of(config: ExperimentConfig) -> InputSpec:
    """Returns what a model sees of the data set, from its description where that says it, else from its samples."""
    from rayfl.data.images.transform import Preprocessing
    from rayfl.data.opening import open_dataset
    from rayfl.data.partitions.base import IIDPartition
    from rayfl.data.sources.base import Samples
    from rayfl.randomness import RandomStreams

    known = config.dataset.known_spec
    if known is not None:
        return Preprocessing(known, config.transform.resize).spec
    streams = RandomStreams(config.seed)
    opened = config.dataset.aimed_at(config.task.target).open(streams)
    if isinstance(opened, Samples) and opened.clients is None:  # how they are divided changes no shape
        config = config.model_copy(update={"partition": IIDPartition(num_clients=1)})
    return open_dataset(config, streams).spec


def measured(config: ExperimentConfig, spec: InputSpec, methods: Sequence[str]) -> Iterator[Traffic]:
    """Returns what each method sends and keeps, from two rounds of two clients with a few made-up samples.

    Args:
        config: its sections ``model``, ``task`` and ``train`` count.
        spec: of the inputs.
        methods: names; of the configuration's own method its options count, too.

    Raises:
        ConfigError: there is no such method.
    """
    from algorithms.registry import METHODS

    for name in methods:
        if name not in METHODS:
            raise ConfigError(f"--methods: there is no method {name!r}{nearest(name, METHODS)}")
    with tempfile.TemporaryDirectory(prefix="rayfl-show-") as folder:
        path = Path(folder) / "made_up.parquet"
        _write(path, spec)
        for name in methods:
            yield _of_method(config, name, path)


def _anatomy(name: str, network: Network, spec: InputSpec) -> Anatomy:
    tree = network.initialize(0)
    parameters = sum(tree[key].numel() for key in network.parameter_names)
    fixed = sum(tensor.numel() for tensor in network.fixed_parameters.values())
    head = sum(tree[key].numel() for key in network.head_names)
    return Anatomy(
        model=name,
        inputs=tuple(spec.shape),
        classes=spec.num_classes,
        parameters=parameters + fixed,
        trained=parameters,
        buffers=sum(tree[key].numel() for key in network.buffer_names),
        head=head,
        body=parameters - head,
        stacks=network.vectorizable,
        why_not=network.why_not_vectorizable,
    )


def _write(path: Path, spec: InputSpec) -> None:
    """Two clients with a few random samples."""
    from rayfl.data.files.natural_file import NaturalHeader, write_natural
    from rayfl.data.files.targets import to_column
    from rayfl.models.tryout import made_up_inputs

    tokens = spec.kind == "tokens"
    header = NaturalHeader(
        kind="made_up",
        input=spec.kind,
        shape=spec.shape,
        num_classes=spec.num_classes,
        vocabulary=spec.vocabulary,
        storage="int32" if tokens else "float32",
        target=spec.target,
    )
    schema, generator = header.arrow_schema(), np.random.default_rng(0)

    def tables() -> Iterator[pa.Table]:
        for client in range(_CLIENTS):
            size = _TRAIN + _TEST
            flat = made_up_inputs(spec, client, size).numpy().reshape(-1).astype(header.storage)
            columns = [
                pa.array([str(client)] * size),
                pa.array(["train"] * _TRAIN + ["test"] * _TEST),
                pa.FixedSizeListArray.from_arrays(pa.array(flat), type=schema.field("x").type),
                to_column(_targets(spec, size, generator), schema.field("y").type),
            ]
            yield pa.Table.from_arrays(columns, schema=schema)

    write_natural(path, schema, tables())


def _targets(spec: InputSpec, size: int, generator: np.random.Generator) -> np.ndarray:
    if spec.target in ("class", "ranking"):
        return np.arange(size) % spec.num_classes
    if spec.target == "survival":
        return np.ones((size, *spec.target_shape))
    high = spec.num_classes if spec.target in ("tokens", "preference", "mask", "nodes") else 2
    return generator.integers(0, high, (size, *spec.target_shape))


def _of_method(config: ExperimentConfig, name: str, path: Path) -> Traffic:
    try:
        try:
            return _run(config, name, path, public=0)
        except ConfigError as error:
            if "holdout.public" not in str(error):
                raise
            return _run(config, name, path, public=2)
    except RayflError as error:
        first, *problems = str(error).splitlines()
        # Several problems of a configuration are listed below a line that counts them.
        reason = "; ".join(line.strip() for line in problems) if first.endswith((" problem", " problems")) else first
        return Traffic(name, None, None, None, reason or first)


def _run(config: ExperimentConfig, name: str, path: Path, public: int) -> Traffic:
    import rayfl
    from algorithms.registry import METHODS, Experiment
    from rayfl.runs.committed import CommittedModels
    from rayfl.runs.folder import open_run

    content = config.model_dump(mode="json")
    own = name == config.algorithm.name
    folder = path.parent / f"{name}-{public}"
    settings: Mapping[str, Any] = {
        "name": folder.name,
        "storage_path": str(path.parent),
        "dataset": {"name": "leaf", "path": str(path)},
        "holdout": {"validation": 0.25, "public": public},
        "task": content["task"],
        "model": content["model"],
        "algorithm": {**(content["algorithm"] if own else {"name": name}), **_short(name)},
        "train": {
            # what a method sets by itself is left to it
            **{key: content["train"][key] for key in _OF_TRAINING if key not in METHODS[name].train_settings},
            # kept by clients only where the optimizer goes on; some methods refuse it
            "momentum": content["train"]["momentum"] if config.train.persist_optimizer else 0.0,
            "rounds": _ROUNDS,
            "clients_per_round": "all",
            "local_epochs": 1,
            "batch_size": 4,
        },
        "evaluation": {"every": _ROUNDS, "splits": ["test"]},
        "engine": {"mode": "looped"},
        "cluster": {"backend": "inline"},
        "tracking": {"tensorboard": False},
    }
    with _without_remarks():
        result = rayfl.run(settings)
    rows = result.clients.filter((pc.field("cohort") == "selected") & (pc.field("round") == _ROUNDS)).to_pylist()
    models = CommittedModels(open_run(str(folder), Experiment))
    state = max(_bytes(models.state(client)) for client in range(_CLIENTS))
    down, up = (max((int(row[column]) for row in rows), default=0) for column in ("bytes_down", "bytes_up"))
    return Traffic(name, down, up, state)


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Leaves out warnings about made-up runs: that they are too short for a method's later phases, say."""
    log = logging.getLogger("rayfl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _short(name: str) -> dict[str, int]:
    """A method's numbers of steps and passes, each 1: how long it works changes no message."""
    from algorithms.registry import METHODS

    fields = METHODS[name].model_fields
    counts = (key for key in fields if key.endswith(("_steps", "_epochs", "_passes")))
    return {key: 1 for key in counts if isinstance(fields[key].default, int) and fields[key].default > 1}


_OF_TRAINING = ("optimizer", "persist_optimizer", "private_norm")
"""Options of training that change what is sent or kept."""


def _bytes(tree: Mapping[str, Any]) -> int:
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(tree) if hasattr(leaf, "element_size"))


def as_lines(found: Anatomy) -> list[str]:
    """A model's anatomy for people."""
    lines = [
        f"{found.model} for inputs of {' x '.join(map(str, found.inputs))} and {found.classes} outputs",
        f"parameters: {found.parameters:,} ({4 * found.parameters / 1e6:,.2f} MB in float32), of which the head "
        f"(last linear layer) has {found.head:,}",
    ]
    if found.trained != found.parameters:
        lines.append(f"trained: {found.trained:,}; fixed, and in no message: {found.parameters - found.trained:,}")
    if found.buffers:
        lines.append(f"buffers (running statistics and the like): {found.buffers:,}")
    lines.append("stacks: many clients can be trained as one" if found.stacks else f"stacks: no, {found.why_not}")
    return lines


def as_json(found: Sequence[Anatomy], traffic: Sequence[Traffic]) -> dict[str, Any]:
    """Everything as plain data."""
    return {"models": [asdict(one) for one in found], "methods": [asdict(one) for one in traffic]}
