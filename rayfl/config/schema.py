"""The configuration of an experiment as one validated, immutable object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import BaseModel, ByteSize, ConfigDict, Field, create_model, field_validator, model_validator

from rayfl.config.added import without_added
from rayfl.config.beginning import InitConfig
from rayfl.config.cluster_values import ActorRange, LabelKey, LabelValue
from rayfl.config.evaluation import EvaluationConfig as EvaluationConfig
from rayfl.config.identity import FREE, STEPS, fingerprint_of, without_places
from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.transform import TransformConfig
from rayfl.data.partitions.base import NaturalPartition
from rayfl.data.partitions.holdout import HoldoutConfig
from rayfl.data.partitions.noise import LabelNoise
from rayfl.data.partitions.registry import Partition
from rayfl.data.sources.registry import DatasetConfig
from rayfl.engine.engine import EngineConfig
from rayfl.engine.settings import TrainConfig
from rayfl.engine.task_sections import ClassificationSection, TaskConfig
from rayfl.errors import ConfigError
from rayfl.models.zoo import ModelConfig
from rayfl.naming.objects import import_object, names_an_object
from rayfl.naming.texts import Name, has_keys
from rayfl.system.config import NoSystem, System


def without_secrets(path: str) -> str:
    """A path or URI that has no keys: what is in the configuration is in config.yaml, logs and messages."""
    if has_keys(path):
        raise ValueError("keys do not belong here: give them in the environment (AWS_ACCESS_KEY_ID, ...)")
    return path


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClusterConfig(_Section):
    """Which processes run the clients. Nothing here changes a result on the CPU."""

    backend: Literal["ray", "inline"] = Field("ray", description="Ray actors, or this process (for debugging)")
    address: str | None = Field(
        None, description="an existing Ray cluster; null: RAY_ADDRESS if set, else a local Ray started for the run"
    )
    num_actors: Annotated[int, Field(ge=1)] | Literal["auto"] | ActorRange = Field(
        "auto",
        description="how many actors host the clients; auto: as many as CPUs or GPU shares allow, more on nodes that "
        "join; 2:16: likewise, but never less than 2 and never more than 16 (in a sweep: 2)",
    )
    balance: Literal["auto", "measured", "sizes"] = Field(
        "auto",
        description="which actors train which clients: sizes, by samples alone; measured, by how long clients and "
        "actors took before; auto: measured where no result depends on it, sizes where clients are stacked or cores "
        "are lent",
    )
    label_selector: dict[LabelKey, LabelValue] = Field(
        default_factory=dict,
        description="the nodes that actors are placed on, by the labels that Ray gives them (2.49 or newer), such as "
        "{ray.io/accelerator-type: H100}; a value may also be '!H100', 'in(H100, H200)' or '!in(H100, H200)', in "
        "quotes; empty: any",
    )
    clients_per_actor: Literal["auto", 1] = Field(
        "auto", description="auto: actors share the clients; 1: one actor, and so one process, per client"
    )
    cpus_per_actor: Annotated[float, Field(ge=0, le=1024)] | Literal["auto"] = Field(
        "auto", description="CPUs Ray reserves per actor; auto: 1, or an equal share with one actor per client"
    )
    actors_per_gpu: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        1,
        description="actors that share a GPU; each takes 1/k of it; auto: as many as its memory was measured to have "
        "room for if clients are trained one by one; if they are stacked, or nothing is measured, as few as will do",
    )
    probe: bool = Field(
        True,
        description="measure some steps of one client before the actors start, and refuse what cannot fit; only where "
        "something depends on it: on GPUs, and for engine.width=auto",
    )
    threads_per_actor: int = Field(1, ge=1, description="threads of PyTorch and BLAS in an actor")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if the cluster has GPUs")
    state_memory: Annotated[ByteSize, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="memory per actor for client states (such as 4GiB); the least recently used go to disk and come "
        "back; auto: 40 % of the machine's memory, divided among its actors",
    )
    device_state_memory: Annotated[ByteSize, Field(ge=0)] | Literal["auto"] = Field(
        "auto",
        description="memory of a GPU, for each actor, in which states of clients stay for the next time, and as much "
        "for those that are brought ahead of their clients' turn; auto: 4 % of its free memory, divided among the "
        "actors that share it; 0: neither",
    )
    data_memory: Annotated[ByteSize, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="memory per actor for clients' samples; the least recently used are read again when needed; "
        "auto: 30 % of the machine's memory, divided among its actors; of actors on a GPU, 30 % of its free memory, "
        "divided among those that share it",
    )
    read_ahead: bool = Field(
        True,
        description="a thread of each actor reads, decodes and transforms the samples of the clients that come next "
        "while those before are at work, within data_memory; only of data that are read from files",
    )
    spill_dir: str | None = Field(
        None, description="folder on each node for states beyond state_memory; null: the folder for temporary files"
    )
    shared_memory: Annotated[ByteSize, Field(ge=0)] = Field(
        ByteSize(256 << 20),
        description="memory through which the driver and actors on its machine send each other what fits into half of "
        "it; as much for all these actors together, in equal parts; 0: all goes through Ray's object store",
    )
    startup_timeout_s: float = Field(300, gt=0, description="how long to wait for the actors to start, in seconds")
    resources_timeout_s: float = Field(
        0, ge=0, description="how long to wait for nodes that have yet to join a cluster with too little, in seconds"
    )
    stop_grace_s: float = Field(
        20, ge=0, description="how long after SIGTERM the round under way may take to end, in seconds"
    )


class ClientsConfig(_Section):
    """What becomes of clients that fail. No part of what identifies a run: one that failed may go on with skip."""

    on_error: Literal["fail", "skip", "retry"] = Field(
        "fail",
        description="when a client's procedure raises or gives non-finite values, or ends or blocks its process: fail, "
        "the run ends (if its process did, after max_failures); skip, the round goes on as if the client had not been "
        "sampled, and skipped.parquet says so; retry, it is run again first",
    )
    retries: int = Field(
        2, ge=1, description="how often (retry) the procedure is run again, with the same random numbers"
    )
    after_retries: Literal["fail", "skip"] = Field("fail", description="what (retry) if it failed every time")
    deadline_s: float | None = Field(
        None,
        gt=0,
        description="how long a client may be at its procedure, in seconds (clients that are stacked: together); then "
        "its actor is ended, and the client has failed (on_error). An actor that does not say who is at work counts as "
        "dead (max_failures). null: any time. The server's own work may take any time",
    )

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> ClientsConfig:
        fields = [
            name
            for name in ("retries", "after_retries")
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if fields and self.on_error != "retry":
            raise ValueError(f"{' and '.join(fields)} need on_error=retry, not {self.on_error}")
        return self

    @property
    def attempts(self) -> int:
        """Returns how often a procedure is run at most."""
        return 1 + (self.retries if self.on_error == "retry" else 0)

    @property
    def skips(self) -> bool:
        """Returns whether a client that fails in the end is left out."""
        return self.on_error == "skip" or (self.on_error == "retry" and self.after_retries == "skip")


class StorageConfig(_Section):
    """How often the run is committed, and how much of its past is kept."""

    commit_every: int = Field(1, ge=1, description="rounds between commits; a crash loses no more than these")
    keep_commits: int = Field(2, ge=1, description="commits kept; older ones are deleted")
    copies: Literal[1, 2] = Field(
        1, description="2: every file of a commit, and what says what the run is, is written into a second folder, too"
    )
    copies_path: str | None = Field(
        None,
        min_length=1,
        description="folder of all runs' second copies, best on another disk: a path or a URI; null: the folder copy "
        "in the run's own",
    )
    lease_timeout_s: float = Field(
        90,
        ge=1,
        description="for how long after its last sign of life a driver on another machine keeps others out, in seconds",
    )

    @field_validator("copies_path")
    @classmethod
    def _without_secrets(cls, path: str | None) -> str | None:
        return path if path is None else without_secrets(path)

    @model_validator(mode="after")
    def _nothing_in_vain(self) -> StorageConfig:
        if self.copies_path is not None and self.copies == 1:
            raise ValueError("copies_path needs copies=2")
        return self


class WandbConfig(_Section):
    """Weights & Biases, a service that keeps curves of runs."""

    enabled: bool = Field(False, description="send summaries there; needs the package wandb and its own login")
    project: str = Field("rayfl", min_length=1, description="the project that the run is put into")
    entity: str | None = Field(None, description="user or team; null: the account's default")
    mode: Literal["online", "offline"] = Field("online", description="offline: only files in the run's folder")


class MlflowConfig(_Section):
    """MLflow, a server or a folder that keeps parameters and curves of runs."""

    enabled: bool = Field(False, description="send parameters and summaries there; needs the package mlflow")
    tracking_uri: str | None = Field(
        None, description="server or folder; null: MLFLOW_TRACKING_URI, else mlflow's own default"
    )
    experiment: str = Field("rayfl", min_length=1, description="the experiment that the run is put into")

    @field_validator("tracking_uri")
    @classmethod
    def _without_secrets(cls, address: str | None) -> str | None:
        if address is not None and has_keys(address):
            raise ValueError("keys do not belong here: give MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
        return address


class TrackingConfig(_Section):
    """Where progress goes in addition to the tables."""

    tensorboard: bool = Field(True, description="write TensorBoard's files (local storage only)")
    tensorboard_scalars: Literal["overview", "all"] = Field(
        "overview",
        description="overview: at most 40 curves, of the personalized and the global model; all: every number of "
        "rounds.parquet",
    )
    wandb: WandbConfig = Field(default=WandbConfig(), description="Weights & Biases")
    mlflow: MlflowConfig = Field(default=MlflowConfig(), description="MLflow")
    flops: bool = Field(
        False,
        description="count floating-point operations of local steps (costs.jsonl): a step of each shape is done "
        "once more",
    )


class ExperimentConfig(_Section):
    """Everything that defines an experiment; two runs with equal configurations have equal results."""

    name: Name | None = Field(
        None,
        description="folder of the run inside storage_path; null: method, data set and a hash of the configuration",
    )
    storage_path: str = Field(
        "~/ray_results", min_length=1, description="folder of all runs: a path or a URI (file, s3, gs)"
    )
    seed: int = Field(0, ge=0, description="seed of every random stream")
    dataset: DatasetConfig = Field(description="where samples come from")
    transform: TransformConfig = Field(
        default=TransformConfig(), description="what is done to images: resizing, normalization"
    )
    augment: AugmentConfig = Field(
        default=AugmentConfig(), description="random changes of training images: crops, mirror images, rotations"
    )
    partition: Partition = Field(
        default_factory=NaturalPartition, description="how samples are divided among clients; natural: by the source"
    )
    holdout: HoldoutConfig = Field(default_factory=HoldoutConfig, description="each client's validation and test share")
    noise: LabelNoise = Field(default=LabelNoise(), description="wrong labels in what clients train on")
    task: TaskConfig = Field(
        default=ClassificationSection(), description="what is learned: a class, labels, numbers, the next token"
    )
    model: ModelConfig = Field(description="the network")
    train: TrainConfig = Field(default=TrainConfig(), description="rounds, cohort, local SGD")
    evaluation: EvaluationConfig = Field(default=EvaluationConfig(), description="what is measured")
    engine: EngineConfig = Field(default=EngineConfig(), description="how local updates are executed")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="which processes run the clients")
    clients: ClientsConfig = Field(default=ClientsConfig(), description="what becomes of clients that fail")
    system: System = Field(
        default=NoSystem(), description="simulated devices: speeds, availability, drop-outs and a virtual clock; none"
    )
    storage: StorageConfig = Field(default=StorageConfig(), description="commits")
    tracking: TrackingConfig = Field(default=TrackingConfig(), description="TensorBoard, Weights & Biases, MLflow")
    max_failures: int = Field(
        3,
        ge=-1,
        description="how many times the run rewinds to its last commit after a crash of actors; -1: endlessly. With "
        "clients.on_error=skip or retry, crashes that a client turns out to have caused do not count, and there is one "
        "rewind more to find that out",
    )
    init: InitConfig = Field(default=InitConfig(), description="another run, from which this one begins")
    algorithm: Any = Field(description="the method and its hyper-parameters")

    methods: ClassVar[tuple[type[BaseModel], ...]] = ()
    method_base: ClassVar[type[BaseModel]] = BaseModel
    check_method: ClassVar[Callable[[Any], None]] = lambda method: None

    @field_validator("model", mode="before")
    @classmethod
    def _named_candidates(cls, section: Any) -> Any:
        """``model: {candidates: [...]}`` needs no name."""
        if isinstance(section, Mapping) and "candidates" in section and "name" not in section:
            return {"name": "candidates", **section}
        return section

    @field_validator("storage_path")
    @classmethod
    def _without_secrets(cls, path: str) -> str:
        return without_secrets(path)

    @model_validator(mode="after")
    def _actors_where_needed(self) -> ExperimentConfig:
        if self.clients.deadline_s is not None and self.cluster.backend == "inline":
            raise ValueError("clients.deadline_s needs cluster.backend=ray: in one process nobody could stop a client")
        return self

    @model_validator(mode="after")
    def _settings_of_the_method(self) -> ExperimentConfig:
        """Gives the section ``train`` what is part of the method."""
        settings: Mapping[str, Any] = getattr(self.algorithm, "train_settings", {})
        for option, value in settings.items():
            found = getattr(self.train, option)
            if option in self.train.model_fields_set and found != value:
                raise ValueError(
                    f"train.{option} is {found}, but algorithm={self.algorithm.name} is train.{option}={value}: "
                    "leave the option out, or choose another method"
                )
        if settings:
            # pydantic's own way around a frozen model, while it is being made
            self.__dict__["train"] = self.train.model_copy(update=dict(settings))
        return self

    @classmethod
    def knowing(cls, content: Mapping[str, Any]) -> type[ExperimentConfig]:
        """The configuration class for some raw content: one more class where its method is a user's own.

        Raises:
            ConfigError: ``algorithm.name`` is ``module:Class`` and names no method.
            MethodError: the class breaks the contract of methods.
        """
        section = content.get("algorithm")
        name = section.get("name") if isinstance(section, Mapping) else None
        if not names_an_object(name):
            return cls
        found = import_object(str(name), "algorithm")
        if not (isinstance(found, type) and issubclass(found, cls.method_base)):
            raise ConfigError(f"algorithm: {name!r} is no subclass of rayfl.{cls.method_base.__name__}")
        cls.check_method(found)
        return _with_users_method(cls, str(name), found)

    def identity(self) -> dict[str, Any]:
        """Everything that a result depends on, as plain data: not names, places and processes."""
        content = self.model_dump(mode="json", exclude=set(FREE))
        if isinstance(self.system, NoSystem):
            del content["system"]  # runs from before there was the section continue
        del content["init"]
        if self.init.source is not None:
            content["init"] = self.init.identity
        content["model"] = without_places(content["model"])
        content["engine"] = ", ".join([self.engine.mode, self.engine.precision, STEPS])
        return without_added(content)

    def fingerprint(self) -> str:
        """SHA-256 of everything that a result depends on."""
        return fingerprint_of(self.identity())

    @property
    def run_name(self) -> str:
        """The run's folder."""
        method = self.algorithm.name.rpartition(":")[2]
        return self.name or f"{method}-{self.dataset.name}-{self.fingerprint()[:8]}"


