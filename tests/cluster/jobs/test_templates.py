"""Every file that starts a cluster is one: parsed, checked for what its reader requires, and for what runs need."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from typer.testing import CliRunner

from cluster.jobs.templating import KINDS, TemplateOptions, render, template_options
from rayfl.cli.cluster import Kind
from rayfl.cli.entry import app
from rayfl.errors import ConfigError
from tests.support.linters import lint

GPUS = {"name": "femnist", "nodes": 3, "gpus_per_node": 2, "cpus_per_node": 16, "memory_per_node": 100}


FIELDS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("kubernetes_fields.yaml").read_text())
"""By type: its fields, and their types; see the file for where they are from."""
SIMPLE = {"string": str, "integer": int, "boolean": bool, "any": object}
QUANTITY = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")


def wrong_fields(value: Any, kind: Any, place: str) -> list[str]:
    """Says what of a manifest is not what the recorded types allow: unknown and missing fields, and other types."""
    if isinstance(kind, list):
        if not isinstance(value, list):
            return [f"{place}: no list"]
        return [
            wrong for number, item in enumerate(value) for wrong in wrong_fields(item, kind[0], f"{place}[{number}]")
        ]
    if kind in SIMPLE:
        right = isinstance(value, SIMPLE[kind]) and (kind != "integer" or not isinstance(value, bool))
        return [] if right else [f"{place}: {value!r} is no {kind}"]
    if kind == "quantity" or " | " in kind:
        right = QUANTITY.fullmatch(str(value)) if kind == "quantity" else value in kind.split(" | ")
        return [] if right else [f"{place}: {value!r} is no {kind}"]
    if not isinstance(value, dict):
        return [f"{place}: no mapping"]
    if kind in ("map", "quantities"):
        of = "string" if kind == "map" else "quantity"
        return [wrong for name in value for wrong in wrong_fields(value[name], of, f"{place}.{name}")]
    known = {field.removesuffix("!"): of for field, of in FIELDS[kind].items()}
    found = [f"{place}: {kind} has no {name}" for name in value if name not in known]
    found += [
        f"{place}: {kind} needs {field[:-1]}" for field in FIELDS[kind] if field[-1] == "!" and field[:-1] not in value
    ]
    return found + [
        wrong for name in value if name in known for wrong in wrong_fields(value[name], known[name], f"{place}.{name}")
    ]


def manifests(kind: Any, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The objects of a file by kind, each checked against the recorded fields."""
    found = {one["kind"]: one for one in yaml.safe_load_all(render(kind, template_options(options)))}
    assert [wrong for name, one in found.items() for wrong in wrong_fields(one, name, name)] == []
    return found


def test_the_check_of_fields_finds_what_is_wrong() -> None:
    spec: dict[str, Any] = {"template": {"spec": {"containers": [{"name": "a", "env": [{"value": 3}], "img": "b"}]}}}
    group = spec | {"replicas": True, "rayStartParams": {"num-cpus": 0}, "groupName": "a", "maxReplicas": 1}
    assert wrong_fields(group, "WorkerGroupSpec", "group") == [
        "group: WorkerGroupSpec needs minReplicas",
        "group.template.spec.containers[0]: Container has no img",
        "group.template.spec.containers[0].env[0]: EnvVar needs name",
        "group.template.spec.containers[0].env[0].value: 3 is no string",
        "group.replicas: True is no integer",
        "group.rayStartParams.num-cpus: 0 is no string",
    ]
    assert wrong_fields({"mode": "off"}, "AuthOptions", "a") == ["a.mode: 'off' is no disabled | token"]
    limits = {"limits": {"cpu": "4", "memory": "16 GiB"}}
    assert wrong_fields(limits, "ResourceRequirements", "a") == ["a.limits.memory: '16 GiB' is no quantity"]


@pytest.mark.parametrize("kind", ["kuberay", "kuberay-cluster"])
def test_kuberay(kind: str) -> None:
    if kind == "kuberay":
        job = manifests(kind, GPUS)["RayJob"]
        assert job["spec"]["entrypoint"] == "rayfl run quickstart name=femnist storage_path=/shared/runs"
        spec = job["spec"]["rayClusterSpec"]
    else:
        job = manifests(kind, GPUS)["RayCluster"]
        spec = job["spec"]
    assert job["apiVersion"] == "ray.io/v1" and job["metadata"] == {"name": "femnist"}
    assert spec["authOptions"] == {"mode": "token"} and "serviceAccountName" not in str(spec)
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    [workers] = spec["workerGroupSpecs"]
    assert workers["replicas"] == 3
    for group in (spec["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        assert {"name": "shared", "persistentVolumeClaim": {"claimName": "rayfl-shared"}} in pod["volumes"]
        assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} <= {v["name"] for v in pod["volumes"]}
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "16", "memory": "100Gi", "nvidia.com/gpu": "2"}
    assert "nvidia.com/gpu" not in render("kuberay", TemplateOptions())


