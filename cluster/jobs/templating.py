"""Files that start a cluster: KubeRay, SLURM, Ray's launcher, an image, a Grafana dashboard."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, Any, Literal, get_args

import jinja2
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cluster.jobs.scaling import growing_options
from cluster.jobs.shipping import check_places
from cluster.jobs.slurm_arrays import split_sweep
from cluster.jobs.stopping import stop_wait_s
from rayfl.config.cluster_section import ClusterConfig
from rayfl.config.schema import ExperimentConfig
from rayfl.errors import ConfigError
from rayfl.naming.texts import matching

Kind = Literal["kuberay", "kuberay-cluster", "slurm", "ray-up", "docker", "grafana"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_FILES: dict[Kind, str] = {
    "kuberay": "kuberay.yaml.j2",
    "kuberay-cluster": "kuberay-cluster.yaml.j2",
    "slurm": "slurm.sh.j2",
    "ray-up": "ray-up.yaml.j2",
    "docker": "docker.Dockerfile.j2",
    "grafana": "grafana.json",
}
_NODES = {"name", "nodes", "gpus_per_node", "cpus_per_node", "memory_per_node", "shared_volume"}
_PODS = {"image", "min_nodes", "tolerations", "node_selector", "image_pull_policy"}
_USES: dict[Kind, set[str]] = {
    "kuberay": _NODES | _PODS,
    "kuberay-cluster": _NODES | _PODS | {"rbac", "namespace"},
    "slurm": _NODES | {"time", "environment", "partition", "account", "array", "sweep", "exclusive"},
    "ray-up": _NODES | {"image", "hosts", "user", "instance_type", "head_trains"},
    "docker": {"image", "gpus_per_node"},
    "grafana": set(),
}
_RAY_WITH_RBAC = (2, 55)
_CLAIM_FOLDER = "/shared"
"""The place of the shared volume in pods and images."""

# Whatever is written into YAML and shell: nothing that would have to be quoted there.
Word = Annotated[str, matching(r"[A-Za-z0-9._/:@~-]+", "letters, digits and the signs . _ / : @ ~ -, without spaces")]
_SIGNS = "letters, digits and the signs . _ / -"
Name = Annotated[str, matching(r"[A-Za-z0-9._/-]+", f"{_SIGNS}, without spaces")]
Taint = Annotated[str, matching(r"[A-Za-z0-9._/-]+(=[A-Za-z0-9._-]*)?", f"key or key=value of {_SIGNS}")]
Pair = Annotated[str, matching(r"[A-Za-z0-9._/-]+=[A-Za-z0-9._-]*", f"key=value of {_SIGNS}")]


class TemplateOptions(BaseModel):
    """What the cluster should look like."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[
        str,
        matching(
            r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?",
            "1 to 40 small letters (a-z), digits and -, the first a letter and the last none of the signs",
        ),
    ] = Field("rayfl", description="of cluster and run: a-z, 0-9 and -")
    image: Word = Field("rayfl:latest", description="container image with rayfl and Ray")
    nodes: int = Field(1, ge=1, description="nodes that train")
    gpus_per_node: int = Field(0, ge=0, description="GPUs of each")
    cpus_per_node: int = Field(8, ge=1, description="CPUs of each")
    memory_per_node: int = Field(32, ge=1, description="memory of each, in GiB")
    shared_volume: Word | None = Field(
        None,
        description="what all nodes share: a claim's name for KubeRay (rayfl-shared), a folder otherwise (/shared)",
    )
    time: Annotated[
        str, matching(r"[0-9]+([-:][0-9]+)*", "numbers with : or - between them, such as 24:00:00 or 2-12")
    ] = Field("24:00:00", description="SLURM: time limit")
    partition: Name | None = Field(None, description="SLURM: partition")
    account: Name | None = Field(None, description="SLURM: who is charged")
    array: int | None = Field(None, ge=2, description="SLURM: number of jobs of an array, one for each seed from 0 on")
    sweep: bool = Field(
        False, description="SLURM: the run has several values, as after rayfl sweep; an array of one job an experiment"
    )
    exclusive: bool = Field(False, description="SLURM: no other job on the nodes")
    min_nodes: int | None = Field(
        None, ge=0, description="KubeRay: the fewest nodes; Ray adds more, up to nodes, for runs that wait"
    )
    tolerations: tuple[Taint, ...] = Field((), description="KubeRay: taints that pods may run on, key or key=value")
    node_selector: tuple[Pair, ...] = Field((), description="KubeRay: labels of nodes that train, key=value")
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        None, description="KubeRay: when the image is fetched; null: as Kubernetes decides"
    )
    rbac: bool = Field(
        False, description="KubeRay: tokens are those of Kubernetes, and roles say who may use the cluster"
    )
    namespace: Annotated[
        str,
        matching(
            r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", "up to 63 small letters (a-z), digits and -, no sign at the ends"
        ),
    ] = Field("default", description="KubeRay with rbac: namespace of the cluster")
    environment: Word | None = Field(None, description="SLURM: folder of the virtual environment with rayfl")
    hosts: tuple[Word, ...] = Field((), description="ray up: machines of your own, head first; none: machines of AWS")
    head_trains: bool = Field(False, description="ray up: actors run on the head too")
    user: Word = Field("ubuntu", description="ray up: who logs in")
    instance_type: Word = Field("g5.2xlarge", description="ray up on AWS: machines that train")


