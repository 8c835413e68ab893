"""The run that a file of a cluster starts is checked before the file is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rayfl.cli.entry import app
from rayfl.errors import ConfigError


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (["nonsense"], "'nonsense' is neither a file nor a preset"),
        (["quickstart", "train.round=5"], r"train.round: unknown \(did you mean 'rounds'\?\)"),
        (["train.lr=1e400"], "train.lr: must be a finite number"),
        (["cluster.backend=inline", "--nodes", "2"], "would be idle: leave it out"),
        (["cluster.address=10.0.0.1:6379"], "would go to that cluster"),
        (["cluster.device=cuda"], "give --gpus-per-node"),
    ],
)
@pytest.mark.parametrize("kind", ["kuberay", "slurm"])
def test_the_run_in_a_file_is_validated_before_it_is_written(
    kind: str, run: list[str], message: str, tmp_path: Path
) -> None:
    target = tmp_path / "file"
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, ["cluster", "template", kind, *run, "--out", str(target)], catch_exceptions=False)
    assert not target.exists()


def test_of_a_configuration_in_a_file_it_is_said_that_the_cluster_reads_it(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("dataset: digits\nmodel: two_nn\nalgorithm: fedavg\npartition: {name: iid, num_clients: 4}\n")
    done = CliRunner().invoke(app, ["cluster", "template", "slurm", str(config)], catch_exceptions=False)
    assert done.exit_code == 0
    assert f"rayfl run {config}" in done.stdout
    assert "is read where the run starts" in done.stderr.replace("\n", " ")


def test_results_do_not_lie_in_a_pod(tmp_path: Path) -> None:
    def template(kind: str, *run: str) -> str:
        return CliRunner().invoke(app, ["cluster", "template", kind, *run], catch_exceptions=False).stdout

    for option, *further in (("storage_path",), ("storage.copies_path", "storage.copies=2")):
        with pytest.raises(ConfigError, match=f"{option}=runs would lie in the folder where the job runs"):
            template("kuberay", "quickstart", *further, f"{option}=runs")
        placed = f"{option}=s3://bucket/runs"
        assert placed in template("kuberay", "quickstart", *further, placed)
        # Jobs of SLURM start where they were submitted, in a folder that nodes share.
        assert f"{option}=runs" in template("slurm", "quickstart", *further, f"{option}=runs")
    config = tmp_path / "mine.yaml"
    config.write_text(
        "storage_path: runs\ndataset: digits\nmodel: two_nn\nalgorithm: fedavg\n"
        "partition: {name: iid, num_clients: 4}\n"
    )
    # The file's folder is not used: the command has one of its own.
    assert "storage_path=/shared/runs" in template("kuberay", str(config))


def test_ray_gives_a_run_the_time_to_stop_that_its_configuration_allows() -> None:
    def waits(*words: str) -> tuple[int, set[int]]:
        """How long Ray waits for a job that is stopped, and Kubernetes for a pod."""
        done = CliRunner().invoke(app, ["cluster", "template", *words], catch_exceptions=False)
        content = yaml.safe_load(done.stdout)["spec"]
        spec = content.get("rayClusterSpec", content)
        pods = [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
        variables = {one["name"]: one["value"] for one in pods[0]["containers"][0]["env"]}
        return int(variables["RAY_JOB_STOP_WAIT_TIME_S"]), {pod["terminationGracePeriodSeconds"] for pod in pods}

    assert waits("kuberay") == waits("kuberay-cluster") == (80, {120})
    assert waits("kuberay", "quickstart", "cluster.stop_grace_s=600.5") == (661, {701})
    ray_up = CliRunner().invoke(app, ["cluster", "template", "ray-up"], catch_exceptions=False).stdout
    assert "--env=RAY_JOB_STOP_WAIT_TIME_S=80" in yaml.safe_load(ray_up)["docker"]["run_options"]


def test_one_node_of_slurm_may_train_without_ray() -> None:
    run = ["quickstart", "cluster.backend=inline"]
    assert CliRunner().invoke(app, ["cluster", "template", "slurm", *run], catch_exceptions=False).exit_code == 0
    with pytest.raises(ConfigError, match="kuberay's nodes that train would be idle"):
        CliRunner().invoke(app, ["cluster", "template", "kuberay", *run], catch_exceptions=False)
