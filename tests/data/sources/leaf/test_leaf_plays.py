"""Shakespeare from the text of the plays."""

from __future__ import annotations

import glob
import json
import os
import re
import textwrap
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayfl.data.sources.leaf import ALPHABET, Sampling, import_shakespeare_raw
from rayfl.data.sources.leaf.letters import letters
from rayfl.data.sources.leaf.plays import read_text, speaking_roles
from rayfl.data.sources.leaf.raw import Windows
from rayfl.data.sources.leaf.sampling import plan
from rayfl.data.sources.natural import NaturalDataset
from rayfl.errors import DataError
from rayfl.randomness import RandomStreams

REPOSITORY = Path(__file__).parents[4]
DATA = Path(os.environ.get("RAYFL_TEST_DATA") or REPOSITORY.parent / "shared" / "data")
needs_roles = pytest.mark.skipif(
    not (DATA / "shakespeare_roles.parquet").is_file(),
    reason=f"no shakespeare_roles.parquet in {DATA}; set RAYFL_TEST_DATA to the folder that has it",
)
SONNETS = """first line
1609

THE SONNETS

by William Shakespeare

  Poet. From fairest creatures we desire increase,
    That thereby beauty's rose might never die,
"""
PLAYS = """
1603

ALLS WELL, THAT ENDS

by William Shakespeare

Dramatis Personae
    not a line of anybody

ACT I. SCENE 1.

  King. Be  comfortable
    to my mother,   your mistress,
      and make much of her.

           Enter LAFEU

    He goes on.
  SIR Toby. What?
    Indeed?
  Sir TOBY. Yes.
  LADY. Only two
    lines.

THE END

1592

THE COMEDY OF ERRORS


by William Shakespeare

ACT I. SCENE 1. nothing
AEGEON. Proceed, Solinus,
to procure my fall,

DUKE. Merchant of Syracuse,
plead no more;
I am not partial.
<<THIS IS COPYRIGHT>>
to infringe our laws
ACT II. SCENE 1. nothing
of AEGEON's

1601

A MONOLOGUE

by William Shakespeare

  He. One,
    two,
    three.
"""


def test_roles_of_plays() -> None:
    # As in LEAF's data, a stage direction is part of the speech that it interrupts.
    assert speaking_roles(SONNETS + PLAYS) == {
        "ALLS_WELL__THAT_ENDS_KING": "Be comfortable to my mother, your mistress, and make much of her. Enter LAFEU "
        "He goes on. ",
        "ALLS_WELL__THAT_ENDS_SIR_TOBY": "What? Indeed? Yes. ",
        "THE_COMEDY_OF_ERRORS_AEGEON": "Proceed, Solinus, to procure my fall, ",
        "THE_COMEDY_OF_ERRORS_DUKE": "Merchant of Syracuse, plead no more; I am not partial. ",
    }


def test_nothing_after_the_plays_of_1994_is_read() -> None:
    lines = (SONNETS + PLAYS).splitlines()
    start = lines.index("ALLS WELL, THAT ENDS")
    for last, spoken in ((124_196, "Yes. "), (124_197, None)):
        pushed = [*lines[:start], *[""] * (last - lines.index("  Sir TOBY. Yes.")), *lines[start:]]
        assert pushed[last] == "  Sir TOBY. Yes."
        roles = speaking_roles("\n".join(pushed))
        said = roles.get("ALLS_WELL__THAT_ENDS_SIR_TOBY")
        assert said == (None if spoken is None else "What? Indeed? Yes. ")
        assert not any("COMEDY" in role for role in roles)


def test_a_play_without_title_is_refused() -> None:
    with pytest.raises(DataError, match=r"line 20 has 'by William Shakespeare', but no title two to seven lines above"):
        speaking_roles(SONNETS + "\n" * 9 + "\nby William Shakespeare\n")


def test_line_ends_of_all_systems_are_read(tmp_path: Path) -> None:
    for number, end in enumerate(("\n", "\r\n", "\r")):
        (tmp_path / str(number)).write_bytes((SONNETS + PLAYS).replace("\n", end).encode())
        assert read_text(tmp_path / str(number)) == SONNETS + PLAYS


def written(speeches: dict[str, str]) -> str:
    """A play in which each role says this, in lines of 60 characters."""
    lines = ["", "1600", "", "PLAY", "", "by William Shakespeare", ""]
    for role, text in speeches.items():
        cut = [text[place : place + 60] for place in range(0, len(text), 60)]
        lines += [f"  {role}. {cut[0]}", *(f"    {line}" for line in cut[1:]), ""]
    return SONNETS + "\n".join(lines)