def test_kuberay_takes_tokens_of_kubernetes() -> None:
    found = manifests("kuberay-cluster", GPUS | {"rbac": True, "namespace": "lab", "min_nodes": 1})
    assert set(found) == {"RayCluster", "ServiceAccount", "Role", "RoleBinding", "ClusterRoleBinding"}
    spec = found["RayCluster"]["spec"]
    assert spec["authOptions"] == {"mode": "token", "enableK8sTokenAuth": True}
    account = {"kind": "ServiceAccount", "name": "femnist-nodes", "namespace": "lab"}
    assert found["ServiceAccount"]["metadata"] == {"name": account["name"], "namespace": "lab"}
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert group["template"]["spec"]["serviceAccountName"] == account["name"]
    # The nodes may use this one cluster, and ask whose a token is; the operator makes a role with the cluster's name.
    [rule] = found["Role"]["rules"]
    assert (
        rule["verbs"] == ["ray:write"] and rule["resources"] == ["rayclusters"] and rule["resourceNames"] == ["femnist"]
    )
    assert found["RoleBinding"]["roleRef"]["name"] == found["Role"]["metadata"]["name"] != "femnist"
    assert found["ClusterRoleBinding"]["roleRef"]["name"] == "system:auth-delegator"
    assert [found[name]["subjects"] for name in ("RoleBinding", "ClusterRoleBinding")] == [[account], [account]]
    assert [found[name]["metadata"]["namespace"] for name in ("RayCluster", "Role", "RoleBinding")] == ["lab"] * 3
    with pytest.raises(ConfigError, match="KubeRay refuses tokens of Kubernetes for a RayJob"):
        render("kuberay", template_options({"rbac": True}))
    with pytest.raises(ConfigError, match="--namespace: without --rbac"):
        render("kuberay-cluster", template_options({"namespace": "lab"}))


def test_tokens_of_kubernetes_need_a_newer_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.jobs.templating.version", lambda package: "2.54.1")
    with pytest.raises(ConfigError, match=r"tokens from 2\.55 on; this is Ray 2\.54\.1"):
        render("kuberay-cluster", template_options({"rbac": True}))


def test_kuberay_adds_nodes_places_pods_and_names_an_image_that_no_one_can_pull(tmp_path: Path) -> None:
    options = {
        "nodes": 8,
        "min_nodes": 2,
        "tolerations": ("nvidia.com/gpu", "team=fl"),
        "node_selector": ("gpu=h200",),
        "image_pull_policy": "Always",
        "image": "registry.example/rayfl:1",
    }
    spec = manifests("kuberay", options)["RayJob"]["spec"]["rayClusterSpec"]
    [workers] = spec["workerGroupSpecs"]
    assert spec["enableInTreeAutoscaling"] is True
    assert (workers["minReplicas"], workers["replicas"], workers["maxReplicas"]) == (2, 2, 8)
    pod = workers["template"]["spec"]
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "team", "operator": "Equal", "value": "fl"},
    ]
    assert pod["nodeSelector"] == {"gpu": "h200"}
    containers = [group["template"]["spec"]["containers"][0] for group in (spec["headGroupSpec"], workers)]
    assert [container["imagePullPolicy"] for container in containers] == ["Always", "Always"]
    plain = yaml.safe_load(render("kuberay-cluster", TemplateOptions()))["spec"]
    assert "enableInTreeAutoscaling" not in plain and "imagePullPolicy" not in str(plain)
    with pytest.raises(ConfigError, match="--min-nodes 3 is more than --nodes 1"):
        render("kuberay", template_options({"min_nodes": 3}))
    with pytest.raises(ConfigError, match="--node-selector-0: "):
        template_options({"node_selector": ("h200",)})
    warned = CliRunner().invoke(app, ["cluster", "template", "kuberay", "--out", str(tmp_path / "a.yaml")])
    assert warned.exit_code == 0 and "no node can pull the image rayfl:latest" in " ".join(warned.output.split())
    pullable = ["--image", "registry.example/rayfl:1", "--out", str(tmp_path / "b.yaml")]
    assert "can pull" not in CliRunner().invoke(app, ["cluster", "template", "kuberay", *pullable]).output


