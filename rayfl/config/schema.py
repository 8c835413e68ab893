"""The configuration of an experiment as one validated, immutable object."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, create_model, field_validator, model_validator
from pydantic_core import PydanticKnownError

from rayfl.config.added import without_added
from rayfl.config.beginning import InitConfig
from rayfl.config.cluster_section import ClientsConfig, ClusterConfig
from rayfl.config.early_stopping import EarlyStoppingConfig
from rayfl.config.evaluation import EvaluationConfig as EvaluationConfig
from rayfl.config.identity import FREE, STEPS, fingerprint_of, without_places
from rayfl.config.section import Section, without_secrets
from rayfl.config.storage_section import StorageConfig, TrackingConfig
from rayfl.data.images.augment import AugmentConfig
from rayfl.data.images.transform import TransformConfig
from rayfl.data.partitions.base import NaturalPartition
from rayfl.data.partitions.holdout import HoldoutConfig
from rayfl.data.partitions.labelled import Labelled
from rayfl.data.partitions.long_tail import LongTail
from rayfl.data.partitions.noise import LabelNoise
from rayfl.data.partitions.registry import Partition
from rayfl.data.partitions.stage import NoStages
from rayfl.data.partitions.stages import Stages
from rayfl.data.sources.registry import DatasetConfig
from rayfl.engine.engine import EngineConfig
from rayfl.engine.updates.settings import TrainConfig
from rayfl.errors import ConfigError
from rayfl.messages.aggregator_section import Aggregator
from rayfl.messages.aggregators import Mean
from rayfl.messages.attack import AttackConfig
from rayfl.messages.compressors import Compression, NoCompression
from rayfl.messages.privacy import PrivacyConfig
from rayfl.models.zoo import ModelConfig
from rayfl.naming.objects import import_object, names_an_object
from rayfl.naming.texts import Name
from rayfl.selection.strategies import Selection, Uniform
from rayfl.system.config import NoSystem, System
from rayfl.tasks.classification_section import ClassificationSection
from rayfl.tasks.registry import TaskConfig
from rayfl.valuation.section import Contribution, NoContribution


class ExperimentConfig(Section):
    """Everything that defines an experiment; two runs with equal configurations have equal results.

    Class attributes:
        methods: the classes of the methods by their names; each is looked up where a section ``algorithm`` names it.
        method_base: what a user's own method must be a subclass of.
    """

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
    long_tail: LongTail = Field(
        default=LongTail(), description="fewer samples from class to class, before they are divided among clients"
    )
    holdout: HoldoutConfig = Field(default_factory=HoldoutConfig, description="each client's validation and test share")
    noise: LabelNoise = Field(default=LabelNoise(), description="wrong labels in what clients train on")
    labelled: Labelled = Field(
        default=Labelled(), description="which training samples keep their labels, for semi-supervised learning"
    )
    stages: Stages = Field(
        default_factory=NoStages,
        description="data that change over rounds: classes or samples that arrive, inputs or labels that drift; none",
    )
    task: TaskConfig = Field(
        default=ClassificationSection(), description="what is learned: a class, labels, numbers, the next token"
    )
    model: ModelConfig = Field(description="the network")
    train: TrainConfig = Field(default=TrainConfig(), description="rounds, cohort, local SGD")
    privacy: PrivacyConfig = Field(
        default=PrivacyConfig(),
        description="differential privacy of what clients send: of clients, and of their samples",
    )
    compression: Compression = Field(
        default_factory=NoCompression, description="what clients' messages lose on their way, and the bytes it saves"
    )
    aggregator: Aggregator = Field(
        default_factory=Mean, description="what the server takes for the mean of what clients send: a robust rule"
    )
    attack: AttackConfig = Field(default=AttackConfig(), description="malicious clients, which are in no score")
    evaluation: EvaluationConfig = Field(default=EvaluationConfig(), description="what is measured")
    early_stopping: EarlyStoppingConfig = Field(
        default=EarlyStoppingConfig(), description="when the run ends before its last round"
    )
    engine: EngineConfig = Field(default=EngineConfig(), description="how local updates are executed")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="which processes run the clients")
    clients: ClientsConfig = Field(default=ClientsConfig(), description="what becomes of clients that fail")
    selection: Selection = Field(
        default_factory=Uniform, description="how the clients of a round are chosen, by what is known of each; uniform"
    )
    contribution: Contribution = Field(
        default_factory=NoContribution,
        description="what each client of a round has contributed to the model: Shapley values, leave-one-out, cosine",
    )
    system: System = Field(
        default=NoSystem(), description="simulated devices: speeds, availability, drop-outs and a virtual clock; none"
    )
    storage: StorageConfig = Field(default=StorageConfig(), description="commits")
    tracking: TrackingConfig = Field(default=TrackingConfig(), description="TensorBoard, Weights & Biases, MLflow")
    max_failures: int = Field(
        3,
        ge=-1,
        description="how many times in a row, with no new commit in between, the run goes back to its last commit "
        "after a crash of actors; -1: endlessly. With clients.on_error=skip or retry, crashes that a client turns out "
        "to have caused do not count, and there is one rewind more to find that out",
    )
    init: InitConfig = Field(default=InitConfig(), description="another run, from which this one begins")
    algorithm: Any = Field(description="the method and its hyper-parameters")

    methods: ClassVar[Mapping[str, type[BaseModel]]] = {}
    method_base: ClassVar[type[BaseModel]] = BaseModel

    @staticmethod
    def check_method(method: type[Any]) -> None:
        """Raises MethodError for a user's own class that cannot be run as a method."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the values: where they are read, the class of a user's own method may have to be made."""
        return type(self).model_validate, (self.model_dump(mode="json"),)

    @field_validator("algorithm", mode="plain")
    @classmethod
    def _of_its_class(cls, section: Any) -> BaseModel:
        """The section as one of its method, the only one whose module is imported for it."""
        found = cls.method_of(section)
        if found is not None:
            return found.model_validate(section)
        if not isinstance(section, Mapping):
            raise PydanticKnownError("model_attributes_type")
        about = {"discriminator": "'name'"}
        if "name" not in section:
            raise PydanticKnownError("union_tag_not_found", about)
        expected = ", ".join(repr(name) for name in cls.methods)
        raise PydanticKnownError("union_tag_invalid", {**about, "tag": str(section["name"]), "expected_tags": expected})

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
    def _test_part_that_is_scored(self) -> ExperimentConfig:
        if self.long_tail.changes_test and not self.evaluation.scores_official:
            option = "balanced_test" if self.long_tail.balanced_test else "official_test"
            raise ValueError(
                f"long_tail.{option} is about a test part that nobody is scored on: set evaluation.official_test=true "
                "or evaluation.official_personalized=true, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _labels_somewhere(self) -> ExperimentConfig:
        if self.labelled.at == "server" and not self.holdout.public:
            raise ValueError(
                "labelled.at is server, but the server has no samples: set holdout.public, for instance to 100"
            )
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
    def method_of(cls, section: Any) -> type[BaseModel] | None:
        """The class of the method that a section ``algorithm`` names; None where it names none that is known.

        Raises:
            ConfigError: the name is ``module:Class``, and that is no method.
            MethodError: the class breaks the contract of methods.
        """
        name = section.get("name") if isinstance(section, Mapping) else getattr(section, "name", None)
        if isinstance(name, str) and name in cls.methods:
            return cls.methods[name]
        if not names_an_object(name):
            return None
        found = import_object(str(name), "algorithm")
        if not (isinstance(found, type) and issubclass(found, cls.method_base)):
            raise ConfigError(f"algorithm: {name!r} is no subclass of rayfl.{cls.method_base.__name__}")
        cls.check_method(found)
        return _named_by_path(str(name), found)

    @classmethod
    def with_method(cls, content: Mapping[str, Any]) -> type[ExperimentConfig]:
        """This class with the method's for the type of ``algorithm``, by which problems of a content are explained."""
        return _with_method(cls, cls.method_of(content.get("algorithm")) or cls.method_base)

    def identity(self) -> dict[str, Any]:
        """Everything that a result depends on, as plain data: not names, places and processes."""
        content = self.model_dump(mode="json", exclude=set(FREE))
        if isinstance(self.system, NoSystem):
            del content["system"]  # runs from before there was the section continue
        del content["init"]
        if self.init.source is not None:
            content["init"] = self.init.identity
        content["model"] = without_places(content["model"])
        compiled = ["compiled"] if self.engine.compile else []
        content["engine"] = ", ".join([self.engine.mode, self.engine.precision, STEPS, *compiled])
        return without_added(content)

    def fingerprint(self) -> str:
        """SHA-256 of everything that a result depends on."""
        return fingerprint_of(self.identity())

    def same_results(self, other: ExperimentConfig) -> bool:
        """Returns whether the results of both are the same to the bit, on machines that compute alike.

        On CPUs the number of threads decides in which order matrix products add. It is not in the fingerprint, which
        runs of before have; computations on GPUs do not depend on it.
        """
        threads = self.cluster.threads_per_actor == other.cluster.threads_per_actor
        on_gpus = "cuda" in (self.cluster.device, other.cluster.device)
        return self.fingerprint() == other.fingerprint() and (threads or on_gpus)

    @property
    def run_name(self) -> str:
        """The run's folder."""
        method = self.algorithm.name.rpartition(":")[2]
        return self.name or f"{method}-{self.dataset.name}-{self.fingerprint()[:8]}"


@lru_cache
def _with_method(schema: type[ExperimentConfig], method: Any) -> type[ExperimentConfig]:
    return create_model(schema.__name__, __base__=schema, algorithm=(method, ...))


@lru_cache
def _named_by_path(path: str, found: type[BaseModel]) -> type[BaseModel]:
    """A user's own method ``module:Class`` under that name in place of its own."""
    label: Any = Literal[path]
    own: type[BaseModel] = create_model(found.__name__, __base__=found, __doc__=found.__doc__, name=(label, path))
    own.written_as = found  # type: ignore[attr-defined]  # methods say some things of their own class alone
    return own
