"""The sections storage and tracking: what is kept of a run, and where progress goes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from rayfl.config.section import Section, without_secrets
from rayfl.naming.texts import has_keys


class StorageConfig(Section):
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


class WandbConfig(Section):
    """Weights & Biases, a service that keeps curves of runs."""

    enabled: bool = Field(False, description="send summaries there; needs the package wandb and its own login")
    project: str = Field("rayfl", min_length=1, description="the project that the run is put into")
    entity: str | None = Field(None, description="user or team; null: the account's default")
    mode: Literal["online", "offline"] = Field("online", description="offline: only files in the run's folder")


class MlflowConfig(Section):
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


class TrackingConfig(Section):
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