@lru_cache
def _with_users_method(schema: type[ExperimentConfig], path: str, found: type[BaseModel]) -> type[ExperimentConfig]:
    """``schema`` with one more method, the class ``module:Class`` under that name in place of its own."""
    label: Any = Literal[path]
    own: type[BaseModel] = create_model(found.__name__, __base__=found, __doc__=found.__doc__, name=(label, path))
    return experiment_schema([*schema.methods, own], schema.method_base, schema.check_method)


def experiment_schema(
    algorithms: Sequence[type[BaseModel]],
    base: type[BaseModel] = BaseModel,
    check: Callable[[Any], None] = lambda method: None,
) -> type[ExperimentConfig]:
    """The configuration class in which ``algorithm`` is one of the given methods.

    Args:
        algorithms: method classes, told apart by their literal field ``name``.
        base: what a user's own method must be a subclass of.
        check: raises an error for a class that cannot be run as a method.
    """
    union: Any = Union[tuple(algorithms)]  # noqa: UP007
    field: Any = (
        Annotated[union, Field(discriminator="name")],
        Field(description="the method and its hyper-parameters"),
    )
    schema: type[ExperimentConfig] = create_model("Experiment", __base__=ExperimentConfig, algorithm=field)
    schema.methods, schema.method_base, schema.check_method = tuple(algorithms), base, staticmethod(check)
    return schema
