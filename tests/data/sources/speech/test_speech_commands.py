"""Speech Commands from small files of the official layout: speakers, official parts, words and features."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from algorithms.registry import Experiment
from rayfl.config.loading import load_config
from rayfl.data.audio.features import LogMel
from rayfl.data.federated import FederatedDataset
from rayfl.data.opening import open_dataset
from rayfl.data.sources.official import open_official_test
from rayfl.data.sources.preparation.preparing import Order
from rayfl.data.sources.speech.speech_commands import SpeechCommandsSource
from rayfl.errors import ConfigError, DataError
from rayfl.randomness import RandomStreams
from tests.support.speech_made import SPEAKERS, Made, speech_files

EVERYBODY = sorted(speaker for speakers in SPEAKERS.values() for speaker in speakers)


@pytest.fixture
def made(root: Path) -> Made:
    return speech_files(root / "speech_commands_v0.02")


def opened(*overrides: str, **options: Any) -> tuple[FederatedDataset, Any]:
    chosen = [f"dataset.{name}={value}" for name, value in options.items()]
    config = load_config(
        Experiment, "quickstart", ["dataset=speech_commands", "partition=natural", "model=two_nn", *chosen, *overrides]
    )
    return open_dataset(config, RandomStreams(0)), config


def second(samples: np.ndarray) -> np.ndarray:
    """A second of sound, in [-1, 1)."""
    return np.pad(samples[:16_000], (0, max(0, 16_000 - len(samples)))) / 32_768


def test_speakers_are_clients_and_samples_are_the_spectrograms_of_their_clips(root: Path, made: Made) -> None:
    data, config = opened("holdout={test: 0, validation: 0}")
    assert list(data.names) == EVERYBODY
    assert data.spec == config.dataset.known_spec and data.spec.shape == (1, 40, 98) and data.spec.num_classes == 35
    names = config.dataset.class_names()
    features = LogMel(16_000, 400, 160, 40)
    for client, speaker in enumerate(data.names):
        own = sorted(name for name in made if name.partition("/")[2].startswith(speaker))
        examples = data.load(client)["train"]
        assert [names[label] for label in examples.y.tolist()] == [name.partition("/")[0] for name in own]
        expected = features(np.stack([second(made[name]) for name in own]))
        np.testing.assert_allclose(examples.x.numpy()[:, 0], expected, rtol=1e-5, atol=1e-5)
    (warned,) = data.remarks()
    assert "the files of speech_commands have 84 clips, but the official ones of v0.02 have 105829" in warned


def test_waveforms_are_the_samples_of_the_files(root: Path, made: Made) -> None:
    data, _ = opened("holdout={test: 0, validation: 0}", features="waveform")
    x = data.load(0)["train"].x.numpy()
    own = sorted(name for name in made if EVERYBODY[0] in name)
    assert x.shape == (12, 1, 1, 16_000) and x.min() >= -1 and x.max() < 1
    np.testing.assert_array_equal(x[:, 0, 0], np.stack([second(made[name]) for name in own]).astype(np.float32))


def test_other_windows_and_bands_are_other_files(root: Path, made: Made) -> None:
    data, _ = opened("holdout={test: 0, validation: 0}", mels=12, window_ms=32, hop_ms=16)
    assert data.spec.shape == (1, 12, 1 + (16_000 - 512) // 256)
    name = min(name for name in made if EVERYBODY[0] in name)
    expected = LogMel(16_000, 512, 256, 12)(second(made[name])[None])
    np.testing.assert_allclose(data.load(0)["train"].x[0].numpy(), expected, rtol=1e-5, atol=1e-5)
    opened()
    assert [path.name for path in sorted((root / "prepared").glob("*.arrow"))] == [
        "speech_commands-v0.02-all-mel-12-32-16.arrow",
        "speech_commands-v0.02-all-mel-40-25-10.arrow",
    ]


@pytest.mark.parametrize(
    ("options", "speakers"),
    [
        ({"part": "both"}, EVERYBODY),
        ({"part": "train"}, sorted((*SPEAKERS["train"], *SPEAKERS["validation"]))),
        ({"part": "train", "validation": "leave_out"}, sorted(SPEAKERS["train"])),
        ({"part": "both", "validation": "leave_out"}, sorted((*SPEAKERS["train"], *SPEAKERS["test"]))),
        ({"part": "test"}, sorted(SPEAKERS["test"])),
    ],
)
def test_the_official_parts_divide_speakers(
    root: Path, made: Made, options: dict[str, str], speakers: list[str]
) -> None:
    assert list(opened(**options)[0].names) == speakers
    pooled, _ = opened("partition={name: iid, num_clients: 4}", **options, client="none")
    assert pooled.num_clients == 4 and pooled.sizes().sum() == 12 * len(speakers)


@pytest.mark.parametrize("client", ["speaker", "none"])
def test_the_official_test_part_is_of_other_speakers(root: Path, made: Made, client: str) -> None:
    partition = "partition=natural" if client == "speaker" else "partition={name: dirichlet, num_clients: 3, alpha: 1}"
    data, config = opened(partition, part="train", client=client)
    official = open_official_test(config.dataset, data, RandomStreams(0))
    own = sorted(
        (name for name in made if name.partition("/")[2].partition("_")[0] in SPEAKERS["test"]),
        key=lambda name: (name.partition("/")[2].partition("_")[0], name),
    )
    examples = official.load(0, len(official))
    names = config.dataset.class_names()
    assert [names[label] for label in examples.y.tolist()] == [name.partition("/")[0] for name in own]
    expected = LogMel(16_000, 400, 160, 40)(np.stack([second(made[name]) for name in own]))
    np.testing.assert_allclose(examples.x.numpy()[:, 0], expected, rtol=1e-5, atol=1e-5)
    both, config = opened(partition, client=client)
    with pytest.raises(ConfigError, match=r"dataset\.part is both, so the clients have the test samples themselves"):
        open_official_test(config.dataset, both, RandomStreams(0))


def test_small_clients_are_left_out_and_partitions_want_pooled_clips(root: Path, made: Made) -> None:
    for take in (1, 2, 3):
        for word in ("yes", "no", "tree"):
            (root / "speech_commands_v0.02" / word / f"00176480_nohash_{take}.wav").unlink()
    data, _ = opened("partition={name: natural, min_samples: 4}")
    assert list(data.names) == EVERYBODY[1:]
    with pytest.raises(ConfigError, match=r"'iid' cannot divide dataset 'speech_commands'.*set partition=natural"):
        opened("partition={name: iid, num_clients: 4}")
    with pytest.raises(DataError, match="this data source is pooled and has no clients of its own"):
        opened(client="none")


@pytest.mark.parametrize(
    ("words", "classes", "counts"),
    [
        ("core", ["yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go"], {"yes": 28, "no": 28}),
        ("core_unknown", None, {"yes": 28, "no": 28, "unknown": 28}),
    ],
)
def test_core_words_are_ten_classes_and_the_others_one_or_none(
    root: Path, made: Made, words: str, classes: list[str] | None, counts: dict[str, int]
) -> None:
    data, config = opened("holdout={test: 0, validation: 0}", words=words)
    names = config.dataset.class_names()
    assert data.spec.num_classes == len(names) == (10 if words == "core" else 11)
    assert classes is None or list(names) == classes
    labels = np.concatenate([data.labels(client)["train"] for client in range(data.num_clients)])
    assert Counter(names[label] for label in labels.tolist()) == counts
    assert len(data.remarks()) == (words != "core")


def test_version_1_has_thirty_words(root: Path) -> None:
    made = speech_files(root / "speech_commands_v0.01")
    data, config = opened(version="v0.01")
    assert data.spec.num_classes == 30 and data.sizes().sum() == len(made)
    assert set(SpeechCommandsSource().class_names()) - set(config.dataset.class_names()) == {
        *("backward", "follow", "forward", "learn", "visual")
    }
    speech_files(root / "speech_commands_v0.02", ["visual"])
    shutil.move(root / "speech_commands_v0.02" / "visual", root / "speech_commands_v0.01")
    with pytest.raises(
        DataError, match=r"is in the folder of 'visual', which is no word of this version; set dataset.v"
    ):
        SpeechCommandsSource(version="v0.01").prepare(Order(force=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"features": "waveform", "mels": 20}, "mels: waveforms have none; leave it out, or set features=log_mel"),
        ({"features": "waveform", "hop_ms": 20}, "hop_ms: waveforms have none"),
        ({"mels": 128}, r"mels: some of 128 bands lie between the frequencies of windows of 25 ms, 40 Hz apart; set f"),
        ({"version": "v0.03"}, "v0.02"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        SpeechCommandsSource(**options)
