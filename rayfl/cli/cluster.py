"""The commands ``rayfl doctor`` and ``rayfl cluster template``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from rayfl.cli.outputs import AsJson, write_json
from rayfl.cli.paths import at_home
from rayfl.tracking import terminal

_WRONG = 1
_STYLES = {"ok": "green", "warning": "yellow", "wrong": "red"}


class Kind(StrEnum):
    """The files ``rayfl cluster template`` can write."""

    KUBERAY = "kuberay"
    KUBERAY_CLUSTER = "kuberay-cluster"
    SLURM = "slurm"
    RAY_UP = "ray-up"
    DOCKER = "docker"
    GRAFANA = "grafana"


def register(app: typer.Typer, load: Callable[[str | None, list[str] | None], Any]) -> None:
    """Adds the commands to ``rayfl``.

    Args:
        app: the command line.
        load: makes a configuration of a preset or file and overrides.
    """

    def template(
        kind: Annotated[Kind, typer.Argument(help="Which file.")],
        run: Annotated[
            list[str] | None,
            typer.Argument(
                help="kuberay, slurm: a preset or file and overrides, as after rayfl run; default quickstart."
            ),
        ] = None,
        name: Annotated[str | None, typer.Option(help="Of the cluster and the run; default rayfl.")] = None,
        image: Annotated[str | None, typer.Option(help="Container image; default rayfl:latest.")] = None,
        nodes: Annotated[int | None, typer.Option(help="Nodes that train; default 1.")] = None,
        gpus_per_node: Annotated[int | None, typer.Option(help="Default 0.")] = None,
        cpus_per_node: Annotated[int | None, typer.Option(help="Default 8.")] = None,
        memory_per_node: Annotated[int | None, typer.Option(help="In GiB; default 32.")] = None,
        shared_volume: Annotated[
            str | None, typer.Option(help="KubeRay: a claim, default rayfl-shared; else a folder, default /shared.")
        ] = None,
        time: Annotated[str | None, typer.Option(help="slurm: time limit; default 24:00:00.")] = None,
        partition: Annotated[str | None, typer.Option(help="slurm: partition.")] = None,
        account: Annotated[str | None, typer.Option(help="slurm: who is charged.")] = None,
        array: Annotated[int | None, typer.Option(help="slurm: number of jobs, one for each seed from 0 on.")] = None,
        sweep: Annotated[
            bool | None, typer.Option("--sweep", help="slurm: several values as after rayfl sweep, a job for each.")
        ] = None,
        exclusive: Annotated[bool | None, typer.Option("--exclusive", help="slurm: no other job on the nodes.")] = None,
        min_nodes: Annotated[
            int | None,
            typer.Option(help="KubeRay: the fewest nodes; Ray adds more, up to --nodes, for runs that wait."),
        ] = None,
        tolerations: Annotated[
            list[str] | None, typer.Option("--toleration", help="KubeRay: a taint, key or key=value; repeat.")
        ] = None,
        node_selector: Annotated[
            list[str] | None, typer.Option(help="KubeRay: a label of nodes that train, key=value; repeat.")
        ] = None,
        image_pull_policy: Annotated[str | None, typer.Option(help="KubeRay: Always, IfNotPresent or Never.")] = None,
        rbac: Annotated[
            bool | None,
            typer.Option("--rbac", help="kuberay-cluster: tokens of Kubernetes, and roles that say who may."),
        ] = None,
        namespace: Annotated[str | None, typer.Option(help="kuberay-cluster --rbac: default default.")] = None,
        environment: Annotated[str | None, typer.Option(help="slurm: folder of the virtual environment.")] = None,
        hosts: Annotated[
            list[str] | None, typer.Option(help="ray-up: a machine of your own, head first; repeat. None: AWS.")
        ] = None,
        head_trains: Annotated[
            bool | None, typer.Option("--head-trains", help="ray-up: the head trains too, like the other nodes.")
        ] = None,
        user: Annotated[str | None, typer.Option(help="ray-up: who logs in; default ubuntu.")] = None,
        instance_type: Annotated[str | None, typer.Option(help="ray-up on AWS: default g5.2xlarge.")] = None,
        out: Annotated[Path | None, typer.Option(callback=at_home, help="File to write; default: print.")] = None,
        as_json: AsJson = False,
    ) -> None:
        """Write a file that starts a cluster: Kubernetes, SLURM, Ray's launcher, an image, a Grafana dashboard."""
        from cluster.jobs.slurm_arrays import split_sweep
        from cluster.jobs.templating import check_fits, render, template_options, unpullable
        from rayfl.storage.files import Storage

        given = {
            "name": name,
            "image": image,
            "nodes": nodes,
            "gpus_per_node": gpus_per_node,
            "cpus_per_node": cpus_per_node,
            "memory_per_node": memory_per_node,
            "shared_volume": shared_volume,
            "time": time,
            "environment": environment,
            "partition": partition,
            "account": account,
            "array": array,
            "sweep": sweep,
            "exclusive": exclusive,
            "min_nodes": min_nodes,
            "tolerations": tuple(tolerations) if tolerations else None,
            "node_selector": tuple(node_selector) if node_selector else None,
            "image_pull_policy": image_pull_policy,
            "rbac": rbac,
            "namespace": namespace,
            "hosts": tuple(hosts) if hosts else None,
            "head_trains": head_trains,
            "user": user,
            "instance_type": instance_type,
        }
        chosen = template_options({field: value for field, value in given.items() if value is not None})
        first, *rest = run or ["quickstart"]
        text = render(kind.value, chosen, run or (), load(first, rest) if kind is Kind.KUBERAY else None)
        warnings = []
        if kind.value.startswith("kuberay") and (why := unpullable(chosen)):
            warnings.append(why)
        if run:
            common, experiments = split_sweep(run) if sweep else (run, [[]])
            for experiment in experiments:
                words = [*common, *experiment]
                check_fits(kind.value, chosen, load(words[0], words[1:]), words)
            if Path(run[0]).expanduser().is_file():
                warnings.append(f"{run[0]} is read where the run starts: see that it is there too")
        if out is not None:
            Storage(str(out.parent)).write(out.name, text.encode())
        if as_json:
            write_json("cluster-template", {"kind": kind.value, "file": out, "text": text, "warnings": warnings})
            return
        for warning in warnings:
            terminal.warn(f"warning: {warning}")
        if out is None:
            typer.echo(text, nl=False)
            return
        terminal.out().print(f"{kind.value} -> {out}", soft_wrap=True)

    group = typer.Typer(help="Files that start a cluster.", no_args_is_help=True)
    # A group, so that there is room for what else clusters need.
    group.callback()(lambda: None)
    group.command("template")(template)
    app.add_typer(group, name="cluster")
    app.command("doctor")(doctor)


def doctor(
    address: Annotated[
        str | None, typer.Option(help="Also a Ray cluster, host:port or auto; default RAY_ADDRESS, if set.")
    ] = None,
    storage: Annotated[str, typer.Option(help="Folder of all runs, as storage_path.")] = "~/ray_results",
    as_json: AsJson = False,
) -> None:
    """Check what this machine and a cluster need; exits with 1 if something is wrong, and says how to mend it."""
    from cluster.jobs.doctor import examine

    findings = examine(address or os.environ.get("RAY_ADDRESS"), storage)
    if as_json:
        write_json("doctor", {"findings": [asdict(finding) for finding in findings]})
        raise typer.Exit(_WRONG if any(finding.verdict == "wrong" for finding in findings) else 0)
    table = Table("what", "", Column("found", overflow="fold"), Column("fix", overflow="fold"))
    for finding in findings:
        # As plain text: brackets in a path are no markup.
        verdict = Text(finding.verdict, style=_STYLES[finding.verdict])
        table.add_row(Text(finding.what), verdict, Text(finding.found), Text(finding.fix))
    terminal.out().print(table)
    if any(finding.verdict == "wrong" for finding in findings):
        raise typer.Exit(_WRONG)