def template_options(values: Mapping[str, Any]) -> TemplateOptions:
    """Validated options; give only those that were chosen, because a file refuses what it has no use for.

    Raises:
        ConfigError: naming every wrong option and its rule.
    """
    try:
        return TemplateOptions.model_validate(values)
    except ValidationError as error:
        wrong = [
            f"--{'-'.join(map(str, e['loc'])).replace('_', '-')}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        raise ConfigError("; ".join(wrong)) from None


def render(kind: Kind, chosen: TemplateOptions, run: Sequence[str] = (), config: ExperimentConfig | None = None) -> str:
    """The text of a file.

    Args:
        kind: which.
        chosen: what the cluster should look like.
        run: a preset or file and overrides, as after ``rayfl run``; the run's folder and name are added unless they
            are given.
        config: configuration of the run; None: one with the defaults of the section ``cluster``.

    Raises:
        ConfigError: when the file has no place for a run, or for an option that was given.
    """
    if kind == "kuberay" and chosen.rbac:
        raise ConfigError(
            "--rbac: KubeRay refuses tokens of Kubernetes for a RayJob: write kuberay-cluster, and submit the run to it"
        )
    unused = chosen.model_fields_set - _USES[kind]
    if chosen.hosts:
        unused |= chosen.model_fields_set & {"nodes", "instance_type"}
    if unused:
        names = ", ".join(sorted(f"--{field.replace('_', '-')}" for field in unused))
        raise ConfigError(f"{names}: {kind}{' with --hosts' if chosen.hosts else ''} has no use for it")
    if "namespace" in chosen.model_fields_set and not chosen.rbac:
        raise ConfigError("--namespace: without --rbac the namespace is kubectl's: kubectl apply --namespace ...")
    if chosen.rbac and _version_of("ray") < _RAY_WITH_RBAC:
        raise ConfigError(f"--rbac: Ray asks Kubernetes about tokens from 2.55 on; this is Ray {version('ray')}")
    if run and kind not in ("kuberay", "slurm"):
        raise ConfigError(f"{kind} starts no run: leave out {run[0]!r}, and submit it to the cluster")
    in_pods = kind.startswith("kuberay")
    shared = chosen.shared_volume or ("rayfl-shared" if in_pods else "/shared")
    folder = _CLAIM_FOLDER if in_pods or kind == "docker" else shared
    resources: dict[str, Any] = {"cpu": str(chosen.cpus_per_node), "memory": f"{chosen.memory_per_node}Gi"}
    if chosen.gpus_per_node:
        resources["nvidia.com/gpu"] = str(chosen.gpus_per_node)
    given = _options(run)
    if chosen.array and chosen.sweep:
        raise ConfigError("--array N is a job a seed, --sweep a job an experiment: give seed=0:N to --sweep alone")
    if chosen.array and given & {"seed", "name"}:
        raise ConfigError("--array gives each job a seed and a name of its own: leave seed and name out of the run")
    if chosen.sweep and given & {"name", "storage_path"}:
        raise ConfigError("--sweep names each job, in the folder --name: leave name and storage_path out of the run")
    words, experiments = split_sweep(run) if chosen.sweep else (list(run or ["quickstart"]), [])
    runs = f"{folder}/runs/{chosen.name}" if chosen.sweep else f"{folder}/runs"
    if chosen.min_nodes is not None and chosen.min_nodes > chosen.nodes:
        raise ConfigError(f"--min-nodes {chosen.min_nodes} is more than --nodes {chosen.nodes}")
    cluster = ClusterConfig() if config is None else config.cluster
    growing = _growing(chosen, cluster, None if config is None else getattr(config.partition, "num_clients", None))
    values = {
        **chosen.model_dump(),
        "pod": _placement(chosen),
        "shared_volume": shared,
        "shared_folder": folder,
        "data_folder": f"{folder}/data",
        "runs_folder": f"{folder}/runs",
        "resources": resources,
        "command": _command(None if chosen.array or chosen.sweep else chosen.name, runs, words, growing),
        "growing": " ".join(f"{key}={value}" for key, value in growing.items()),
        "stop_wait_s": stop_wait_s(cluster),
        "experiments": [shlex.join(experiment) for experiment in experiments],
        "jobs": len(experiments) or chosen.array,
        "ray_version": version("ray"),
        "torch_version": version("torch").partition("+")[0],
        "torchvision_version": version("torchvision").partition("+")[0],
        "python_version": ".".join(platform.python_version_tuple()[:2]),
    }
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("cluster", "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 -- YAML and shell; what goes in is restricted above
    )
    environment.filters["sh"] = shlex.quote
    if kind == "grafana":  # Grafana has double braces of its own
        assert environment.loader is not None
        return environment.loader.get_source(environment, _FILES[kind])[0]
    return environment.get_template(_FILES[kind]).render(values)


def check_fits(kind: Kind, chosen: TemplateOptions, config: ExperimentConfig, words: Sequence[str] = ()) -> None:
    """Checks that a run can use the nodes that are asked for, and keeps its results.

    Args:
        kind: of the file.
        chosen: what the cluster should look like.
        config: the run's configuration.
        words: what :func:`render` is given for the run.

    Raises:
        ConfigError: when nodes would be idle, or lack the GPUs that the run needs, or results would lie in a pod.
    """
    run = config.cluster
    if run.address is not None:
        raise ConfigError(
            f"cluster.address={run.address}: the run would go to that cluster, and the nodes that are asked for here "
            "would be idle: leave it out"
        )
    if run.backend == "inline" and (kind == "kuberay" or chosen.nodes > 1):
        idle = f"{kind}'s nodes that train" if kind == "kuberay" else f"all of --nodes {chosen.nodes} but one"
        raise ConfigError(
            f"cluster.backend=inline trains in the driver's process, so that {idle} would be idle: leave it out"
            f"{' or give --nodes 1' if kind != 'kuberay' else ''}"
        )
    if run.device == "cuda" and not chosen.gpus_per_node:
        raise ConfigError("cluster.device=cuda needs GPUs, and nodes have none: give --gpus-per-node, or leave it out")
    if kind == "kuberay":
        named = "storage_path" in _options(words)
        check_places(config if named else config.model_copy(update={"storage_path": _CLAIM_FOLDER}))


def _version_of(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


def unpullable(chosen: TemplateOptions) -> str:
    """Returns why no node of a cluster could fetch the image, in words; empty where one might."""
    if "/" in chosen.image or chosen.image_pull_policy == "Never":
        return ""
    return (
        f"no node can pull the image {chosen.image}: Docker Hub has none of this name. Push it to a registry that the "
        "nodes reach, and give --image registry.example/rayfl:1"
    )


def _placement(chosen: TemplateOptions) -> dict[str, Any]:
    """Returns where the pods that train may run, as fields of their spec."""
    found: dict[str, Any] = {}
    if chosen.tolerations:
        taints = [taint.partition("=") for taint in chosen.tolerations]
        found["tolerations"] = [
            {"key": key, "operator": "Equal" if sign else "Exists", **({"value": value} if sign else {})}
            for key, sign, value in taints
        ]
    if chosen.node_selector:
        found["nodeSelector"] = dict(label.split("=", 1) for label in chosen.node_selector)
    return found


def _options(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if "=" in word}


def _growing(chosen: TemplateOptions, cluster: ClusterConfig, num_clients: int | None) -> dict[str, str]:
    """Returns the overrides by which a run makes the cluster grow; none where it has all its nodes from the start."""
    if chosen.min_nodes is None or chosen.min_nodes == chosen.nodes:
        return {}
    return growing_options(cluster, num_clients, chosen.nodes, chosen.cpus_per_node, chosen.gpus_per_node)


def _command(name: str | None, folder: str, run: Sequence[str], further: Mapping[str, str]) -> str:
    given = _options(run)
    wanted = {"name": name, "storage_path": folder, **further}
    added = [f"{key}={value}" for key, value in wanted.items() if value is not None and key not in given]
    return shlex.join(["rayfl", "run", *run, *added])
