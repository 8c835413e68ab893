"""The files of Speech Commands: archives and folders, the lists of the official parts, and what is refused."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rayfl.data.sources.preparation.inventory import inventory, verify
from rayfl.data.sources.preparation.preparing import Order
from rayfl.data.sources.speech.speech_commands import SpeechCommandsSource
from rayfl.data.sources.speech.speech_files import part_of
from rayfl.errors import DataError
from tests.support.server import Server
from tests.support.speech_made import SPEAKERS, Made, damaged_archive, speech_archive, speech_files, write_wav


@pytest.fixture
def made(root: Path) -> Made:
    return speech_files(root / "speech_commands_v0.02")


def test_an_archive_is_read_without_being_unpacked_and_gives_the_same_file(
    tmp_path: Path, root: Path, made: Made, server: Server
) -> None:
    folder = root / "speech_commands_v0.02"
    source = SpeechCommandsSource()
    source.prepare(Order(offline=True))
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


def owners() -> dict[str, int]:
    """The speakers of the official test part, and how many clips each has."""
    clients = SpeechCommandsSource(part="test").open().clients
    assert clients is not None
    return Counter(clients.tolist())


def test_without_lists_the_rule_says_the_parts_and_lists_override_it(root: Path, made: Made) -> None:
    folder = root / "speech_commands_v0.02"
    for name in ("validation_list.txt", "testing_list.txt"):
        (folder / name).rename(root / name)
    assert owners() == dict.fromkeys(SPEAKERS["test"], 12)
    (folder / "testing_list.txt").write_text("yes/00176480_nohash_0.wav\n")
    with pytest.raises(DataError, match=r"lacks validation_list.txt, but has the other list; get both, or leave out"):
        SpeechCommandsSource().prepare(Order(force=True))
    (folder / "validation_list.txt").write_text("")
    SpeechCommandsSource().prepare(Order(force=True))
    assert owners() == {"00176480": 1}


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
@pytest.mark.two_cases
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
