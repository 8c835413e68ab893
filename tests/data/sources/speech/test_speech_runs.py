"""Speech Commands from the command that prepares it to scores: spectrograms and waveforms, looped and stacked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from algorithms.registry import Experiment
from cluster.run import run_config
from rayfl.cli.entry import app
from rayfl.config.loading import load_config
from rayfl.data.files.whole import file_digest
from tests.support.speech_made import speech_archive, speech_files


def prepared(folder: Path, *options: str) -> None:
    """Prepares an archive as a user does who has it elsewhere."""
    speech_files(folder / "unpacked")
    archive = speech_archive(folder / "unpacked", folder / "speech_commands_v0.02.tar.gz")
    arguments = ["--source", str(archive), "--sha256", file_digest(archive), "--offline"]
    result = CliRunner().invoke(app, ["data", "prepare", "speech_commands", *options, *arguments])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("speech_commands -> ")


def run(folder: Path, name: str, *overrides: str) -> Path:
    fewer = ["train.rounds=2", "train.clients_per_round=all", "evaluation.every=1", "algorithm=fedavg"]
    quiet = ["cluster.backend=inline", "tracking.tensorboard=false", f"storage_path={folder}", f"name={name}"]
    run_config(load_config(Experiment, "quickstart", ["dataset=speech_commands", *fewer, *quiet, *overrides]))
    return folder / name


def losses(folder: Path) -> np.ndarray:
    """The mean losses of test and official parts, by round."""
    rounds = pq.read_table(folder / "rounds.parquet").to_pandas()
    found = rounds.loc[rounds["split"].isin(["test", "official"]) & rounds["pooled_loss"].notna()]
    assert {"test", "official"} <= set(found["split"]) and found["round"].max() == 2
    return found.sort_values(["round", "cohort", "split", "model"])["pooled_loss"].to_numpy()


@pytest.mark.parametrize(
    ("what", "model"),
    [
        ([], "model={name: tf_cnn, form: fedphp_hidden}"),
        pytest.param(["dataset.features=waveform"], "model={name: m5, width: 4, norm: group}", marks=pytest.mark.slow),
    ],
    ids=["log_mel", "waveform"],
)
@pytest.mark.slow
def test_two_rounds_from_an_archive_looped_and_stacked(tmp_path: Path, root: Path, what: list[str], model: str) -> None:
    prepared(tmp_path, *(option.removeprefix("dataset.") for option in what))
    shared = ["dataset.part=train", "partition=natural", "evaluation.official_test=true", model, *what]
    shared += ["train.lr=0.001", "train.local_epochs=1"]  # long steps of group normalization magnify round-off
    found = [losses(run(tmp_path, mode, *shared, f"engine.mode={mode}")) for mode in ("looped", "vectorized")]
    assert len(found[0]) >= 4 and np.isfinite(found[0]).all()
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


@pytest.mark.slow
def test_a_net_learns_the_tones_of_pooled_clips(tmp_path: Path, root: Path) -> None:
    prepared(tmp_path, "words=core_unknown", "mels=16", "hop_ms=20")
    chosen = "dataset={name: speech_commands, words: core_unknown, mels: 16, hop_ms: 20, part: train, client: none}"
    folder = run(
        tmp_path,
        "run",
        chosen,
        "partition={name: iid, num_clients: 3}",
        "transform.normalize=dataset",
        "model=two_nn",
        *("train.rounds=10", "train.local_epochs=3", "train.batch_size=10", "train.lr=0.05"),
        *("evaluation.every=10", "evaluation.official_test=true"),
    )
    rounds = pq.read_table(folder / "rounds.parquet").to_pandas()
    official = rounds.loc[(rounds["split"] == "official") & (rounds["round"] == 10), "pooled_top1"]
    assert official.iloc[0] == 1
