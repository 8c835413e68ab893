"""Speech Commands from small archives of the official layout: speakers, parts, words, features, and what is refused."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterator
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
from rayfl.data.sources.inventory import inventory, verify
from rayfl.data.sources.official import open_official_test
from rayfl.data.sources.preparing import Order
from rayfl.data.sources.speech_commands import SpeechCommandsSource
from rayfl.data.sources.speech_files import part_of
from rayfl.errors import ConfigError, DataError
from rayfl.randomness import RandomStreams
from tests.support.server import Server, serving
from tests.support.speech_made import SPEAKERS, Made, damaged_archive, speech_archive, speech_files, write_wav

EVERYBODY = sorted(speaker for speakers in SPEAKERS.values() for speaker in speakers)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("rayfl.data.sources.download.RETRY_PAUSES_S", ())
    with serving(Server({})) as running:
        yield running


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYFL_DATA", str(tmp_path / "root"))
    return tmp_path / "root"


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


def test_an_archive_is_read_without_being_unpacked_and_gives_the_same_file(
    tmp_path: Path, root: Path, made: Made, server: Server
) -> None:
    folder = root / "speech_commands_v0.02"
    source = SpeechCommandsSource()
    content = source.prepare(Order(offline=True)).read_bytes()
    archive = speech_archive(folder, tmp_path / "mine.tar.gz")
    with pytest.raises(DataError, match=r"is prepared already, from .*; add --force to prepare it again"):
        source.prepare(Order(place=str(archive)))
    official = "af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58"
    with pytest.raises(
        DataError, match=rf"mine.tar.gz has the sha256 \w{{64}}, not {official}: it is damaged or anoth"
    ):
        source.prepare(Order(place=str(archive), force=True))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    other = tmp_path / "other"
    for place in (str(archive), server.url("/mine.tar.gz")):
        server.files["/mine.tar.gz"] = archive.read_bytes()
        elsewhere = SpeechCommandsSource(root=other / str(len(place)))
        prepared = elsewhere.prepare(Order(place=place, sha256=digest))
        assert verify(prepared) == ([], [])
        # the header says where the clips are from
        assert prepared.read_bytes().replace(place.encode(), b"") != content
        found, expected = elsewhere.open(), source.open()
        np.testing.assert_array_equal(found.x, expected.x)
        assert found.content() == expected.content()
        (entry,) = inventory(elsewhere.resolved_root)
        assert entry.content == "24 validation + 36 train + 24 test, 1 x 40 x 98, 35 classes"
    assert [
        path.name for path in sorted(elsewhere.resolved_root.iterdir()) if path.is_file() and path.name[0] != "."
    ] == ["speech_commands_v0.02.tar.gz"]


def test_an_archive_of_the_other_version_is_told(
    tmp_path: Path, root: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = speech_archive(root / "speech_commands_v0.02", tmp_path / "mine.tar.gz")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setitem(SpeechCommandsSource.sha256, "v0.01", digest)
    with pytest.raises(DataError, match=r"it is that of v0\.01; set version=v0\.01$"):
        SpeechCommandsSource().prepare(Order(place=str(archive)))
    assert SpeechCommandsSource(version="v0.01").prepare(Order(place=str(archive))).exists()


def test_the_first_use_prepares_what_is_in_the_root(root: Path, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = root / "speech_commands_v0.02"
    archive = speech_archive(folder, root / "speech_commands_v0.02.tar.gz")
    monkeypatch.setitem(SpeechCommandsSource.sha256, "v0.02", hashlib.sha256(archive.read_bytes()).hexdigest())
    shutil.rmtree(folder)
    samples = SpeechCommandsSource().open()
    assert len(samples.y) == len(made) and not samples.x.flags.writeable
    archive.unlink()
    assert len(SpeechCommandsSource().open().y) == len(made)
    with pytest.raises(
        DataError, match=r"core-mel-40-25-10.arrow does not exist; make it with `rayfl data prepare spee"
    ):
        SpeechCommandsSource(words="core").open()
    with pytest.raises(
        DataError, match=r"offline; get http://download.tensorflow.org/data/speech_commands_v0.02.tar.g"
    ):
        SpeechCommandsSource(words="core").prepare(Order(offline=True))
    with pytest.raises(DataError, match="nowhere does not exist; give the official archive or its unpacked folder"):
        SpeechCommandsSource(words="core").prepare(Order(place="nowhere"))
    with pytest.raises(DataError, match="--sha256 is for a single file"):
        SpeechCommandsSource(words="core").prepare(Order(place=str(root), sha256="0" * 64))


def test_speakers_have_the_parts_that_the_official_lists_give_them() -> None:
    """Lines of the lists of version 0.01."""
    validation = "8b775397 2643992f 060cd039 f5e5e8b0 dbb40d24 d57febf0 16db1582 171b56dc 66cff190 22aa3665 b1426003"
    test = "2aa787cf ffa76c4a 24ad3ebe d7467392 5828dfa2 91223b83 f0ae7203 95ba4996 94de6a6a caf9fceb 82b99576 81dc4a94"
    assert {part_of(speaker) for speaker in validation.split()} == {"validation"}
    assert {part_of(speaker) for speaker in test.split()} == {"test"}
    shares = Counter(part_of(f"{number:08x}") for number in range(20_000))
    assert shares["validation"] / 20_000 == pytest.approx(0.1, abs=0.01)
    assert shares["test"] / 20_000 == pytest.approx(0.1, abs=0.01)


def test_without_lists_the_rule_says_the_parts_and_lists_override_it(root: Path, made: Made) -> None:
    folder = root / "speech_commands_v0.02"
    for name in ("validation_list.txt", "testing_list.txt"):
        (folder / name).rename(root / name)
    assert list(opened(part="test")[0].names) == sorted(SPEAKERS["test"])
    (folder / "testing_list.txt").write_text("yes/00176480_nohash_0.wav\n")
    with pytest.raises(DataError, match=r"lacks validation_list.txt, but has the other list; get both, or leave out"):
        SpeechCommandsSource().prepare(Order(force=True))
    (folder / "validation_list.txt").write_text("")
    SpeechCommandsSource().prepare(Order(force=True))
    data, _ = opened("holdout={test: 0, validation: 0}", part="test")
    assert list(data.names) == ["00176480"] and data.sizes().sum() == 1


def spoil(folder: Path, how: str) -> None:
    clip = folder / "no" / "4a294341_nohash_3.wav"
    if how == "no wav":
        clip.write_bytes(b"not a sound")
    elif how == "rate":
        write_wav(clip, np.zeros(8000), 8000)
    elif how == "cut off":
        clip.write_bytes(clip.read_bytes()[:-1000])
    elif how == "twice":
        shutil.copytree(folder / "no", folder / "more" / "no")
    elif how == "no clips":
        for word in ("yes", "no", "tree"):
            shutil.rmtree(folder / word)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "no wav",
            r"no/4a294341_nohash_3\.wav is not a readable WAV file: file does not start with RIFF id; get it ag",
        ),
        (
            "rate",
            r"no/4a294341_nohash_3\.wav has 1 channels of 16 bits at 8000 Hz; it must have one of 16 bits at 16000",
        ),
        ("cut off", r"no/4a294341_nohash_3\.wav has 15500 samples where its head says 16000"),
        ("twice", r"no/\w+_nohash_0\.wav is there twice; give the folder of one version"),
        ("no clips", r"has no files <word>/<speaker>_nohash_<number>\.wav; give the official archive"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_bad_file_is_named_and_nothing_is_left(
    tmp_path: Path, root: Path, made: Made, how: str, words: str, packed: bool
) -> None:
    folder = root / "speech_commands_v0.02"
    spoil(folder, how)
    order = Order()
    if packed:
        archive = speech_archive(folder, tmp_path / "mine.tar.gz")
        order = Order(place=str(archive), sha256=hashlib.sha256(archive.read_bytes()).hexdigest())
    with pytest.raises(DataError, match=words):
        SpeechCommandsSource().prepare(order)
    assert [path.name for path in (root / "prepared").iterdir() if not path.name.endswith(".lock")] == []


def test_core_words_must_occur(root: Path) -> None:
    speech_files(root / "speech_commands_v0.02", ["tree"])
    with pytest.raises(DataError, match=r"has no clip of a core word; set dataset\.words=all"):
        SpeechCommandsSource(words="core").prepare(Order())


def test_a_damaged_archive_is_refused(tmp_path: Path, root: Path, made: Made) -> None:
    archive = speech_archive(root / "speech_commands_v0.02", tmp_path / "mine.tar.gz")
    content = archive.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes(64) + content[middle + 64 :]
    for spoiled in (content[:-100], content[:middle], flipped, b"no archive", b""):
        archive.write_bytes(spoiled)
        order = Order(place=str(archive), sha256=hashlib.sha256(spoiled).hexdigest())
        with pytest.raises(
            DataError, match=r"mine\.tar\.gz is neither a folder nor a readable archive|is there twice|WAV"
        ):
            SpeechCommandsSource().prepare(order)
    large = damaged_archive(archive)
    with pytest.raises(DataError, match=r"\./yes/00176480_nohash_0\.wav is larger than 67,108,864 bytes; no file of"):
        SpeechCommandsSource().prepare(Order(place=str(archive), sha256=hashlib.sha256(large).hexdigest()))


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