@pytest.mark.parametrize(
    "options", [GPUS, {"name": "own", "hosts": ("10.0.0.1", "10.0.0.2", "10.0.0.3"), "gpus_per_node": 1}]
)
def test_ray_up(options: dict[str, Any]) -> None:
    config = yaml.safe_load(render("ray-up", template_options(options)))
    validate_config(prepare_config(config))  # Ray's own schema
    [head] = [line for line in config["head_start_ray_commands"] if "ray start" in line]
    assert "--num-cpus=0" in head and "--dashboard-host=127.0.0.1" in head
    assert "--env=RAY_AUTH_MODE=token" in config["docker"]["run_options"]
    assert config["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    assert "--volume=/shared:/shared" in config["docker"]["run_options"]
    assert "--gpus=all" in config["docker"]["worker_run_options"]
    if "hosts" in options:
        assert config["provider"]["worker_ips"] == ["10.0.0.2", "10.0.0.3"]
    else:
        assert config["available_node_types"]["clients"]["resources"] == {"CPU": 16, "GPU": 2}


@pytest.mark.parametrize("hosts", [(), ("10.0.0.1", "10.0.0.2")])
def test_the_head_of_ray_up_trains_by_choice(hosts: tuple[str, ...]) -> None:
    options = {"gpus_per_node": 2, "cpus_per_node": 16, "head_trains": True, **({"hosts": hosts} if hosts else {})}
    config = yaml.safe_load(render("ray-up", template_options(options)))
    validate_config(prepare_config(config))
    [head] = [line for line in config["head_start_ray_commands"] if "ray start" in line]
    assert "--num-cpus=16 --num-gpus=2 " in head
    assert config["docker"]["head_run_options"] == config["docker"]["worker_run_options"] == ["--gpus=all"]
    if not hosts:
        types = config["available_node_types"]
        assert types["head"]["resources"] == types["clients"]["resources"] == {"CPU": 16, "GPU": 2}
        assert types["head"]["node_config"] == types["clients"]["node_config"]
    with pytest.raises(ConfigError, match="--head-trains: kuberay has no use for it"):
        render("kuberay", template_options({"head_trains": True}))


@pytest.mark.parametrize("gpus", [0, 1])
def test_docker(gpus: int, tmp_path: Path) -> None:
    text = render("docker", template_options({"gpus_per_node": gpus}))
    file = tmp_path / "Dockerfile"
    file.write_text(text)
    lint("hadolint", str(file))
    lines = text.splitlines()
    commands = [line.split()[0] for line in lines if line and line[0].isalpha()]
    assert commands == ["FROM", "RUN", "COPY", "RUN", "ENV", "RUN"]
    [base] = [line for line in lines if line.startswith("FROM")]
    assert re.fullmatch(r"FROM rayproject/ray:\d+\.\d+\.\d+-py3\d+-" + ("gpu" if gpus else "cpu"), base)
    assert any(line.startswith("RUN pip install") and "torch==" in line and "torchvision==" in line for line in lines)
    assert any("whl/cpu" in line for line in lines) == (not gpus)
    for number, line in enumerate(lines[:-1]):
        assert not line.endswith("\\") or lines[number + 1].startswith("    ")


def test_grafana() -> None:
    dashboard = json.loads(render("grafana", TemplateOptions()))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    expressions = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    for gauge in ("round", "rounds", "clients_per_second", "state_bytes", "cache_hits", "cache_misses"):
        assert f"ray_rayfl_{gauge}{{" in expressions


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("kuberay", {"time": "1:00:00"}, "--time: kuberay has no use for it"),
        ("ray-up", {"hosts": ("10.0.0.1",), "nodes": 2}, "--nodes: ray-up with --hosts has no use"),
        ("docker", {"nodes": 2}, "--nodes"),
        ("kuberay", {"name": "Not_a_name"}, "--name"),
        ("slurm", {"shared_volume": "/a b; rm"}, "--shared-volume"),
        ("slurm", {"nodes": 0}, "--nodes"),
    ],
)
def test_what_cannot_be_written_is_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        render(kind, template_options(options))


def test_a_file_that_starts_no_run_takes_none() -> None:
    with pytest.raises(ConfigError, match="starts no run"):
        render("kuberay-cluster", TemplateOptions(), ["quickstart"])


def test_the_command_prints_or_writes(tmp_path: Path) -> None:
    assert [kind.value for kind in Kind] == list(KINDS)
    run = ["cluster", "template", "kuberay", "mnist-pathological", "train.rounds=7", "--nodes", "2"]
    printed = CliRunner().invoke(app, run, catch_exceptions=False)
    assert printed.exit_code == 0
    command = yaml.safe_load(printed.stdout)["spec"]["entrypoint"]
    assert command.startswith("rayfl run mnist-pathological train.rounds=7 ")
    target = tmp_path / "new" / "job.yaml"
    assert CliRunner().invoke(app, [*run, "--out", str(target)], catch_exceptions=False).exit_code == 0
    assert target.read_text() == printed.stdout