def test_windows_and_their_division(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    text = {role: "".join(generator.choice(list(ALPHABET[10:]), 480)) for role in ("HE", "SHE")}
    (tmp_path / "p.txt").write_text(written({**text, "BOY": "no window " * 6 + "a" * 90}))
    report = import_shakespeare_raw(tmp_path / "p.txt", tmp_path / "s.parquet", Sampling(train_fraction=0.5))
    assert report.warnings == (f"{tmp_path / 'p.txt'}: 1 clients have too few samples for a train and a test part",)
    # 480 characters, a blank after each of 8 lines, and 80 less.
    assert report.samples == {"train": 2 * 204, "test": 2 * (204 - 79)}
    dataset = NaturalDataset(report.destination, 0, RandomStreams(0))
    assert dataset.names == ("PLAY_HE", "PLAY_SHE")
    said = speaking_roles(read_text(tmp_path / "p.txt"))
    for client, name in enumerate(dataset.names):
        parts = dataset.load(client)
        for split, places in (("train", range(204)), ("test", range(283, 408))):
            expected = [said[name][place : place + 81] for place in places]
            tokens = np.concatenate([parts[split].x.numpy(), parts[split].y.numpy()[:, None]], axis=1)
            assert ["".join(ALPHABET[token] for token in row) for row in tokens.tolist()] == expected


def test_no_input_of_the_test_part_shares_a_character_with_one_of_the_train_part() -> None:
    windows = Windows({"a": letters("x" * 80), "b": np.arange(1000).astype(np.uint8)})
    assert windows.sizes == {"b": 920}
    result, _ = plan(windows.sizes, Sampling(), 79)
    last_input = result["b"]["train"].max() + 79
    # The label of the last train window is the first character of the first test window.
    assert result["b"]["test"].min() == last_input + 1


@given(st.lists(st.integers(0, 200), min_size=1, max_size=6))
def test_windows_of_all_roles(lengths: list[int]) -> None:
    generator = np.random.default_rng(sum(lengths))
    texts = {f"{role}": generator.integers(0, 80, length).astype(np.uint8) for role, length in enumerate(lengths)}
    windows = Windows(texts)
    expected = [
        texts[role][place : place + 81].tolist() for role, size in windows.sizes.items() for place in range(size)
    ]
    assert windows.sizes == {role: len(text) - 80 for role, text in sorted(texts.items()) if len(text) > 80}
    part = windows.part(np.arange(len(expected)))
    assert np.concatenate([part.x, part.y[:, None]], axis=1).tolist() == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no role speaks more than 80 characters"),
        (SONNETS.encode(), "no role speaks more than 80 characters"),
        (b"\xff\xfe", "cannot be read as text"),
        (written({"HE": "é" * 300, "SHE": "a" * 300}).encode(), "role 'PLAY_HE': 'é' is not in LEAF's alphabet"),
        (None, r"p\.txt cannot be read as text"),
    ],
)
def test_another_text_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "p.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        import_shakespeare_raw(tmp_path / "p.txt", tmp_path / "s.parquet")
    assert not (tmp_path / "s.parquet").exists()


@needs_roles
def test_real_roles_have_as_many_windows_as_leaf_found() -> None:
    table = pq.read_table(DATA / "shakespeare_roles.parquet").to_pydict()
    texts = {role: letters(text) for role, text in zip(table["client"], table["text"], strict=True)}
    windows = Windows(texts)
    declared = dict(zip(table["client"], table["num_samples"], strict=True))
    assert windows.sizes == {role: declared[role] for role in sorted(declared) if declared[role]}
    assert sum(windows.sizes.values()) == 4_226_206
    result, said = plan(windows.sizes, Sampling(train_fraction=0.8), 79)
    for role, parts in result.items():
        size = declared[role]
        assert len(parts["train"]) == int(0.8 * size)
        assert len(parts["test"]) == size - int(0.8 * size) - 79
    assert len(windows.sizes) - len(result) == int(said[0].split()[0])
    # As many clients as papers have that use LEAF's division with its default of 0.9.
    assert len(plan(windows.sizes, Sampling(), 79)[0]) == 660


@needs_roles
def test_real_roles_come_back_from_plays_in_which_they_are_printed() -> None:
    table = pq.read_table(DATA / "shakespeare_roles.parquet").to_pydict()
    expected: dict[str, str] = {}
    plays: dict[str, list[str]] = {}
    for name, play, text in zip(table["client"], table["play"], table["text"], strict=True):
        role = name[len(re.sub(r"\W+", "_", f"{play}_".replace(" ", "_"))) :].replace("_", " ")
        cut = textwrap.wrap(text, max(1, min(70, len(text) // 4)), break_on_hyphens=False, break_long_words=False)
        # Lines of the play that is not indented may look like a speech of somebody else.
        if play != "THE COMEDY OF ERRORS" and len(cut) > 2:
            expected[name] = text
            plays.setdefault(play, []).extend([f"  {role}. {cut[0]}", *(f"    {line}" for line in cut[1:]), ""])
    printed = [line for play, lines in plays.items() for line in ["1600", play, "", "by William Shakespeare", *lines]]
    assert len(expected) > 1100
    assert speaking_roles(SONNETS + "\n".join(printed)) == expected


@needs_roles
@pytest.mark.skipif(not (DATA / "leaf" / "shakespeare").is_dir(), reason=f"no LEAF Shakespeare in {DATA}")
def test_real_windows_are_those_of_leafs_files() -> None:
    table = pq.read_table(DATA / "shakespeare_roles.parquet").to_pydict()
    text = dict(zip(table["client"], table["text"], strict=True))
    for split in ("train", "test"):
        (path,) = glob.glob(str(DATA / "leaf" / "shakespeare" / "data" / split / "*.json"))
        document = json.loads(Path(path).read_bytes())
        # LEAF cuts the role that it drew last.
        for role in document["users"][:5]:
            windows = Windows({role: letters(text[role])})
            result, _ = plan(windows.sizes, Sampling(train_fraction=0.8), 79)
            part = windows.part(result[role][split])  # type: ignore[index]
            assert ["".join(ALPHABET[token] for token in row) for row in part.x] == document["user_data"][role]["x"]
            assert [ALPHABET[token] for token in part.y] == document["user_data"][role]["y"]
