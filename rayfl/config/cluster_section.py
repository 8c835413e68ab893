"""The sections cluster and clients: on what a run computes, and what becomes of clients that fail."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ByteSize, Field, model_validator

from rayfl.config.cluster_values import ActorRange, LabelKey, LabelValue
from rayfl.config.section import Section

_OF_ACTORS = (
    *("address", "num_actors", "balance", "label_selector", "clients_per_actor", "cpus_per_actor", "actors_per_gpu"),
    *("probe", "shared_memory", "startup_timeout_s", "resources_timeout_s"),
)
"""Options that say how actors are placed and spoken to."""


class ClusterConfig(Section):
    """Which processes run the clients. Only ``threads_per_actor`` changes results on CPUs: their last bits."""

    backend: Literal["ray", "inline"] = Field("ray", description="Ray actors, or this process (for debugging)")
    address: str | None = Field(
        None, description="an existing Ray cluster; null: RAY_ADDRESS if set, else a local Ray started for the run"
    )
    num_actors: Annotated[int, Field(ge=1)] | Literal["auto"] | ActorRange = Field(
        "auto",
        description="how many actors host the clients; auto: as many as free CPUs or GPU shares allow, more on nodes "
        "that join; 2:16: likewise, but never less than 2 and never more than 16 (in a sweep: 2)",
    )
    balance: Literal["auto", "measured", "sizes"] = Field(
        "auto",
        description="which actors train which clients: sizes, by samples alone; measured, by how long clients and "
        "actors took before; auto: measured where no result depends on it, sizes where clients are "
        "stacked or devices differ",
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
        "auto",
        description="actors that share a GPU; each takes 1/k of it; auto: as many as its memory was measured to have "
        "room for if clients are trained one by one; if they are stacked, up to four with at least 64 clients of a "
        "round each; one over a pretrained base and on GPUs that take one process; if nothing is measured, as few as "
        "will do",
    )
    probe: bool = Field(
        True,
        description="measure some steps of one client before the actors start, and refuse what cannot fit; only where "
        "something depends on it: on GPUs, and for engine.width=auto",
    )
    threads_per_actor: int = Field(
        1,
        ge=1,
        description="threads of PyTorch and BLAS in an actor; on CPUs the last bits of results depend on it, so that a "
        "run goes on only with the number that it began with (unless device is cuda)",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda if the cluster has GPUs")
    state_memory: Annotated[ByteSize, Field(gt=0)] | Literal["auto"] = Field(
        "auto",
        description="memory per actor for client states (such as 4GiB); the least recently used go to disk and come "
        "back; auto: 40 % of what Ray's object store (30 %) and the actors themselves (0.5 GiB each) leave of the "
        "machine's memory, divided among its actors",
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
        "auto: 30 % where state_memory has 40 %; of actors on a GPU, 30 % of its free memory, divided among those that "
        "share it",
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

    def idle_settings(self) -> tuple[str, ...]:
        """Returns the options of actors that are set while there are none (``backend=inline``)."""
        if self.backend == "ray":
            return ()
        fields = type(self).model_fields
        return tuple(
            name for name in _OF_ACTORS if getattr(self, name) != fields[name].get_default(call_default_factory=True)
        )


class ClientsConfig(Section):
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
        "dead (max_failures); so does one whose own work (it commits, restores states, waits for arguments) takes "
        "longer than that and than 600 s. null: any time. The server's own work may take any time",
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
